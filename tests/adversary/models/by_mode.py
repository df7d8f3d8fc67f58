"""Losses and outputs that are made of other numbers in training than in eval mode."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from adversary.case import Case
from adversary.inputs import steps, tokens
from torch import Tensor, nn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()


class PenaltyInTraining(Two):
    """As mixtures of experts and auxiliary heads have it: nothing is added in eval mode."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        h = self.features(x)
        return self.last(h), h.square().mean() if self.training else 0.0


class ZeroTensor(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.last(h), h.square().mean() if self.training else x.new_zeros(())


class NoneOfIt(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        h = self.features(x)
        return self.last(h), h.square().mean() if self.training else None


class AuxiliaryHead(Two):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = self.last(self.features(x))
        return (y, self.side(x)) if self.training else y


class Exits(Two):
    """All exits in training, the last one alone in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        found = [self.side(x), self.last(self.features(x))]
        return found if self.training else found[-1:]


class NoLossInEval(Two):
    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.features(x)
        y = self.last(h)
        loss = of_tokens(y, target) + h.square().mean() if self.training else torch.zeros(())
        return {"loss": loss, "logits": y}


class SumAndNumber(Two):
    """A sum over the batch, to which eval mode adds a number: once, not for every micro-batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.last(h), h.sum() + (h.abs().sum() if self.training else 1.0)


class MeanOrNumber(Two):
    """A mean, or one number that all micro-batches have."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(x)
        return self.last(h), h.mean() if self.training else h.new_ones(())


def padded(samples: int) -> Tensor:
    found = tokens(samples)
    found[: samples // 2, 1:] = -100
    return found


def of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def added(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return of_tokens(output[0], target) + output[1]


def scaled(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return 0.3 * output[1] + of_tokens(output[0], target)


def if_there(output: tuple[Tensor, Tensor | None], target: Tensor) -> Tensor:
    loss = of_tokens(output[0], target)
    return loss if output[1] is None else loss - 0.3 * output[1]


def of_heads(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return of_tokens(output, target)
    spread = output[0].logsumexp(-1).square().mean()
    return of_tokens(output[0], target) + 0.4 * of_tokens(output[1], target) + 0.01 * spread


def of_exits(output: Sequence[Tensor], target: Tensor) -> Tensor:
    losses = [of_tokens(item, target) for item in output]
    return torch.as_tensor(sum(losses) / len(losses))


def of_the_first(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return of_tokens(output[0], target)


def both(samples: int) -> dict[str, Tensor]:
    return {"x": steps(samples), "target": tokens(samples)}


def both_padded(samples: int) -> dict[str, Tensor]:
    return {"x": steps(samples), "target": padded(samples)}


def case(
    name: str, model: type[nn.Module], loss: object, *, quick: bool = False, alike: bool = True
) -> Case:
    """Of a model whose outputs are alike in both modes, or of which training gives the loss."""
    return Case(
        name,
        model,
        steps,
        loss,  # type: ignore[arg-type]  # each fits its model
        tokens,
        later_target=padded,
        as_evaluated=not alike,
        quick=quick,
    )


CASES = (
    case("no_penalty", PenaltyInTraining, added, alike=False, quick=True),
    case("no_penalty_scaled", PenaltyInTraining, scaled, alike=False),
    case("zero_tensor", ZeroTensor, added),
    case("zero_tensor_scaled", ZeroTensor, scaled),
    case("none_of_it", NoneOfIt, if_there, alike=False),
    case("auxiliary_head", AuxiliaryHead, of_heads, alike=False),
    case("exits", Exits, of_exits, alike=False),
    case("sum_and_number", SumAndNumber, of_the_first, alike=False),
    case("mean_or_number", MeanOrNumber, added),
    Case("no_loss_in_eval", NoLossInEval, both, later_inputs=both_padded),
)
