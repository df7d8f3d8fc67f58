"""The expected results of a package: the plain model on the whole mini-batch.

Outputs, loss, gradients, buffers and weights are those of the mini-batch in one piece. Where the
user chose otherwise they are those of the plain loop of micro-batches: BatchNorm over micro-batches
in training, and `--per-microbatch`. So they are where anything is computed in 16 bits, by
`--precision` or by the model itself: there both round at the same places. The loop is then held
against the whole without this rounding.

That micro-batches of the model come to the whole is looked at first, or left to the package, which
runs micro-batches: where it gives what the whole does, they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection

from gpipe_compiler.errors import GPipeCompilerError, UnsplittableError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.locate import line_of
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.passes.cross_sample_ops import batchnorm_ops, made_in_batchnorm, mixing_ops
from gpipe_compiler.passes.joined_outputs import apart_outputs
from gpipe_compiler.passes.output_terms import loss_is_proven
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.written_once import sample_writers
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import BatchNorm, Precision
from gpipe_compiler.runtime.train.comparison import ComparedKind, Tensors
from gpipe_compiler.runtime.wording import ending
from gpipe_compiler.validate.compared_runs import ComparedRuns
from gpipe_compiler.validate.cross_sample import differs_in_training
from gpipe_compiler.validate.departure import (
    HINT,
    Both,
    departure,
    drawn_apart,
    joined,
    where_parted,
)
from gpipe_compiler.validate.draws import ApartError, Draws
from gpipe_compiler.validate.loss_splitting import Losses, cause_of, explain
from gpipe_compiler.validate.other_targets import CheckedClasses, other_targets
from gpipe_compiler.validate.plain_run import ModelCall, batch_of, evaluate, shares_of
from gpipe_compiler.validate.second_batch import OtherBatch

_CLOSE, _CLOSE_IN_32 = 1e-6, 1e-5
"""As shares of a loss, what may be rounding: in 64 bits, but for what an operator computes in 32
inside, and in 32."""

_INSIDE = "training is compared with the plain loop of micro-batches: {}"


def reference_of(
    subject: Subject,
    plan: Plan,
    seed: int,
    *,
    other: OtherBatch | None = None,
    per_microbatch: bool = False,
    left_to_package: bool = False,
    step_alone: bool = False,
) -> tuple[Tensors, tuple[str, ...]]:
    """The expected results of a plan's package, by the model in plain PyTorch; and notes on them.

    Args:
        other: the mini-batch; the example by default.
        left_to_package: whether a package is held against the results, so that micro-batches of the
            model need not run where the package shows what they come to. Where it gives other
            results, `refuse_unlike_parts` tells whether the model's micro-batches do as well.
        step_alone: leaves out the outputs in eval mode.

    Raises:
        UnsplittableError: when micro-batches do not give the model's results for the mini-batch,
            unless that is accepted.
    """
    entry = Entry(subject, training=False)
    batch = batch_of(plan, entry.signature, other)
    shares = shares_of(entry, plan, batch) if plan.training else ()
    work = _Work(subject, plan, batch, shares, seed, per_microbatch)
    if step_alone:
        return work.trained(noted=False)
    left = left_to_package and work.is_shown_by_package
    expected, notes = work.in_one_piece() if left else work.evaluated()
    if not plan.training:
        return expected, notes
    trained, more = work.trained(noted=bool(notes))
    return {**expected, **trained}, (*notes, *more)


def refuse_unlike_parts(subject: Subject, plan: Plan, seed: int) -> None:
    """Says why no package could give the results on the example, if micro-batches do not.

    Raises:
        UnsplittableError: naming the line where they part.
    """
    entry = Entry(subject, training=False)
    batch = batch_of(plan, entry.signature)
    if len(batch.sizes) == 1:
        return
    shares = shares_of(entry, plan, batch) if plan.training else ()
    work = _Work(subject, plan, batch, shares, seed, accepted=False)
    try:
        work.evaluated()
    except GPipeCompilerError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise UnsplittableError(
            f"the model raises {type(error).__name__} on micro-batches of the example"
            f"{ending(error)}",
            location=line_of(error),
            hint="give every sample rows of its own, that say nothing of where in the batch it "
            "lies, as offsets do: pad them to one length; or compile with --microbatches 1",
        ) from error
    if not shares:
        return
    if batchnorm_ops(work.graph, subject.model):  # which the user has over each micro-batch
        return
    try:
        alike = work.trains_alike() or work.in_double(ComparedRuns.trains_alike)
    except ApartError as problem:
        if problem.inside:
            return
        raise drawn_apart(work.graph, problem) from problem
    if not alike:
        raise departure(work.graph, work.entry(training=True), batch)


class _Work(ComparedRuns):
    """What a package is to come to, and what it is held to."""

    @property
    def is_shown_by_package(self) -> bool:
        """Whether a package that gives what the mini-batch in one piece does, in eval mode and for
        a step, shows that micro-batches come to it.

        Where the loop of micro-batches is what a step is held to, it does not; nor does a step show
        the loss in eval mode, where that is another one.
        """
        graph = self.graph
        if self.accepted or self.rounds or self.goes_on:
            return False
        if Draws.of(graph, self.seed, training=False).numbers:
            return False
        if not self.plan.training:
            return True
        touchy = mixing_ops(graph) | frozenset(sample_writers(graph))
        same = not touchy and self._modes_agree(apart=random_ops(graph))
        return same and not self._loss_is_open

    def _modes_agree(self, *, apart: Collection[str]) -> bool:
        """Whether all ops do the same in training as in eval mode, these apart."""
        return not any(differs_in_training(op) for op in self.graph.ops if op.name not in apart)

    @property
    def _loss_is_open(self) -> bool:
        """Whether it is numbers alone that tell whether micro-batches come to the loss."""
        loss = self.graph.loss
        several = loss is not None and not loss.over_batch and len(self.batch.sizes) > 1
        return several and not loss_is_proven(self.graph)

    def in_one_piece(self) -> tuple[Tensors, tuple[str, ...]]:
        """The outputs in eval mode, by the mini-batch in one piece alone."""
        call = ModelCall(self.batch.whole(), contextlib.nullcontext())
        (whole,) = evaluate(self.entry(training=False), [call], Precision.FP32)
        return {ComparedKind.OUTPUT: whole.outputs}, ()

    def evaluated(self) -> tuple[Tensors, tuple[str, ...]]:
        """The outputs in eval mode, and notes on them."""
        draws = Draws.of(self.graph, self.seed, training=False)
        error, alike = None, False
        try:
            found = self.both(draws)
            alike = found.alike
            if not alike and not self.in_double(ComparedRuns.evaluates_alike):
                error = self._unlike(found)
            else:
                error = self._evaluates_otherwise_later(draws) or self._loss_departs(training=False)
        except ApartError as problem:
            error = drawn_apart(self.graph, problem)
        notes = self._accept(error)
        at_once = len(self.batch.sizes) > 1 and bool(apart_outputs(self.graph))
        if alike and not self.rounds and not at_once:
            return {ComparedKind.OUTPUT: found.whole.outputs}, notes
        entry = self.entry(training=False)
        call = ModelCall(self.batch.whole(), draws.of_model())
        if at_once:  # as the package does, which draws for it once
            (whole,) = evaluate(entry, [call], self.plan.precision)
            return {ComparedKind.OUTPUT: whole.outputs}, notes
        calls = self.calls(entry, draws)
        parts = evaluate(entry, calls, self.plan.precision, self.written_once)
        # For its shapes, and what has no batch dimension.
        (whole,) = parts if len(parts) == 1 else evaluate(entry, [call], self.plan.precision)
        return {ComparedKind.OUTPUT: joined(parts, self.batch.sizes, whole)}, notes

    def _evaluates_otherwise_later(self, draws: Draws) -> UnsplittableError | None:
        """The error for outputs that are those of micro-batches in the first state alone."""
        for later in self.later():
            if not later.holds(ComparedRuns.evaluates_alike):
                return later._unlike(later.both(draws))
        return None

    def trained(self, *, noted: bool) -> tuple[Tensors, tuple[str, ...]]:
        """Loss, gradients, buffers and weights of a training step, and notes.

        Args:
            noted: whether what is accepted is noted already.
        """
        draws = Draws.of(self.graph, self.seed, training=True)
        if noted:
            return self.loop(draws, self.plan.precision), ()
        touchy = mixing_ops(self.graph) | frozenset(sample_writers(self.graph))
        if len(self.batch.sizes) == 1 or (touchy and self.plan.batchnorm is BatchNorm.EXACT):
            call = ModelCall(self.batch.whole(), draws.of_model())
            return self.step([call], self.plan.precision), ()
        layers = touchy & batchnorm_ops(self.graph, self.subject.model)
        if layers:
            if not self.accepted and made_in_batchnorm(self.graph, self.subject.model, layers):
                dataclasses.replace(self, frozen=True).refuse_beside(touchy - layers, layers)
            beside = None
            if made_in_batchnorm(self.graph, self.subject.model, layers):
                beside = dataclasses.replace(self, frozen=True)._loss_departs(training=True)
            notes = (*self._accept(beside), self._normalises(layers))
            return self.loop(draws, self.plan.precision), notes
        try:
            for whole, flat in self.wholes(draws):
                plain = not (flat or touchy or self.rounds or self.accepted)
                if plain or self.steps_alike(self.loop(draws, Precision.FP32), whole):
                    later = self._departs_later() or self._loss_departs(training=True)
                    notes = self._accept(later)
                    apart = self.rounds or notes
                    return self.loop(draws, self.plan.precision) if apart else whole, notes
        except ApartError as problem:
            error: UnsplittableError | None = drawn_apart(self.graph, problem)
            if problem.inside:
                note = _INSIDE.format(drawn_apart(self.graph, problem).problem)
                return self.loop(draws, self.plan.precision), (note,)
        else:
            error = None
            if not self.in_double(ComparedRuns.trains_alike):
                error = departure(self.graph, self.entry(training=True), self.batch)
        return self.loop(draws, self.plan.precision), self._accept(error)

    def refuse_beside(self, others: Collection[str], layers: Collection[str]) -> None:
        """Refuses what takes the samples of a batch together in training, frozen BatchNorm apart.

        Args:
            others: the ops that are known to mix samples or to write, BatchNorm's own apart.
        """
        assert self.graph.loss is not None
        if self.graph.loss.of_parts:  # which the graph computes, where nothing is frozen
            return
        if not others and not random_ops(self.graph) and self._modes_agree(apart=layers):
            return  # that is the model in eval mode
        check = ComparedRuns.trains_alike if others else ComparedRuns.forwards_alike
        try:
            if self.holds(check) and all(later.holds(check) for later in self.later()):
                return
        except ApartError as problem:
            if problem.inside:
                return
            raise drawn_apart(self.graph, problem) from problem
        op = next((op for op in self.graph.ops if op.name in others), None)
        if op is None:
            op = where_parted(self.graph, self.entry(training=True), self.batch, layers)
        what = "something" if op is None else op.name
        raise UnsplittableError(
            f"what the model makes of the mini-batch in training is not what its "
            f"{len(self.batch.sizes)} micro-batches come to, BatchNorm apart: {what} takes the "
            "samples of a batch together, or writes for each micro-batch",
            location=None if op is None else op.source,
            hint=HINT,
        )

    def _departs_later(self) -> UnsplittableError | None:
        """The error for a step that is that of its micro-batches in the first state alone.

        Such as where a power iteration, which goes on with every call, has converged; or at the
        first of what forward counts.
        """
        for later in (*self.moved(), *self.later()):
            if not later.holds(ComparedRuns.trains_alike):
                return departure(self.graph, later.entry(training=True), self.batch)
        return None

    def _loss_departs(self, *, training: bool) -> UnsplittableError | None:
        """The error for a loss that micro-batches come to by rounding alone."""
        loss = self.graph.loss
        # The graph computes terms, and where it does no BatchNorm is frozen.
        if loss is None or (self.frozen and loss.of_parts) or not self._loss_is_open:
            return None
        losses, close = self._precise_losses(training=training)
        if losses is not None and not losses.within(close):
            return explain(self.graph, losses)
        return self._loss_departs_elsewhere(training=training)

    def _precise_losses(self, *, training: bool) -> tuple[Losses | None, float]:
        """The losses in 64 bits, else in 32; and by what share they may differ."""
        losses = self.losses_in_double(training=training)
        if losses is not None:
            return losses, _CLOSE
        draws = Draws.of(self.graph, self.seed, training=training)
        return self.both(draws, training=training).losses, _CLOSE_IN_32

    def _loss_departs_elsewhere(self, *, training: bool) -> UnsplittableError | None:
        """The error for a loss that micro-batches come to on batches with the example's targets
        alone; what plain PyTorch rejects shows nothing."""
        for place, batch in enumerate(other_targets(self.graph, self.batch, self.seed + training)):
            try:
                entry = Entry(self.subject, training=False)
                shares = shares_of(entry, self.plan, batch)
                other = dataclasses.replace(self, batch=batch, shares=shares)
                with CheckedClasses():
                    losses, close = other._precise_losses(training=training)
            except Exception:  # whatever the user's code raises on targets that are none
                continue
            if losses is not None and not losses.within(close):
                return explain(self.graph, losses, "a batch with other targets")
            if place == 0:  # all that the others change
                return None
        return None

    def _unlike(self, found: Both) -> UnsplittableError:
        losses, outputs = None if self.compares_outputs_alone else found.losses, found.unlike
        if losses is not None and not losses.equal and (not outputs or cause_of(self.graph)):
            return explain(self.graph, losses)
        return departure(self.graph, self.entry(training=False), self.batch, outputs)

    def _normalises(self, layers: Collection[str]) -> str:
        first = next(op for op in self.graph.ops if op.name in layers)
        return (
            "training is compared with the plain loop of micro-batches: BatchNorm is over each of "
            f"them (--batchnorm {self.plan.batchnorm.value}), first in {first.name} "
            f"({first.source or 'no line is known'})"
        )

    def _accept(self, error: UnsplittableError | None) -> tuple[str, ...]:
        if error is None:
            return ()
        if not self.accepted:
            raise error
        what = "the package is compared with the plain loop of micro-batches"
        return (f"accepted with --per-microbatch, and {what}: {error.problem}",)
