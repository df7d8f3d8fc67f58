"""Masks lose the conditions that hold everywhere, and indices of all rows and columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph, called
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.attention_masks import simplify_padding_masks
from gpipe_compiler.passes.shapes import annotate


class Encoder(nn.Module):
    """The mask as transformers writes it; `twist` is what is not so simple."""

    def __init__(self, twist: str) -> None:
        super().__init__()
        self.qkv, self.twist = nn.Linear(8, 24), twist

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor | None]:
        samples, length, _ = x.shape
        rows = torch.arange(samples)[:, None, None, None]
        queries = torch.arange(length)[None, None, :, None]
        keys = torch.arange(length)[None, None, None]
        if self.twist == "backwards":
            keys = length - 1 - keys
        if self.twist == "queries":
            keys = queries
        holds = queries >= (1 if self.twist == "some rows" else 0)
        if self.twist == "causal":
            holds = keys <= queries
        mask = queries.new_ones([], dtype=torch.bool) & holds & padding.bool()[rows, keys]
        mask = mask.expand(samples, -1, length, length)
        q, k, v = (p.view(samples, length, 2, 4).transpose(1, 2) for p in self.qkv(x).split(8, -1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out, mask if self.twist == "returned" else None


def kinds(graph: Graph) -> list[str]:
    return [name for op in graph.ops if (name := called(op.call)) in ("and_", "expand", "ge", "le")]


@pytest.mark.parametrize(
    ("twist", "left"),
    [
        ("", []),
        ("queries", []),  # the same for all keys
        ("backwards", []),
        ("causal", ["le", "and_"]),
        ("some rows", ["ge", "and_"]),
        ("returned", ["ge", "and_", "expand"]),
    ],
)
def test_what_is_left_is_what_depends_on_the_samples(twist, left):
    torch.manual_seed(0)
    model, x = Encoder(twist), torch.randn(4, 5, 8)
    padding = (torch.arange(5) < torch.randint(2, 6, (4, 1))).long()
    graph = trace(model, (x, padding), loss=LossChoice.SUM_OF_SQUARES)

    found = annotate(simplify_padding_masks(graph), graph.batch_size)

    assert set(kinds(graph)) >= {"and_"}
    assert [kind for kind in kinds(found) if kind != "expand" or "expand" in left] == left
    states = {name: tensor.detach() for name, tensor in found.tensors.items()}
    for samples in (4, 7, 1):
        x = torch.randn(samples, 5, 8)
        padding = torch.tensor([[1, 1, 0, 1, 0]]).repeat(samples, 1).roll(samples, -1)
        given = dict(zip((source.name for source in found.inputs), (x, padding), strict=True))
        ran = Interpreter(found, states).run(given)
        expected, _ = model(x, padding)
        (name, *_) = [value for value in found.ends if value != found.loss.value]
        torch.testing.assert_close(ran[name], expected, equal_nan=True)


class Joined(Encoder):
    """Returns the conjunction itself, as large as the mask in it."""

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = super().forward(x, padding)
        return out, padding.new_ones(1, 5, dtype=torch.bool) & padding.bool()


def test_what_the_model_returns_stays():
    torch.manual_seed(0)
    model, x, padding = Joined(""), torch.randn(4, 5, 8), torch.ones(4, 5)
    graph = trace(model, (x, padding), training=False)

    found = annotate(simplify_padding_masks(graph), graph.batch_size)

    states = {name: tensor.detach() for name, tensor in found.tensors.items()}
    given = dict(zip((source.name for source in found.inputs), (x, padding), strict=True))
    ran = Interpreter(found, states).run(given)
    torch.testing.assert_close([ran[name] for name in found.ends], list(model(x, padding)))


class Written(nn.Module):
    """Writes to a copy of all rows and columns of a mask, whose strides a view would not have."""

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        seen = padding.bool().t().contiguous().t()
        mask = seen[torch.arange(x.shape[0])[:, None], torch.arange(5)[None]]
        other = mask.t().contiguous()
        other[0] = False
        return F.scaled_dot_product_attention(x, x, x, mask[:, None]), other.t(), seen * 1.0


def test_indices_are_copies_where_these_are_written_to():
    torch.manual_seed(0)
    model, x, padding = Written(), torch.randn(4, 5, 8), torch.ones(4, 5)
    graph = trace(model, (x, padding), training=False)

    found = annotate(simplify_padding_masks(graph), graph.batch_size)

    given = dict(zip((source.name for source in found.inputs), (x, padding), strict=True))
    ran = Interpreter(found, {}).run(given)
    expected = dict(zip(found.output_values, model(x, padding), strict=True))
    for name, tensor in expected.items():
        torch.testing.assert_close(ran[name], tensor)


def test_ops_that_a_user_names_stay():
    model, x = Encoder(""), torch.randn(4, 5, 8)
    graph = trace(model, (x, torch.ones(4, 5)), loss=LossChoice.SUM_OF_SQUARES)
    pinned = {op.name for op in graph.ops}

    assert simplify_padding_masks(graph, pinned) is graph
