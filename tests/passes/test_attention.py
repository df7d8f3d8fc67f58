"""Masks made of positions: what is said of them is compared with the masks themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import FunctionCall, Graph, Ref
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.attention import call_attention_plainly
from gpipe_compiler.passes.pass_setting import PassSetting
from gpipe_compiler.passes.pipeline import transform
from gpipe_compiler.passes.shapes import annotate

INF = float("inf")
LEAST = torch.finfo(torch.float32).min
WINDOW = 5


def rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def causal(x: Tensor) -> Tensor:
    return rows(x)[None, :] <= rows(x)[:, None]


def packed(x: Tensor) -> Tensor:
    """As Hugging Face makes it: sequences that are packed into one row see only themselves."""
    positions = rows(x).unsqueeze(0).expand(x.shape[0], -1)
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    number = (steps != 1).cumsum(-1)
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    query, key = rows(x)[None, None, :, None], rows(x)[None, None, None, :]
    mask = query.new_ones((), dtype=torch.bool)
    mask = mask & (number[batch, query] == number[batch, key])
    mask = mask & (positions[batch, key] <= positions[batch, query])
    return mask.expand(x.shape[0], -1, x.shape[1], x.shape[1])


def window(width: int) -> Callable[[Tensor], Tensor]:
    return lambda x: causal(x) & (rows(x)[None, :] > rows(x)[:, None] - width)


def additive(least: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(causal(x), 0.0, least)[None, None]


CAUSAL = {
    "compared": causal,
    "the other way round": lambda x: ~(rows(x)[:, None] < rows(x)[None, :]),
    "packed": packed,
    "lower triangle": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(),
    "ones of floats": lambda x: torch.tril(torch.ones(x.shape[1], x.shape[1])).bool(),
    "upper triangle": lambda x: torch.full((x.shape[1], x.shape[1]), -INF).triu(diagonal=1),
    "infinity": additive(-INF),
    "least number": additive(LEAST),
    "filled": lambda x: torch.zeros(x.shape[1], x.shape[1]).masked_fill(~causal(x), -INF),
    "product": lambda x: (1.0 - causal(x).float()) * LEAST,
    "moved by one": lambda x: (rows(x)[:, None] + 1) > rows(x)[None, :],
    "viewed": lambda x: causal(x).view(1, 1, x.shape[1], x.shape[1]),
}
FULL = {
    "compared with itself": lambda x: (rows(x)[:, None] >= 0) | causal(x),
    "ones": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool),
    "a row": lambda x: (rows(x) >= 0)[None, None, None, :],
    "zeros": lambda x: torch.zeros(x.shape[1], x.shape[1]),
}
OTHERS = {
    "narrow window": window(WINDOW),
    "no own": lambda x: rows(x)[None, :] < rows(x)[:, None],
    "one more": lambda x: rows(x)[None, :] <= rows(x)[:, None] + 1,
    "backwards": lambda x: rows(x)[None, :] >= rows(x)[:, None],
    "as long as the example": lambda x: (rows(x) < 8)[None, :].expand(x.shape[1], -1),
    "of the data": lambda x: causal(x) & (x[..., 0] == x[..., 0])[:, None, None, :],
    "halves": lambda x: torch.where(causal(x), 0.0, -1.0),
    "bias": lambda x: torch.where(causal(x), 0.5, -INF),
    "twice as fast": lambda x: rows(x)[None, :] <= 2 * rows(x)[:, None],
    "in 16 bits": lambda x: rows(x).half()[None, :] <= rows(x).half()[:, None],
    "chunks": lambda x: causal(x) & (rows(x)[None, :] // 8 == rows(x)[:, None] // 8),
}


class Attends(nn.Module):
    """Attention of groups of heads under a mask."""

    def __init__(self, mask: Callable[[Tensor], Tensor], key_heads: int = 4) -> None:
        super().__init__()
        self.mask, self.key_heads = mask, key_heads
        self.q, self.k = nn.Linear(8, 16), nn.Linear(8, 4 * key_heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 4).transpose(1, 2)
        k = self.k(x).view(batch, length, self.key_heads, 4).transpose(1, 2)
        v = k.relu()
        if self.key_heads < 4:
            shape = (batch, self.key_heads, 4 // self.key_heads, length, 4)
            k = k[:, :, None, :, :].expand(shape).reshape(batch, 4, length, 4)
            v = v[:, :, None, :, :].expand(shape).reshape(batch, 4, length, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return found.transpose(1, 2).reshape(batch, length, 16)


def simplified(
    model: nn.Module, length: int = 8, fix: Sequence[str] = ()
) -> tuple[Graph, dict[str, object]]:
    """The graph, and the options of its one call of attention."""
    x = torch.randn(4, length, 8)
    graph = trace(model, (x,), loss=LossChoice.SUM_OF_SQUARES, fix=fix)
    graph = transform(graph, PassSetting(2))
    (call,) = [
        op.call
        for op in graph.ops
        if isinstance(op.call, FunctionCall) and op.call.function is F.scaled_dot_product_attention
    ]
    return graph, dict(call.kwargs)


def same_as_model(graph: Graph, model: nn.Module, batch: int, length: int = 8) -> None:
    x = torch.randn(batch, length, 8)
    model.zero_grad()
    expected = model(x)
    expected.square().sum().backward()
    tensors = {
        name: tensor.detach().clone().requires_grad_(graph.state[name].requires_grad)
        for name, tensor in graph.tensors.items()
    }
    values = Interpreter(graph, tensors).run({"x": x})
    values[graph.loss.value].backward()
    torch.testing.assert_close(values[graph.output_values[0]], expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(tensors[name].grad, parameter.grad)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_said_to_be_one(name):
    for length in (1, 2, 7):
        mask = CAUSAL[name](torch.randn(3, length, 8))
        blocked = ~mask if mask.dtype is torch.bool else mask <= LEAST
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        assert torch.equal(blocked, later.expand_as(blocked))
    model = Attends(CAUSAL[name])
    graph, options = simplified(model)

    assert options == {"is_causal": True}
    assert not any("arange" in op.name or "tri" in op.name for op in graph.ops)
    same_as_model(graph, model, 3)


@pytest.mark.parametrize("name", FULL)
def test_a_mask_of_nothing_goes(name):
    model = Attends(FULL[name])
    graph, options = simplified(model)

    assert options == {}
    same_as_model(graph, model, 3)


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_mask_stays(name):
    model = Attends(OTHERS[name])
    graph, options = simplified(model)

    assert "attn_mask" in options
    assert "is_causal" not in options
    same_as_model(graph, model, 3)


@pytest.mark.parametrize("width", [8, 100])
def test_a_window_as_long_as_the_sequence_is_causal_where_the_length_is_fixed(width):
    model = Attends(window(width))
    graph, options = simplified(model, fix=("x.1",))

    assert options == {"is_causal": True}
    same_as_model(graph, model, 3)
    _, options = simplified(model)
    assert "attn_mask" in options


class Buffered(Attends):
    """The mask is a part of a table that is loaded, or not."""

    def __init__(self, *, persistent: bool, key_heads: int = 4) -> None:
        super().__init__(lambda x: self.table[: x.shape[1], : x.shape[1]], key_heads)
        table = torch.ones(32, 32, dtype=torch.bool).tril()
        self.register_buffer("table", table, persistent=persistent)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_table_that_may_be_loaded_stays(persistent):
    model = Buffered(persistent=persistent)
    graph, options = simplified(model)

    assert ("attn_mask" in options) is persistent
    same_as_model(graph, model, 5)


def test_a_mask_that_is_given_stays_though_it_lets_all_pass(builder):
    q = torch.randn(3, 2, 5, 4)
    b = builder(q=q, mask=torch.ones(3, 1, 5, 5, dtype=torch.bool))
    out = b.call(
        F.scaled_dot_product_attention, Ref("q"), Ref("q"), Ref("q"), attn_mask=Ref("mask")
    )
    graph = annotate(b.graph(b.call(operator.neg, out)), 3)

    assert call_attention_plainly(graph) is graph


@pytest.mark.parametrize("key_heads", [1, 2])
def test_groups_of_heads_are_not_repeated(key_heads):
    model = Attends(packed, key_heads)
    graph, options = simplified(model)

    assert options == {"is_causal": True, "enable_gqa": True}
    assert not any("expand" in op.name for op in graph.ops)
    same_as_model(graph, model, 5)


class Cross(nn.Module):
    """More queries than keys; the second mask is aligned with the end of the keys."""

    def __init__(self, *, from_end: bool) -> None:
        super().__init__()
        self.q, self.from_end = nn.Linear(8, 8), from_end

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x)[:, None], x[:, None, :4]
        late = 4 if self.from_end else 0
        mask = rows(x)[None, :4] <= rows(x)[:, None] - late
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)[:, 0, late:]


@pytest.mark.parametrize("from_end", [False, True])
def test_only_as_many_queries_as_keys_are_causal(from_end):
    assert "attn_mask" in simplified(Cross(from_end=from_end))[1]


def test_dropout_stays():
    class Drops(Attends):
        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)[:, None]
            p = 0.5 if self.training else 0.0
            found = F.scaled_dot_product_attention(q, q, q, attn_mask=causal(x), dropout_p=p)
            return found[:, 0]

    _, options = simplified(Drops(causal))
    assert options.keys() == {"dropout_p", "is_causal"}
