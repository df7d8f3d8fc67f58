"""Random ops draw from what is computed, and leave everybody's generators alone."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from gpipe_compiler.runtime.core.random import OverDraws, SeededRandom

X = torch.ones(50)

OPS = {
    "with a generator argument": lambda: F.dropout(X, 0.5),
    "without one": lambda: torch.rand(50),
    "of another shape": lambda: torch.randperm(50),
    "in place": lambda: torch.empty(50).normal_(),
    "of noise": lambda: torch.randn_like(X),
    "fused": lambda: F.scaled_dot_product_attention(
        X.view(1, 1, 5, 10), X.view(1, 1, 5, 10), X.view(1, 1, 5, 10), dropout_p=0.5
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_numbers_depend_on_the_key_alone(name):
    """Equal keys give equal numbers; every part of the key counts."""
    draw = OPS[name]

    def drawn(*key):
        torch.rand(3)  # the caller's generator moves on
        with SeededRandom(*key[:3], numbers=key[3:]):
            return draw()

    first = drawn(1, 2, 3, 4)
    assert torch.equal(first, drawn(1, 2, 3, 4))
    for other in ((0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)):
        assert not torch.equal(first, drawn(*other))


@pytest.mark.parametrize("name", OPS)
def test_the_callers_generator_stays_where_it_was(name):
    """What the caller draws next is what it would have drawn."""
    before = torch.get_rng_state()
    with SeededRandom(1, 2, 3, numbers=(0,)):
        OPS[name]()

    assert torch.equal(before, torch.get_rng_state())


def test_ops_are_numbered_in_order():
    """Two ops in one stage draw as they would in two."""
    with SeededRandom(1, 2, 3, numbers=(7, 9)):
        seven, nine = torch.rand(4), torch.rand(4)
    with SeededRandom(1, 2, 3, numbers=(9,)):
        assert torch.equal(nine, torch.rand(4))
        ten = torch.rand(4)
    with SeededRandom(1, 2, 3, numbers=range(7, 11)):
        assert torch.equal(seven, torch.rand(4))
        torch.rand(4)
        assert torch.equal(nine, torch.rand(4))
        assert torch.equal(ten, torch.rand(4))


def test_a_generator_of_the_callers_own_is_used():
    """It is not overruled."""
    expected = torch.rand(5, generator=torch.Generator().manual_seed(5))
    with SeededRandom(1, 2, 3, numbers=(0,)):
        assert torch.equal(expected, torch.rand(5, generator=torch.Generator().manual_seed(5)))


ROWS = torch.rand(4, 6, 8)
LSTM = nn.LSTM(8, 8, num_layers=3, dropout=0.2)

MAY_DRAW = {
    "attention": lambda: F.scaled_dot_product_attention(ROWS, ROWS, ROWS),
    "attention that drops": lambda: F.scaled_dot_product_attention(ROWS, ROWS, ROWS, dropout_p=0.1),
    "dropout": lambda: F.dropout(ROWS, 0.1),
    "dropout of nothing": lambda: F.dropout(ROWS, 0.0),
    "dropout of all": lambda: F.dropout(ROWS, 1.0),
    "dropout of no elements": lambda: F.dropout(ROWS[:0], 0.5),
    "dropout by name": lambda: F.dropout(input=ROWS, p=0.5, training=True),
    "dropout in eval mode": lambda: F.dropout(ROWS, 0.5, training=False),
    "its own kernel": lambda: torch.native_dropout(ROWS, 0.5, True),
    "its own kernel in eval mode": lambda: torch.native_dropout(ROWS, 0.5, False),
    "whole channels": lambda: F.dropout1d(ROWS, 0.5),
    "for SELU": lambda: F.feature_alpha_dropout(ROWS, 0.5, training=True),
    "for SELU in eval mode": lambda: F.alpha_dropout(ROWS, 0.5),
    "recurrent": lambda: LSTM(ROWS),
    "rrelu": lambda: F.rrelu(ROWS - 0.5, training=True),
    "rrelu in eval mode": lambda: F.rrelu(ROWS - 0.5),
    "bernoulli": lambda: torch.bernoulli(ROWS),
    "poisson": lambda: torch.poisson(ROWS),
    "multinomial": lambda: torch.multinomial(ROWS[0], 2),
    "like another": lambda: torch.randint_like(ROWS, 7),
    "in place": lambda: torch.empty(3).exponential_(),
    "normal": lambda: torch.normal(ROWS, 1.0),
    "gumbel": lambda: F.gumbel_softmax(ROWS),
    "plain": lambda: ROWS @ ROWS.mT,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", MAY_DRAW)
def test_an_op_is_random_when_it_draws(name, grad):
    """Held against torch's own generator, which moves on where an op draws."""
    with torch.set_grad_enabled(grad):
        before = torch.get_rng_state()
        MAY_DRAW[name]()
        moved = not torch.equal(before, torch.get_rng_state())
        with SeededRandom(1, 2, 3, numbers=()) as random:
            MAY_DRAW[name]()

    assert (random.position > 0) == moved


@pytest.mark.parametrize("name", [*MAY_DRAW, *OPS])
def test_a_mode_around_draws_alone_gives_the_same(name):
    """As one around everything, and the caller's generator stays where it was."""
    run = (MAY_DRAW | OPS)[name]

    def drawn(around):
        random = SeededRandom(1, 2, 3, numbers=(4, 6))
        with around(random):
            results = run(), run(), torch.rand(3)
        return random.position, tree_leaves(results)

    before = torch.get_rng_state()
    position, found = drawn(OverDraws)
    assert torch.equal(before, torch.get_rng_state())

    expected_position, expected = drawn(lambda random: random)
    assert position == expected_position
    assert all(map(torch.equal, found, expected))


class Seen(SeededRandom):
    """Notes the ops that it stands around."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_no_dispatch_mode_stands_around_what_does_not_draw():
    """Nor around dropout and attention, which draw from a process-wide generator."""
    model = nn.Sequential(
        nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.ReLU(), nn.Dropout(0.5),
        nn.Unflatten(1, (2, 2)), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.GroupNorm(3, 3),
        nn.MaxPool2d(2), nn.Flatten(), nn.Softmax(1),
    )  # fmt: skip
    random = Seen(1, 2, 3, numbers=range(9))
    random.ops = []

    with OverDraws(random):
        y = model(torch.arange(8).view(2, 4))
        F.scaled_dot_product_attention(ROWS, ROWS, ROWS, dropout_p=0.1)
        F.cross_entropy(-(2 * y[:, :3].float()), torch.tensor([0, 1])).backward()
        assert random.ops == []
        torch.rand(y.shape[0])

    assert random.position == 3
    assert random.ops == ["aten.rand.default"]


def test_inference_mode_draws_the_same():
    """There composite ops come undivided."""

    def attention():
        with SeededRandom(1, 2, 3, numbers=(4,)):
            return F.scaled_dot_product_attention(ROWS, ROWS, ROWS, dropout_p=0.3)

    expected = attention()
    with torch.inference_mode():
        assert torch.equal(expected, attention())


def test_a_shared_draw_is_that_of_every_microbatch():
    """Its seed has the step in it, and no micro-batch."""

    def drawn(step, microbatch):
        with SeededRandom(1, step, microbatch, numbers=(4, 5), shared=(5,)):
            return torch.rand(4), torch.rand(4)

    (own, shared), (other, same), (_, later) = drawn(2, 0), drawn(2, 1), drawn(3, 0)

    assert not torch.equal(own, other)
    assert torch.equal(shared, same)
    assert not torch.equal(shared, later)


def test_a_generator_by_position_is_used_too():
    def drawn():
        return torch.poisson(ROWS, torch.Generator().manual_seed(5))

    expected = drawn()
    with SeededRandom(1, 2, 3, numbers=(0,)):
        assert torch.equal(expected, drawn())


@pytest.mark.parametrize("around", [SeededRandom.again, lambda random, _: OverDraws(random)])
def test_threads_do_not_disturb_each_other(around):
    """Stages on threads share the process-wide generator."""

    def draw():
        with around(SeededRandom(1, 2, 3, numbers=range(200)), 0):
            return torch.stack([F.dropout(X) for _ in range(200)])

    expected = draw()
    found = []
    threads = [threading.Thread(target=lambda: found.append(draw())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(expected, tensor) for tensor in found)
