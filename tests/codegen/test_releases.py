"""The most that an emitted stage holds while a kernel of it runs, counted: as much as the same ops
hold where every value is let go of right after its last use, save for a few small tensors. No `del`
stands in it that does not lower this peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import StageSource, write_stages
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.passes.memory_trace.part import GraphPart, PartModule
from gpipe_compiler.plan import Plan


class Held(TorchDispatchMode):
    """Notes how many bytes are held when each kernel ends."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.curve: list[tuple[str, int]] = []
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        self.curve.append((str(func), self.now))
        return returned

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.now += size

        def gone() -> None:
            self._seen.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


class Chains(nn.Module):
    """Nested calls, names that are bound anew and names that are not, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.norm(self.first(x)))
        x = self.third(F.gelu(self.second(skip)))
        x = torch.cat([F.silu(x), F.gelu(self.second(skip))], dim=1)
        left, right = x.chunk(2, dim=1)
        size = right.shape[0]
        both = F.gelu(left) * torch.sigmoid(right)
        largest, _ = both.max(dim=1, keepdim=True)
        y = F.relu(self.third(both + largest))
        return self.head(self.pool(F.gelu(y)).view(size, -1))


class Modes(nn.Module):
    """Values that one mode or the other lets go of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        a = F.gelu(self.first(x))
        if self.training:
            a = F.gelu(a)
            b = self.second(a * 2)
        else:
            b = self.first(a)
        c = F.gelu(b)
        d = F.softplus(c)
        return self.second(F.gelu(d))


class Attention(nn.Module):
    """Sizes that are asked for early and used late, products of matrices, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        scores = q @ k.transpose(-2, -1) / 4.0
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(mask, float("-inf"))
        mixed = scores.softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(h.shape))
        return x + self.down(F.gelu(self.up(self.norm(x)))).view(h.shape)


class Late(nn.Module):
    """The stage's own device, asked for when what came in has been let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        wide = F.softplus(x.repeat(1, 2))
        wide = F.gelu(wide) * torch.arange(wide.shape[1])
        return F.gelu(wide)


CASES = {
    "late": (Late, torch.randn(8, 16)),
    "chains": (Chains, torch.randn(2, 3, 8, 8)),
    "modes": (Modes, torch.randn(8, 16)),
    "attention": (Attention, torch.randn(2, 24, 16)),
}


def stage_of(made: Plan, source: StageSource) -> nn.Module:
    namespace: dict[str, Any] = {}
    exec(source.text, namespace)
    return namespace[source.class_name]()


def held(module: nn.Module, arguments: list[Tensor], training: bool) -> list[tuple[str, int]]:
    module.train(training)(*arguments)  # a part of a graph makes its modules when it first runs
    with Held() as watch, torch.set_grad_enabled(training):
        returned = module.train(training)(*arguments)
    del returned
    return watch.curve


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("label", CASES)
def test_what_is_held_is_what_is_needed(label: str, training: bool, in_place: bool) -> None:
    cls, x = CASES[label]
    graph = trace(cls(), x, training=training, loss=LossChoice.SUM_OF_SQUARES)
    made = plan(graph, stages=1, microbatches=1, policy=Policy(in_place=in_place))
    graph = made.graph
    assert graph is not None
    stage = made.stages[0]
    (source,) = write_stages(made, CodeFacts.of(graph)).stages
    ops = tuple(graph.op_of[name] for name in stage.ops if name not in graph.loss_only)
    part = GraphPart(graph, ops, source.inputs, source.outputs, ())
    tensors = {
        name: torch.empty(state.shape, dtype=state.dtype).requires_grad_(
            training and state.requires_grad
        )
        for name, state in graph.state.items()
    }

    interpreter = Interpreter(graph, tensors, training)
    ideal = held(PartModule(part, interpreter, {}, lambda _: None), [x], training)
    actual = held(stage_of(made, source), [x], training)

    assert [kernel for kernel, _ in actual] == [kernel for kernel, _ in ideal], source.text
    small = max(value.bytes for value in graph.values.values()) // 20
    most, needed = (max(now for _, now in curve) for curve in (actual, ideal))
    assert most - needed <= small, f"{most} for {needed}\n{source.text}"
    for shorter in without_a_deletion(source.text):
        namespace = {}
        exec(shorter, namespace)
        curve = held(namespace[source.class_name](), [x], training)
        assert max(now for _, now in curve) > most, f"{most} without a deletion\n{shorter}"


def without_a_deletion(text: str) -> Iterator[str]:
    """The text without each of its lines that delete."""
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if line.strip().startswith("del "):
            yield "\n".join((*lines[:place], *lines[place + 1 :]))
