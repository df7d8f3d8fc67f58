"""Which state is written without looking at samples, and what is kept out of it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from gpipe_compiler.compile import trace
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.written_once import sample_writers, written_once


class State(nn.Module):
    """Two layers, a copy of the second one, and buffers that cases write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.slow = copy.deepcopy(self.last).requires_grad_(False)
        for name in ("one", "other", "third"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.write(x)
        y = self.last(self.first(x).tanh()) + self.slow(x)
        return y * (1 + self.one + self.other + self.third)

    def write(self, x: Tensor) -> None:
        raise NotImplementedError


class Counts(State):
    def write(self, x: Tensor) -> None:
        self.one += 1
        self.other += len(x)
        self.third += x.detach().sum()


class Follows(State):
    def write(self, x: Tensor) -> None:
        with torch.no_grad():
            self.slow.weight.lerp_(self.last.weight, 0.1)
            self.slow.bias.lerp_(x.mean(0), 0.1)


class FollowsByLists(State):
    def write(self, x: Tensor) -> None:
        with torch.no_grad():
            slow, fast = [self.slow.weight, self.slow.bias], [self.last.weight, self.last.bias]
            torch._foreach_lerp_(slow, fast, 0.1)


class CarriesOver(State):
    """`one` is made of `third` as the micro-batch before has left it, `other` of `one`."""

    def write(self, x: Tensor) -> None:
        self.other.copy_(self.one)
        self.one.copy_(self.third + 1)
        self.third += x.detach().mean()


class Sizes(State):
    """Where sizes alone tell: within a block, and in a number that none is taken for."""

    def write(self, x: Tensor) -> None:
        with torch.no_grad():
            self.one += torch.ones(x.shape[0]).sum()
            self.other += torch.ones(x.shape[1]).sum()
        self.third.copy_(self.first.weight[:1].detach().expand(x.shape[0], -1)[0].sum())


class Draws(State):
    def write(self, x: Tensor) -> None:
        self.one.copy_(torch.rand(()))
        self.other.copy_(torch.rand(len(x)).amax())


class OfTrained(State):
    """A trained weight that forward bounds is another one for the next micro-batch."""

    def write(self, x: Tensor) -> None:
        with torch.no_grad():
            self.last.bias.mul_(0.5)
            self.one.copy_(self.last.bias.sum())
            self.other.copy_(self.first.bias.sum())


@pytest.mark.parametrize(
    ("model", "once"),
    [
        (Counts, {"one"}),
        (Follows, {"slow.weight"}),
        (FollowsByLists, {"slow.weight", "slow.bias"}),
        (CarriesOver, set()),
        (Sizes, {"other", "third"}),
        (Draws, {"one"}),
        (OfTrained, {"other"}),
    ],
)
def test_what_looks_at_samples_is_none(model: type[State], once: set[str]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    graph = trace(model(), (x,), target=x, loss_fn=F.mse_loss)

    assert written_once(graph) == once
    written = frozenset().union(*sample_writers(graph).values())
    assert written == effects(graph).written_states - once


def test_of_batchnorm_nothing_is() -> None:
    """`--batchnorm` says what becomes of it, of its counter too."""

    class Own(nn.BatchNorm1d):
        """As several libraries write it."""

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.num_batches_tracked.add_(1)
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(x, mean, var, self.weight, self.bias, self.training, 0.1)

    model = nn.Sequential(nn.Linear(6, 6), Own(6), nn.BatchNorm1d(6))
    x = torch.randn(4, 6)
    graph = trace(model, (x,), target=x, loss_fn=F.mse_loss)

    assert effects(graph).written_states
    assert written_once(graph) == frozenset()


def test_a_power_iteration_is() -> None:
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 6)), nn.utils.spectral_norm(nn.Linear(6, 6))
    )
    x = torch.randn(4, 6)
    graph = trace(model, (x,), target=x, loss_fn=F.mse_loss)

    assert written_once(graph) == effects(graph).written_states
    assert len(written_once(graph)) >= 3


def test_in_either_mode() -> None:
    """What evaluations write goes on once as well; what looks at samples in one mode does not."""

    class Both(State):
        def forward(self, x: Tensor) -> Tensor:
            self.one += 1
            self.other += 1 if self.training else len(x)
            return self.last(self.first(x)) * self.one.clamp(max=3)

    x = torch.randn(4, 6)

    assert written_once(trace(Both(), (x,), target=x, loss_fn=F.mse_loss)) == {"one"}
    assert written_once(trace(Both(), (x,), training=False)) == {"one"}
