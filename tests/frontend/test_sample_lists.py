"""Lists of a batch's samples: joined again they are the batch, at any number of samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.options import LossChoice


class Listing(nn.Module):
    """Has the samples in Python for a while."""

    def __init__(self, through: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        listed = self.through(self.first(x))
        return self.last(listed).reshape(x.shape)


def held(features: Tensor) -> Tensor:
    """As LLaVA has them between two functions."""
    found = {"features": list(features)}
    return torch.cat(found["features"], dim=0)


def written_between(features: Tensor) -> Tensor:
    features = features.detach()  # of which autograd lets views be written to
    samples = features.unbind()
    features.mul_(2)
    return torch.stack(samples)


def written_after(features: Tensor) -> Tensor:
    joined = torch.stack(list(features))
    joined.mul_(2)
    return joined + features


class HandedOn(nn.Module):
    """Calls a layer while a function is given the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.joined(list(features), features)

    def joined(self, samples: list[Tensor], features: Tensor) -> Tensor:
        return self.layer(features) + torch.stack(samples)


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "held": held,
    "stacked": lambda x: torch.stack(tuple(x)),
    "unbound": lambda x: torch.concat(x.unbind(0)),
    "one by one": lambda x: torch.stack([sample for sample in x]),  # noqa: C416
    "handed on": HandedOn(),
    "twice": lambda x: torch.cat(list(torch.stack(list(x)))),
    "written between": written_between,
    "written after": written_after,
}


def subject_of(through: Callable[[Tensor], Tensor]) -> Subject:
    model = Listing(through)
    return Subject("m", model, (torch.randn(4, 6, 4),), loss=LossChoice.SUM_OF_SQUARES)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", JOINED)
def test_lists_that_are_joined_hold_for_every_batch(name, training, same_as_eager):
    subject = subject_of(JOINED[name])

    same_as_eager(trace(subject), subject, training, sizes=(1, 3, 8))


OTHERWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda x: x + list(x)[1],
    "some": lambda x: torch.stack([*list(x)[:-1], x[-1]]),
    "turned round": lambda x: torch.stack(list(x)[::-1]),
    "counted": lambda x: torch.stack(samples := list(x)) / len(samples),
    "sizes": lambda x: x / sum(sample.shape[0] for sample in x),
    "changed": lambda x: torch.stack([2 * sample for sample in x]),
    "along another": lambda x: torch.stack(list(x), 1),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_else_is_done_with_samples_is_refused(name):
    with pytest.raises(TraceError, match="a batch of 4 only") as caught:
        trace(subject_of(OTHERWISE[name]))

    assert caught.value.location is not None
    assert caught.value.location.file == __file__
