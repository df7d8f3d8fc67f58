"""Evaluation between steps of training, which leaves no trace in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from .batches import NOTHING, Batches, Source, located
from .data import samples_of
from .errors import UsageError
from .generators import undisturbed
from .hooks import UserHooks
from .lockstep import decided
from .pipeline import Pipeline
from .spec import Reduction


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation found.

    Attributes:
        loss: over all of the data, as one mini-batch would have it.
        metrics: the user's own by name, means over samples; on rank 0 only.
    """

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        found = {"loss": self.loss, **self.metrics}
        return "  ".join(f"{name} {number:.6g}" for name, number in found.items())


def evaluate(pipe: Pipeline, hooks: UserHooks) -> Evaluated:
    """One pass over `eval_data()` in eval mode; every rank calls it.

    Afterwards the mode of the stages, the pipeline's step number and the generators are as before.

    Raises:
        PipelineError: when the user's code raises, or gives no batches.
        UsageError: when a batch does not fit, with its place in the data.
    """
    training, step = pipe.training, pipe.step_number
    pipe.eval()
    try:
        with undisturbed():
            return _Pass(pipe, hooks).run()
    finally:
        pipe.train(training)
        pipe.step_number = step


class _Pass:
    """The sums of one pass over the evaluation data."""

    def __init__(self, pipe: Pipeline, hooks: UserHooks) -> None:
        assert hooks.eval_data is not None
        self.pipe = pipe
        self.hooks = hooks
        self.batches = Batches(Source(f"eval_data() of {hooks.name}", hooks.eval_data))
        self.batch = NOTHING
        self.found: tuple[float, object] | None = None
        self.loss = self.weight = 0.0
        self.metrics: dict[str, float] = {}
        self.samples = 0

    def run(self) -> Evaluated:
        """Evaluate every batch."""
        while True:
            going, loss = decided(self.pipe, self._next, 2, "the next batch of evaluation")
            if not going:
                metrics = {name: total / self.samples for name, total in self.metrics.items()}
                return Evaluated(loss, metrics)
            self.found = self._evaluate()

    def _next(self) -> tuple[float, float]:
        """Whether there is another batch, and the loss of all those before; on rank 0."""
        if self.found is not None:
            self._add(*self.found)
        self.batch = next(iter(self.batches.take(1)), NOTHING)
        return float(self.batch is not NOTHING), self._loss()

    def _loss(self) -> float:
        loss = self.pipe.spec.loss
        if loss is not None and loss.reduction is Reduction.SUM:
            return self.loss
        return self.loss / self.weight if self.weight else math.nan

    def _evaluate(self) -> tuple[float, object]:
        batch, outputs = self.batch, self.hooks.metrics is not None
        try:
            loss, output = self.pipe.evaluate_with_outputs(
                batch.inputs, batch.target, outputs=outputs
            )
        except UsageError as error:
            raise located(error, batch) from error
        return float(loss), output

    def _add(self, loss: float, output: object) -> None:
        batch = self.batch
        weight = self.pipe.loss_weight(batch.inputs, batch.target)
        if weight:
            self.loss += loss * weight
            self.weight += weight
        samples = samples_of(self.pipe.spec, self.pipe.microbatches, batch.inputs, batch.target)
        for name, number in self.hooks.measured(output, batch.target).items():
            self.metrics[name] = self.metrics.get(name, 0.0) + number * samples
        self.samples += samples
