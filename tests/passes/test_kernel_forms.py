"""Forms of kernels that are remembered, against what torch's own fakes make of every call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import groupby
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.options.choices import LossChoice
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.passes.kernel_forms import KernelForms
from gpipe_compiler.passes.rehearsal import rehearse
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.tapes import Tape


class Attention(nn.Module):
    """Layers with dropout, views, a split, and a tied projection."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8, padding_idx=0)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for _ in range(2):
            q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            x = self.norm(x + mixed.transpose(1, 2).reshape(x.shape))
        return x @ self.words.weight.t()


class Convolutions(nn.Module):
    """Kernels with several results, in-place ones, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        left, right = self.second(x).chunk(2, 1)
        return torch.cat([F.max_pool2d(left, 2), F.avg_pool2d(right.mul(2.0), 2)], 1).mean((2, 3))


def tapes(graph: Graph, split: bool) -> dict[str, object]:
    """Those of a graph, made as plans are: without collections, which come at any time."""
    ops = [op.name for op in graph.ops]
    with uncollected():
        found = rehearse(graph, ops, [source.name for source in graph.inputs], [], split=split)
    fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    return {name: turns(it) if isinstance(it, Tape) else it for name, it in fields.items()}


def turns(tape: Tape) -> list[tuple[bool, list[tuple[int, int]] | list[int]]]:
    """What begins in a row, and for which op, and what ends in a row, by turns.

    What ends together may end in any order, the first of it while an op is still at work.
    """
    found: list[tuple[bool, list[tuple[int, int]] | list[int]]] = []
    for alive, row in groupby(tape.events, key=lambda event: event.alive):
        events = list(row)
        if alive:
            found.append((alive, [(event.block, event.op) for event in events]))
        else:
            found.append((alive, sorted(event.block for event in events)))
    return found


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Attention, lambda: torch.randint(0, 12, (4, 6))),
        (Convolutions, lambda: torch.randn(4, 3, 8, 8)),
    ],
)
def test_tapes_are_those_of_torchs_own_fakes(
    model: type[nn.Module], inputs: Callable[[], Tensor]
) -> None:
    given = inputs()
    graph = annotate(trace(model(), (given,), loss=LossChoice.SUM_OF_SQUARES), len(given))
    known = KernelForms.known
    hits = []

    def counting(self: KernelForms, key: object, args: object) -> object:
        found = known(self, key, args)  # type: ignore[arg-type]  # as given
        hits.append(found is not None)
        return found

    def unknown(*_: object) -> None:
        """No mock of its own: those hold what they are called with."""

    for split in (False, True):
        with mock.patch.object(KernelForms, "known", unknown):
            expected = tapes(graph, split)
        with mock.patch.object(KernelForms, "known", counting):
            assert tapes(graph, split) == expected
    assert sum(hits) > 20


def test_what_is_told_apart() -> None:
    mode = HostFakes()
    with mode:
        x = torch.empty(4, 6)
        ones = [x * 2, x * 2.0, x.to(torch.float64) * 2, x.t() * 2, torch.empty(6, 4) * 2]
        again = [x * 2, x * 2.0, x.to(torch.float64) * 2, x.t() * 2, torch.empty(6, 4) * 2]
        whole = torch.empty(4, 6, dtype=torch.int64)
        kinds = [whole * 2, whole * 2.0, whole * True, whole * 2, whole * 2.0, whole * True]
        views = [x[1:3], x[1:3], x.view(24), x.view(24), x.t(), x.t()]
        halves = x.chunk(2, 1)
    for one, other in zip(ones, again, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert [kind.dtype for kind in kinds] == 2 * [torch.int64, torch.float32, torch.int64]
    for view in (*views, *halves):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert [view.storage_offset() for view in views] == [6, 6, 0, 0, 0, 0]
    assert [tuple(view.stride()) for view in views[4:]] == [(1, 6)] * 2


def test_what_numbers_decide_is_left_to_torch() -> None:
    mode = HostFakes()
    with mode:
        x = torch.empty(5)
        with pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException):
            torch.nonzero(x)
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            x.sum().item()
        assert torch.tensor(3.0).item() == 3.0
