"""Training: steps of the optimizer, pass after pass over the data, to the end or a signal."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.progress import Progress
from ..core.options import refuse_fused
from ..core.pipeline import Pipeline
from ..core.ranks import from_rank_0
from ..errors import AgreedError, StageError
from .checkpoint_manager import CheckpointManager, CheckpointOptions
from .data import NOTHING, Batch, Batches, InputChoice, Source, call_on, disagreement
from .evaluation import evaluate
from .hooks import UserHooks
from .optimizer import OptimizerChoice, Rate, Update, make_optimizer, make_scheduler
from .process import StopSignals
from .profiling import StepProfiler
from .told import Told, format_time, planned_samples, told_lines
from .training_log import Reports


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options of training.

    Attributes:
        steps: of the optimizer, at most; None for no such end.
        epochs: passes over the data, at most; None for no such end.
        accumulate: mini-batches for a step. A step takes those of one pass only, so that the last
            of a pass may be of fewer.
        clip_norm: the largest norm of the gradients; None for any.
        evaluate_every: number of steps; None for the end of every pass.
        gradient_norm: whether the norm of the gradients is computed though they are not clipped.
        log: a file for a line of JSON for every step.
        tensorboard: a folder for TensorBoard's files.
        profile: steps after the first of the run that torch.profiler records.
        input: what is trained on where the user offers no data, or names a file.
        own_rows: whether each replica loads its own rows alone, of data that allows it.
    """

    steps: int | None
    epochs: int | None = None
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    accumulate: int = 1
    clip_norm: float | None = None
    evaluate_every: int | None = None
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    gradient_norm: bool = False
    log: Path | None = None
    tensorboard: Path | None = None
    profile: int = 0
    input: InputChoice = field(default_factory=InputChoice)
    own_rows: bool = True


def train(pipe: Pipeline, directory: Path, hooks: UserHooks, options: TrainOptions) -> int:
    """Train on the user's data, or else on the example batch over and over.

    Returns:
        The number of the signal that has ended it; 0 where it came to its own end.

    Raises:
        AgreedError: when a loss is not finite; the weights are those of the step before.
        PipelineError: when the user's code or another process fails.
    """
    pipe.train()
    with StopSignals(quiet=pipe.rank != 0) as signals:
        training = _Training(pipe, directory, hooks, options, signals)
        try:
            return training.run()
        finally:
            training.close()


_FEWEST_STEPS = 5
"""Steps after the first, from which on their median is printed."""


class _Training:
    """One run of training on one rank.

    Attributes:
        batches: None on ranks that read no data.
    """

    def __init__(
        self,
        pipe: Pipeline,
        directory: Path,
        hooks: UserHooks,
        options: TrainOptions,
        signals: StopSignals,
    ) -> None:
        self.pipe = pipe
        self.hooks = hooks
        self.options = options
        self.signals = signals
        if hooks.eval_data is not None:
            devices = [engine.device for engine in pipe.execution.engines]
            refuse_fused(pipe.spec, pipe.options, devices, training=False)  # not after a pass
        self.batches: Batches | None = None
        self._taken: list[Batch] = []
        self._started = 0.0
        self._where_data_is_read(lambda: self._open(directory), "the data")
        optimizer = make_optimizer(pipe, hooks, options.optimizer)
        steps = self._steps_in_all()
        scheduler = make_scheduler(optimizer, hooks, options.optimizer, steps)
        self.rate = Rate(optimizer, scheduler)
        clip_norm = options.clip_norm
        if clip_norm is None and options.gradient_norm:
            clip_norm = math.inf
        self.update = Update(pipe, optimizer, self.rate, clip_norm)
        states = hooks.states(pipe, optimizer)
        self.checkpoints = CheckpointManager(
            pipe, optimizer, scheduler, states, options.checkpoints
        )
        self.step = self.passes = 0
        self.evaluated: int | None = None
        self._resume()
        self._directory, self._first = directory, self.step + 1
        self._seconds: list[float] = []
        self._samples = 0
        folder = options.checkpoints.directory
        folder = folder if isinstance(folder, Path) else Path()  # an address holds no traces
        self.profiler = StepProfiler(pipe, folder, self._first, options.profile)
        told = None
        if self._sizes_are_planned() and pipe.replicas == pipe.spec.replicas:
            told = Told.of(pipe, directory, planned_samples(pipe.spec))
        files = options.log, options.tensorboard
        self.reports = Reports(
            *(pipe, hooks, self.step, options.steps, *files, told, options.accumulate)
        )

    def run(self) -> int:
        """Train to the end; the number of the signal that came before it, or 0."""
        while not self._finished():
            turn = self._turn()
            if turn < 0:
                return self._stop(-turn)
            if turn > 0:
                self._step(turn)
            else:
                self._end_pass()
        if self.evaluated != self.step:
            self._evaluate(last=True)
        self.checkpoints.save(self._progress(), last=True)
        self.reports.line(self.profiler.finish())
        self._tell()
        return 0

    def _tell(self) -> None:
        """Prints the plan's prediction for a step, where batches were of the planned size."""
        if self.pipe.rank != 0 or len(self._seconds) < _FEWEST_STEPS:
            return
        if self.options.accumulate > 1 or not self._sizes_are_planned():
            return  # of other sizes nothing was told
        told = Told.of(self.pipe, self._directory, self._samples)
        if told is not None:
            median = statistics.median(self._seconds)
            self.reports.line(f"step: median {format_time(median)} of {len(self._seconds)}")
            for line in told_lines(self.pipe, told, median):
                self.reports.line(line)

    def _sizes_are_planned(self) -> bool:
        return not (self.pipe.spec.sizes and self.hooks.train_data)

    def close(self) -> None:
        self.profiler.close()
        self.checkpoints.close()
        self.reports.close()

    def _finished(self) -> bool:
        steps, epochs = self.options.steps, self.options.epochs
        return (steps is not None and self.step >= steps) or (
            epochs is not None and self.passes >= epochs
        )

    def _turn(self) -> int:
        """The number of mini-batches of the next step; 0 where a pass ends, -n for signal n."""
        self._started = time.perf_counter()
        turn = from_rank_0(self.pipe.world, "the next step", self._decide)
        if turn >= 0:
            self.signals.check_alone()
        return turn

    def _decide(self) -> int:
        if self.signals.received:
            return -self.signals.received
        assert self.batches is not None
        self._taken = self.batches.take(self.options.accumulate)
        return len(self._taken)

    def _step(self, count: int) -> None:
        batches = self._taken if self.pipe.rank == 0 else self._same(count)
        number = self.step + 1
        self.profiler.begin(number)
        try:
            stepped = self.update(batches, number)
        except AgreedError as error:
            raise self._lost(error) from error
        except StageError as error:
            raise StageError(f"step {number}: {error.problem}", hint=error.hint) from error
        self.step = number
        seconds = time.perf_counter() - self._started
        if number > self._first:  # which warms up
            self._seconds.append(seconds)
        self._samples = stepped.samples
        self.reports.step(number, stepped, seconds)
        self.reports.line(self.profiler.end(number))
        self.checkpoints.poll()
        every = self.options.evaluate_every
        if every is not None and number % every == 0:
            self._evaluate()
        every = self.options.checkpoints.every
        if every is not None and number % every == 0:
            self.checkpoints.save(self._progress())

    def _end_pass(self) -> None:
        if self.pipe.rank != 0:
            self._same(0)
        self.passes += 1
        if self.options.evaluate_every is None:
            self._evaluate()
        if self.options.checkpoints.every is None:
            self.checkpoints.save(self._progress())

    def _same(self, count: int) -> list[Batch]:
        """The mini-batches of a rank other than 0: all replicas read as many."""
        if self.batches is None:
            return [NOTHING] * count
        taken = self.batches.take(max(1, count))
        if len(taken) != count:
            raise disagreement(self.batches)
        return taken

    def _evaluate(self, *, last: bool = False) -> None:
        """Evaluate, where there is data for it.

        Args:
            last: after the last step, where a longer run would not: nothing may depend on it.
        """
        if self.hooks.eval_data is None:
            return
        found = evaluate(self.pipe, self.hooks, own_rows=self.options.own_rows)
        if not last:
            self.rate.evaluated(found.loss)
        self.evaluated = self.step
        self.reports.evaluation(self.step, found)

    def _stop(self, signal: int) -> int:
        self.checkpoints.save(self._progress(), last=True)
        where = f"; the checkpoint is {self.checkpoints.last}" if self.checkpoints.last else ""
        self.reports.line(self.profiler.finish())
        self.reports.line(f"stopped after step {self.step}{where}")
        return signal

    def _lost(self, error: AgreedError) -> AgreedError:
        self.checkpoints.wait()  # all ranks are here
        ways = "try a lower learning rate, or --clip-norm"
        last = self.checkpoints.last
        hint = error.hint or (ways if last is None else f"the last checkpoint is {last}; {ways}")
        return AgreedError(f"{error.problem}; the weights are not changed by it", hint=hint)

    def _progress(self) -> Progress:
        progress = Progress(step=self.step, epoch=self.passes)
        return progress if self.batches is None else self.batches.place(progress)

    def _resume(self) -> None:
        progress = self.checkpoints.resume()
        if progress is None:
            return
        self.step, self.passes = progress.step, progress.epoch
        self._where_data_is_read(lambda: self._go_to(progress), "the place in the data")

    def _go_to(self, progress: Progress) -> None:
        assert self.batches is not None
        self.batches.go_to(progress)

    def _open(self, directory: Path) -> None:
        hooks, choice = self.hooks, self.options.input
        if hooks.train_data is not None and choice.file is None:
            name = f"train_data() of {hooks.name}"
            source = Source.of_hook(name, hooks.train_data, self.pipe)
        else:
            source = Source.repeated(*call_on(self.pipe.spec, directory, choice))
        shares = self.options.own_rows and self.pipe.replicas > 1
        self.batches = Batches(source, self.pipe if shares else None)

    def _steps_in_all(self) -> int | None:
        """The number of steps, where it can be known."""
        if self.options.steps is not None or not self.options.optimizer.needs_end:
            return self.options.steps

        def count() -> int | None:
            assert self.batches is not None
            assert self.options.epochs is not None
            batches = self.batches.length()
            if batches is None:
                return None
            return -(-batches // self.options.accumulate) * self.options.epochs

        return from_rank_0(self.pipe.world, "the number of steps", count)

    def _where_data_is_read(self, act: Callable[[], None], what: str) -> None:
        """Act on the first rank of every replica; an error on rank 0 ends the others."""
        from_rank_0(self.pipe.world, what, act)
        if self.pipe.feeds and self.pipe.rank != 0:
            act()
