"""Evaluation between steps of training, which leaves no trace in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..checkpoint.progress import preserved_generators
from ..core.loss_weights import divisor
from ..core.pipeline import Pipeline
from ..core.ranks import from_rank_0, together
from ..errors import AgreedError, UsageError
from ..spec import LossTerm
from .data import (
    NOTHING,
    Batches,
    Source,
    counts_of,
    disagreement,
    located,
    share_read,
)
from .hooks import UserHooks


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of an evaluation.

    Attributes:
        loss: over all of the data, as one mini-batch would have it.
        metrics: the user's own by name, means over samples.
    """

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        return {"loss": self.loss, **self.metrics}

    def __str__(self) -> str:
        return "  ".join(f"{name} {number:.6g}" for name, number in self.numbers.items())


def evaluate(pipe: Pipeline, hooks: UserHooks, *, own_rows: bool = False) -> EvaluationResult:
    """One pass over `eval_data()` in eval mode; every rank calls it.

    Args:
        own_rows: whether each replica loads its own rows alone, of data that allows it.

    Afterwards the mode of the stages, the pipeline's step number and the generators are as before.

    Raises:
        PipelineError: when the user's code raises, or gives no batches.
        UsageError: when a batch does not fit, with its place in the data.
    """
    training, step = pipe.training, pipe.step_number
    pipe.eval()
    try:
        with preserved_generators():
            return _Pass(pipe, hooks, own_rows=own_rows).run()
    finally:
        pipe.train(training)
        pipe.step_number = step


class _Mean:
    """A term of the loss, over batches."""

    def __init__(self, term: LossTerm) -> None:
        self.term = term
        self.total = self.weight = 0.0

    def add(self, value: float, weight: float) -> None:
        share = divisor(self.term, weight)
        if share:  # or the value is nan
            self.total += value * share
            self.weight += weight

    @property
    def value(self) -> float:
        if self.weight <= self.term.above:
            return 0.0
        whole = divisor(self.term, self.weight)
        return self.total / whole if whole else math.nan


class _Pass:
    """The sums of one pass over the evaluation data; those of metrics over this replica's share."""

    def __init__(self, pipe: Pipeline, hooks: UserHooks, *, own_rows: bool) -> None:
        assert hooks.eval_data is not None
        self.pipe = pipe
        self.hooks = hooks
        source = Source.of_hook(f"eval_data() of {hooks.name}", hooks.eval_data, pipe)
        self.batches = Batches(source, pipe if own_rows and pipe.replicas > 1 else None)
        self.batch = NOTHING
        self.made: tuple[object, tuple[object, object]] | None = None
        loss = pipe.spec.loss
        assert loss is not None  # evaluation is of training
        self.terms = [_Mean(term) for term in loss.terms]
        self.metrics: dict[str, float] = {}
        self.samples = 0

    def run(self) -> EvaluationResult:
        while True:
            going = from_rank_0(self.pipe.world, "the next batch of evaluation", self._next)
            if self.pipe.rank != 0 and self.pipe.feeds and self._next() is not going:
                raise disagreement(self.batches)
            if not going:
                break
            self._evaluate()
        told = from_rank_0(self.pipe.world, "the loss", lambda: sum(t.value for t in self.terms))
        return EvaluationResult(told, self._metrics())

    def _next(self) -> bool:
        """Whether there is another batch; what the user measures in the last one may raise here."""
        if self.made is not None:
            output, share = self.made
            samples, _ = counts_of(self.pipe.spec, self.pipe.microbatches, *share)
            for name, number in self.hooks.measured(output, share[1]).items():
                self.metrics[name] = self.metrics.get(name, 0.0) + number * samples
            self.samples += samples
        self.batch = next(iter(self.batches.take(1)), NOTHING)
        return self.batch is not NOTHING

    def _metrics(self) -> dict[str, float]:
        """The means over the samples of all replicas."""

        def mean(parts: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
            samples = sum(count for _, count in parts)
            names = dict.fromkeys(name for sums, _ in parts for name in sums)
            return {name: sum(sums.get(name, 0.0) for sums, _ in parts) / samples for name in names}

        if self.hooks.metrics is None:
            return {}
        found = self.metrics, self.samples
        return together(self.pipe.world, "the metrics", lambda: found, mean)

    def _evaluate(self) -> None:
        pipe, outputs = self.pipe, self.hooks.metrics is not None
        try:
            share = share_read(pipe, self.batch)
            losses, output = pipe.evaluate_terms(*share, outputs=outputs)
        except (UsageError, AgreedError) as error:
            raise located(error, self.batch) from error
        reads = self.batch is not NOTHING
        own = pipe.loss_weights(*share) if reads else [0.0 for _ in self.terms]
        weights = torch.tensor(own, dtype=torch.float64)
        if pipe.replicas > 1:
            weights = pipe.world.sum(weights, "the weights of the loss")
        for term, loss, weight in zip(self.terms, losses.tolist(), weights.tolist(), strict=True):
            term.add(loss, weight)
        self.made = (output, share) if reads else None
