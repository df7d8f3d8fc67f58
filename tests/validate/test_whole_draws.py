"""Draws of a mini-batch in one piece, compared with those of its micro-batches one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.validate.draws import ApartError, Draws, DrawsOfAll, DrawsOfOne

SIZES = (3, 2, 2)
SEED = 7


def draws_of(count: int, shared: tuple[int, ...] = ()) -> Draws:
    numbers = tuple(range(count))
    return Draws(SEED, numbers, frozenset(shared), tuple(f"op_{number}" for number in numbers))


def both(
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    shared: tuple[int, ...] = (),
    *,
    dim: int = 0,
    inner: bool = False,
) -> tuple[Tensor, Tensor, DrawsOfAll]:
    """What a function makes of a batch in one piece, and of its micro-batches; and the mode."""
    draws = draws_of(8, shared)
    parts = []
    for microbatch, part in enumerate(x.split(SIZES, dim)):
        with SeededRandom(SEED, 0, microbatch, draws.numbers, draws.shared):
            parts.append(function(part.clone()))
    calls = {}
    for microbatch, part in enumerate(x.split(SIZES, dim)):
        with DrawsOfOne(draws, microbatch) as one:
            function(part.clone())
        calls[SIZES[microbatch]] = one.calls
    with DrawsOfAll(draws, calls, SIZES, inner=inner) as whole:
        together = function(x.clone())
    return together, torch.cat(parts, dim), whole


def stochastic_depth(x: Tensor, mode: str) -> Tensor:
    """As torchvision has it."""
    sizes = [x.shape[0] if mode == "row" else 1, *[1] * (x.ndim - 1)]
    noise = torch.empty(sizes, dtype=x.dtype).bernoulli_(0.6).div_(0.6)
    return x * noise


ATTENTION = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True)


def laid_out(x: Tensor) -> Tensor:
    """As convolutions do, which choose the order in memory by the number of samples."""
    return x.mT.contiguous().mT if len(x) != SIZES[-1] else x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 2, 0.4, inplace=True),
    "in another order": lambda x: F.dropout(laid_out(x), 0.4),
    "channels": lambda x: F.dropout1d(x, 0.4),
    "noise": lambda x: x + torch.randn_like(x) + torch.rand(x.shape[0], 1, 1),
    "like rows that are expanded": lambda x: x + torch.rand_like(x[0, :1, :1].expand(x.shape)),
    "rows dropped": lambda x: stochastic_depth(x, "row"),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "multinomial": lambda x: torch.multinomial(x[:, 0].exp(), 2),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "heads": lambda x: ATTENTION(x, x, x)[0],
    "flattened": lambda x: F.dropout(x.reshape(-1, 4), 0.4).reshape(x.shape),
    "several": lambda x: F.dropout(torch.tanh(F.dropout(x, 0.3)) + torch.rand_like(x), 0.3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_draw_of_the_batch_is_that_of_its_parts(name: str) -> None:
    torch.manual_seed(0)
    together, parts, _ = both(FUNCTIONS[name], torch.randn(7, 5, 4))

    torch.testing.assert_close(together, parts)


@pytest.mark.parametrize("name", ["dropout", "bernoulli", "normal", "rrelu", "gumbel"])
def test_the_batch_may_lie_in_another_dimension(name: str) -> None:
    function = FUNCTIONS[name]
    swapped = {
        "noise": lambda x: x + torch.rand(1, x.shape[1], 4),
        "rows dropped": FUNCTIONS["dropout"],
    }
    together, parts, _ = both(swapped.get(name, function), torch.randn(5, 7, 4), dim=1)

    torch.testing.assert_close(together, parts)


def test_samples_may_follow_each_other_fastest() -> None:
    """Time by batch, flattened: which of both it is, the mode is told."""

    def time_first(x: Tensor) -> Tensor:
        return F.dropout(x.reshape(-1, 4), 0.4).reshape(x.shape)

    x = torch.randn(5, 7, 4)
    wrong, parts, mode = both(time_first, x, dim=1)
    right, _, _ = both(time_first, x, dim=1, inner=True)

    assert mode.flattened
    assert not torch.equal(wrong, parts)
    torch.testing.assert_close(right, parts)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: stochastic_depth(x, "batch"),
        lambda x: x * (torch.rand(1) < 0.5),
        lambda x: x @ F.dropout(torch.ones(4, 4), 0.5),
    ],
    ids=["batch dropped", "layer dropped", "weights dropped"],
)
def test_a_draw_without_a_batch_dimension_is_shared(function: Callable[[Tensor], Tensor]) -> None:
    together, parts, _ = both(function, torch.randn(7, 5, 4), shared=(0,))

    torch.testing.assert_close(together, parts)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x + torch.rand(len(x), len(x)).sum(), "pairs of samples"),
        (lambda x: x[torch.randperm(len(x))], "pairs of samples"),
        (lambda x: x + torch.rand(len(x) + 1)[1:, None, None], "in proportion"),
        (lambda x: x + torch.rand(2).sum(), "inside a kernel"),
    ],
    ids=["square", "order", "one more", "not shared"],
)
def test_another_draw_is_refused(function: Callable[[Tensor], Tensor], reason: str) -> None:
    with pytest.raises(ApartError, match=reason) as raised:
        both(function, torch.randn(7, 5, 4))

    assert raised.value.op == "op_0"


def test_gradients_flow_through_the_draws_of_all() -> None:
    """The masks that autograd keeps are those that were put together."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def loss(x: Tensor) -> Tensor:
        return F.rrelu(F.dropout(layer(x), 0.4), training=True).square().sum((1, 2))

    together, parts, _ = both(loss, torch.randn(7, 5, 4))
    whole, added = (torch.autograd.grad(made.sum(), layer.weight)[0] for made in (together, parts))

    torch.testing.assert_close(whole, added)


def test_the_first_sample_of_each_part_is_where_it_was() -> None:
    """A mask that says whose it is."""
    starts = [0, *itertools.accumulate(SIZES)][:-1]
    together, _, _ = both(lambda x: torch.rand(len(x)), torch.randn(7, 1))

    for microbatch, (start, size) in enumerate(zip(starts, SIZES, strict=True)):
        with SeededRandom(SEED, 0, microbatch, (0,)):
            assert torch.equal(together[start : start + size], torch.rand(size))
