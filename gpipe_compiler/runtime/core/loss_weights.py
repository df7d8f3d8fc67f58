"""How much each micro-batch's loss counts in the loss of the mini-batch.

The mean over a mini-batch is the mean of the micro-batches' means, each weighted by what it is
taken over: by samples, or by what `LossSpec.weight` counts, such as the tokens that are no padding.
Where a loss adds up means over different things, each of these terms is weighted by its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from ..errors import UsageError
from ..sizes import Sizes, value_at
from ..spec import LossTerm, PipelineSpec, Reduction
from ..wording import said
from .building import build_stage
from .inputs import BoundCall
from .request import Values
from .stored_weights import Weights

Counts: TypeAlias = tuple[float, ...]
"""What each term of the loss is a mean over, a number of samples, of tokens, ...; 1 for a sum."""


class LossWeigher:
    """Weighs micro-batches by what the loss's mean is taken over.

    Args:
        weights: where the state of `LossSpec.weight` is, such as the weights of classes.
    """

    def __init__(self, spec: PipelineSpec, weights: Weights | None, seed: int) -> None:
        self.terms: tuple[LossTerm, ...] = spec.loss.terms if spec.loss is not None else ()
        self._spec = None if spec.loss is None else spec.loss.weight
        self._module: nn.Module | None = None
        if self._spec is not None:
            self._module = build_stage(self._spec, weights, torch.device("cpu"), seed)

    def weigh(self, call: BoundCall) -> tuple[Counts, ...]:
        """The counts of each micro-batch.

        Raises:
            UsageError: when something cannot be counted, as where a label is of no class.
        """
        return tuple(
            self._counts(*each) for each in zip(call.parts, call.samples, call.sizes, strict=True)
        )

    def _counts(self, part: Values, samples: int, sizes: Sizes) -> Counts:
        counted = iter(self._counted(part))

        def count(term: LossTerm) -> float:
            if term.counted:
                return next(counted)
            if term.reduction is Reduction.SUM:
                return 1.0
            per_sample = 1 if term.per_sample is None else value_at(term.per_sample, sizes)
            return float(samples * per_sample)

        return tuple(map(count, self.terms))

    @property
    def unknown(self) -> bool:
        """Whether it is not known what a term is a mean over where sizes differ."""
        means = [term for term in self.terms if term.reduction is Reduction.MEAN]
        return any(term.per_sample is None and not term.counted for term in means)

    def _counted(self, part: Values) -> tuple[float, ...]:
        if self._module is None or self._spec is None:
            return ()
        names = self._spec.inputs
        try:
            with torch.no_grad():
                found = self._module(*(part[name].cpu() for name in names))
        except Exception as error:  # whatever the model's code raises
            raise UsageError(
                f"what the loss is a mean over cannot be counted: {said(error)}",
                hint=f"look at the values of {', '.join(names)}, such as labels out of range",
            ) from error
        return tuple(map(float, terms_of(found)))

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what a state of the model says of its own state."""
        if self._module is None or self._spec is None:
            return
        for own, tensor in self._module.state_dict().items():
            if self._spec.named(own) in state:
                tensor.copy_(state[self._spec.named(own)])

    def _divisors(self, total: Counts) -> list[float]:
        """What each term of the mini-batch is divided by; 0 where nothing in it counts."""
        pairs = zip(self.terms, total, strict=False)  # there are no counts without a loss
        return [divisor(term, count) if count > term.above else 0.0 for term, count in pairs]

    def vanished(self, total: Counts) -> frozenset[int]:
        """The terms of which nothing in the mini-batch counts."""
        return frozenset(n for n, whole in enumerate(self._divisors(total)) if not whole)

    def shares(self, counts: Sequence[Counts], total: Counts) -> tuple[tuple[float, ...], ...]:
        """For each micro-batch, the weights of its terms in those of the mini-batch.

        Args:
            counts: as `weigh` gives them; none where no loss is made.
        """
        if not counts:
            return ()
        wholes = self._divisors(total)
        return tuple(
            tuple(
                divisor(term, max(count, term.least)) / whole if whole else 0.0
                for term, count, whole in zip(self.terms, own, wholes, strict=True)
            )
            for own in counts
        )


def summed(counts: Sequence[Counts]) -> Counts:
    """The counts of all together."""
    return tuple(sum(column) for column in zip(*counts, strict=True))


def divisor(term: LossTerm, count: float) -> float:
    """What a term of so much weight is divided by; a sum by 1."""
    if term.reduction is Reduction.SUM:
        return 1.0
    return max(count, term.floor) + term.offset


def terms_of(made: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The terms of a loss, as a stage returns them: a loss that has none is the only one."""
    return made if isinstance(made, tuple) else (made,)


def total_of(
    losses: Mapping[int, tuple[torch.Tensor, ...]],
    shares: Sequence[tuple[float, ...]],
    empty: Sequence[float],
) -> torch.Tensor | None:
    """The terms of the mini-batch's loss; one of weight 0 is left out, it may be nan.

    Args:
        empty: what each is where nothing counts.
    """
    if not losses:
        return None
    totals = []
    for number, like in enumerate(losses[0]):
        scalars = [
            _weighted(losses[m][number].reshape(()), weights[number])
            for m, weights in enumerate(shares)
            if weights[number]
        ] or [like.new_full((), empty[number])]
        totals.append(scalars[0] if len(scalars) == 1 else torch.stack(scalars).sum())
    return torch.stack(totals)


def _weighted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    return loss if weight == 1 else loss * weight
