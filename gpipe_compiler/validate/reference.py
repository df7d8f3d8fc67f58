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
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_compiler.errors import GPipeCompilerError, UnsplittableError
from gpipe_compiler.frontend.comparable_runs import with_other_weights
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.locate import line_of
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph, StateKind
from gpipe_compiler.passes.cross_sample_ops import batchnorm_ops, made_in_batchnorm, mixing_ops
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.written_once import sample_writers, written_once
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import BatchNorm, Precision
from gpipe_compiler.runtime.train.comparison import ComparedKind, Tensors, compare, dense
from gpipe_compiler.runtime.wording import ending
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
from gpipe_compiler.validate.later_states import later_models
from gpipe_compiler.validate.loss_splitting import cause_of, explain
from gpipe_compiler.validate.plain_run import (
    MiniBatch,
    ModelCall,
    Shares,
    all_at_once,
    batch_of,
    evaluate,
    flattened,
    one_by_one,
    shares_of,
    train_step,
    with_terms,
)
from gpipe_compiler.validate.rounding import double, doubled, lower_types, rounded, without_lower
from gpipe_compiler.validate.second_batch import OtherBatch

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
    entry = make_entry(subject, training=False)
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
    entry = make_entry(subject, training=False)
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
        alike = work._trains_alike() or work._in_double(_Work._trains_alike)
    except ApartError as problem:
        if problem.inside:
            return
        raise drawn_apart(work.graph, problem) from problem
    if not alike:
        draws = Draws.of(work.graph, seed, training=True)
        raise departure(work.graph, work._entry(training=True), batch, draws)


@dataclass(frozen=True, eq=False)
class _Work:
    """A plan, and a mini-batch on which its package is compared with the model.

    Attributes:
        shares: the weights of the micro-batches' losses.
        accepted: whether micro-batches may give other results than the mini-batch.
        frozen: whether BatchNorm normalises by its running statistics in training, too.
        rounded: a type to whose rounding they may differ; None for that of each tensor's own.
    """

    subject: Subject
    plan: Plan
    batch: MiniBatch
    shares: Shares
    seed: int
    accepted: bool
    frozen: bool = False
    rounded: torch.dtype | None = None

    @property
    def graph(self) -> Graph:
        return self.plan.known_graph

    @property
    def _lower(self) -> bool:
        """Whether 16 bits are computed in, so that micro-batches round otherwise than the whole."""
        return self.plan.precision is not Precision.FP32 or bool(lower_types(self.graph))

    @property
    def _once(self) -> frozenset[str]:
        return written_once(self.graph)

    @property
    def _goes_on(self) -> frozenset[str]:
        """What forward writes to, and numbers and flags among buffers by which something is
        decided: users set such between steps. The statistics of BatchNorm are apart."""
        graph = self.graph
        normalising = batchnorm_ops(graph, self.subject.model)
        writes = effects(graph).state_writes.items()
        written = {name for op, names in writes if op not in normalising for name in names}
        decided = any(v.dtype is torch.bool and v.shape == () for v in graph.values.values())
        single = (s for s in graph.state.values() if s.kind is StateKind.BUFFER and not s.shape)
        layers = {p for p, m in self.subject.model.named_modules() if isinstance(m, _BatchNorm)}
        return frozenset(written).union(
            state.name
            for state in single
            if (decided or state.dtype is torch.bool)
            and state.name.rpartition(".")[0] not in layers
        )

    @property
    def is_shown_by_package(self) -> bool:
        """Whether a package that gives what the mini-batch in one piece does, in eval mode and for
        a step, shows that micro-batches come to it.

        Where the loop of micro-batches is what a step is held to, it does not; nor does a step show
        the loss in eval mode, where that is another one.
        """
        graph = self.graph
        if self.accepted or self._lower or self._goes_on:
            return False
        if Draws.of(graph, self.seed, training=False).numbers:
            return False
        if not self.plan.training:
            return True
        touchy = mixing_ops(graph) | frozenset(sample_writers(graph))
        return not touchy and self._modes_agree(apart=random_ops(graph))

    def _modes_agree(self, *, apart: Collection[str]) -> bool:
        """Whether all ops do the same in training as in eval mode, these apart."""
        return not any(differs_in_training(op) for op in self.graph.ops if op.name not in apart)

    def in_one_piece(self) -> tuple[Tensors, tuple[str, ...]]:
        """The outputs in eval mode, by the mini-batch in one piece alone."""
        call = ModelCall(self.batch.whole(), contextlib.nullcontext())
        (whole,) = evaluate(self._entry(training=False), [call], Precision.FP32)
        return {ComparedKind.OUTPUT: whole.outputs}, ()

    def evaluated(self) -> tuple[Tensors, tuple[str, ...]]:
        draws = Draws.of(self.graph, self.seed, training=False)
        error, alike = None, False
        try:
            found = self._both(draws)
            alike = found.alike
            if not alike and not self._in_double(_Work._evaluates_alike):
                error = self._unlike(found, draws)
            else:
                error = self._evaluates_otherwise_later(draws)
        except ApartError as problem:
            error = drawn_apart(self.graph, problem)
        notes = self._accept(error)
        if alike and not self._lower:
            return {ComparedKind.OUTPUT: found.whole.outputs}, notes
        entry = self._entry(training=False)
        calls = self._calls(entry, draws)
        parts = evaluate(entry, calls, self.plan.precision, self._once)
        # For its shapes, and what has no batch dimension.
        call = ModelCall(self.batch.whole(), draws.of_model())
        (whole,) = parts if len(parts) == 1 else evaluate(entry, [call], self.plan.precision)
        return {ComparedKind.OUTPUT: joined(parts, self.batch.sizes, whole)}, notes

    def _evaluates_otherwise_later(self, draws: Draws) -> UnsplittableError | None:
        """The error for outputs that are those of micro-batches in the first state alone."""
        for later in self._later():
            if not later._holds(_Work._evaluates_alike):
                return later._unlike(later._both(draws), draws)
        return None

    def trained(self, *, noted: bool) -> tuple[Tensors, tuple[str, ...]]:
        """Loss, gradients, buffers and weights of a training step, and notes.

        Args:
            noted: whether what is accepted is noted already.
        """
        draws = Draws.of(self.graph, self.seed, training=True)
        if noted:
            return self._loop(draws, self.plan.precision), ()
        touchy = mixing_ops(self.graph) | frozenset(sample_writers(self.graph))
        if len(self.batch.sizes) == 1 or (touchy and self.plan.batchnorm is BatchNorm.EXACT):
            call = ModelCall(self.batch.whole(), draws.of_model())
            return self._step([call], self.plan.precision), ()
        layers = touchy & batchnorm_ops(self.graph, self.subject.model)
        if layers:
            if not self.accepted and made_in_batchnorm(self.graph, self.subject.model, layers):
                dataclasses.replace(self, frozen=True).refuse_beside(touchy - layers, layers)
            return self._loop(draws, self.plan.precision), (self._normalises(layers),)
        try:
            for whole, flat in self._wholes(draws):
                plain = not (flat or touchy or self._lower or self.accepted)
                if plain or self._steps_alike(self._loop(draws, Precision.FP32), whole):
                    later = self._departs_later(draws)
                    found = self._loop(draws, self.plan.precision) if self._lower else whole
                    return found, self._accept(later)
        except ApartError as problem:
            error: UnsplittableError | None = drawn_apart(self.graph, problem)
            if problem.inside:
                note = _INSIDE.format(drawn_apart(self.graph, problem).problem)
                return self._loop(draws, self.plan.precision), (note,)
        else:
            error = None
            if not self._in_double(_Work._trains_alike):
                error = departure(self.graph, self._entry(training=True), self.batch, draws)
        return self._loop(draws, self.plan.precision), self._accept(error)

    def refuse_beside(self, others: Collection[str], layers: Collection[str]) -> None:
        """Refuses what takes the samples of a batch together in training, frozen BatchNorm apart.

        Args:
            others: the ops that are known to mix samples or to write, BatchNorm's own apart.
        """
        assert self.graph.loss is not None
        if self.graph.loss.terms:  # which the graph computes, where nothing is frozen
            return
        if not others and not random_ops(self.graph) and self._modes_agree(apart=layers):
            return  # that is the model in eval mode
        check = _Work._trains_alike if others else _Work._forwards_alike
        try:
            if self._holds(check) and all(later._holds(check) for later in self._later()):
                return
        except ApartError as problem:
            if problem.inside:
                return
            raise drawn_apart(self.graph, problem) from problem
        op = next((op for op in self.graph.ops if op.name in others), None)
        if op is None:
            draws = Draws.of(self.graph, self.seed, training=True)
            entry = self._entry(training=True)
            op = where_parted(self.graph, entry, self.batch, draws, beside=layers)
        what = "something" if op is None else op.name
        raise UnsplittableError(
            f"what the model makes of the mini-batch in training is not what its "
            f"{len(self.batch.sizes)} micro-batches come to, BatchNorm apart: {what} takes the "
            "samples of a batch together, or writes for each micro-batch",
            location=None if op is None else op.source,
            hint=HINT,
        )

    def _entry(self, *, training: bool) -> Entry:
        subject = self.subject
        states = map(self.graph.state.get, effects(self.graph).written_states)
        if any(state is not None and state.kind is StateKind.PARAMETER for state in states):
            # An entry has the parameters of the model itself, which stays as it is.
            model = isolated(subject.model)
            subject = dataclasses.replace(subject, model=model)
        entry = make_entry(subject, training, reduces=False)
        for module in entry.model.modules() if self.frozen else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return entry

    def _calls(self, entry: Entry, draws: Draws) -> list[ModelCall]:
        calls = one_by_one(self.batch, entry.signature, draws, self.shares)
        return with_terms(calls, self.graph, draws) if self.plan.training else calls

    def _both(self, draws: Draws, *, training: bool = False) -> Both:
        """The micro-batches and the whole, without gradients and in 32 bits."""
        entry = self._entry(training=training)
        calls = self._calls(entry, draws)
        parts = evaluate(entry, calls, Precision.FP32, self._once)
        found = Both(parts[0], parts, self.batch.sizes, self.shares, self.rounded)
        for inner in (False, True) if len(parts) > 1 else ():
            call = all_at_once(self.batch, draws, calls, inner=inner)
            (whole,) = evaluate(entry, [call], Precision.FP32)
            found = dataclasses.replace(found, whole=whole)
            if found.alike or not flattened(call):
                break
        return found

    def _evaluates_alike(self) -> bool:
        return self._both(Draws.of(self.graph, self.seed, training=False)).alike

    def _forwards_alike(self) -> bool:
        """Whether the results of a forward in training agree. Without finite ones, it is so."""
        found = self._both(Draws.of(self.graph, self.seed, training=True), training=True)
        tensors = [*found.whole.outputs.values(), *found.whole.terms]
        return found.alike or not all(bool(dense(t).isfinite().all()) for t in tensors)

    def _wholes(self, draws: Draws) -> Iterator[tuple[Tensors, bool]]:
        """Steps on the mini-batch in one piece and in 32 bits, and whether a draw is flattened.

        Where one is, there are two, for the two orders in which samples may lie in it.
        """
        entry = self._entry(training=True)
        calls = self._calls(entry, draws)
        if draws.numbers:
            of_each_size = dict(zip(self.batch.sizes[::-1], calls[::-1], strict=True))
            evaluate(entry, [*of_each_size.values()], Precision.FP32)
        for inner in (False, True):
            call = all_at_once(self.batch, draws, calls, inner=inner)
            yield self._step([call], Precision.FP32), flattened(call)
            if not flattened(call):
                return

    def _loop(self, draws: Draws, precision: Precision) -> Tensors:
        entry = self._entry(training=True)
        calls = self._calls(entry, draws)
        deferred = self.plan.batchnorm is BatchNorm.DEFERRED and not self.frozen
        return self._step(calls, precision, self._once, deferred=deferred)

    def _step(
        self,
        calls: Sequence[ModelCall],
        precision: Precision,
        once: Collection[str] = (),
        *,
        deferred: bool = False,
    ) -> Tensors:
        entry, written = self._entry(training=True), effects(self.graph).written_states
        return train_step(entry, calls, precision, once, written=written, deferred=deferred)

    def _later(self) -> Iterator[_Work]:
        """The same of the model as training may leave it; see `later_models`."""
        names = frozenset() if self.accepted else self._goes_on
        for model in later_models(self.subject, names, training=self.plan.training):
            yield dataclasses.replace(self, subject=dataclasses.replace(self.subject, model=model))

    def _departs_later(self, draws: Draws) -> UnsplittableError | None:
        """The error for a step that is that of its micro-batches in the first state alone.

        Such as where a power iteration, which goes on with every call, has converged; or at the
        first of what forward counts.
        """
        for later in (*self._moved(), *self._later()):
            if not later._holds(_Work._trains_alike):
                return departure(self.graph, later._entry(training=True), self.batch, draws)
        return None

    def _moved(self) -> Iterator[_Work]:
        """The same of the model with other weights, where micro-batches may come to others."""
        touchy = mixing_ops(self.graph) | frozenset(sample_writers(self.graph))
        moved = with_other_weights(self.subject.model) if touchy and not self.accepted else None
        if moved is not None:
            yield dataclasses.replace(self, subject=dataclasses.replace(self.subject, model=moved))

    def _holds(self, check: Callable[[_Work], bool]) -> bool:
        """Whether a check holds but for rounding."""
        return check(self) or self._in_double(check)

    def _trains_alike(self) -> bool:
        draws = Draws.of(self.graph, self.seed, training=True)
        loop = self._loop(draws, Precision.FP32)
        return any(self._steps_alike(loop, whole) for whole, _ in self._wholes(draws))

    def _steps_alike(self, loop: Tensors, whole: Tensors) -> bool:
        """Whether two training steps agree but for rounding; without a finite loss, they do."""
        if not all(math.isfinite(loss) for loss in whole[ComparedKind.LOSS].values()):
            return True
        rows = compare(rounded(loop, self.rounded), rounded(whole, self.rounded))
        return all(row.passed for row in rows)

    def _in_double(self, check: Callable[[_Work], bool]) -> bool:
        """Whether a check holds in 64 bits: what fails in fewer bits alone is rounding.

        Where a model that computes in 16 bits by itself does not run in 64, their rounding is
        allowed.
        """
        subject = dataclasses.replace(
            self.subject.with_example(double),
            model=doubled(self.subject.model),
            loss_fn=doubled(self.subject.loss_fn),
        )
        batch = dataclasses.replace(self.batch, inputs=tuple(map(double, self.batch.inputs)))
        own = lower_types(self.graph)
        try:
            with without_lower() if own else contextlib.nullcontext():
                return check(dataclasses.replace(self, subject=subject, batch=batch))
        except Exception:  # whatever the model's code raises in a type that it does not expect
            coarsest = max(own, key=lambda dtype: torch.finfo(dtype).eps, default=None)
            return coarsest is not None and check(dataclasses.replace(self, rounded=coarsest))

    def _unlike(self, found: Both, draws: Draws) -> UnsplittableError:
        losses, outputs = found.losses, found.unlike
        if losses is not None and not losses.equal and (not outputs or cause_of(self.graph)):
            return explain(self.graph, losses)
        entry = self._entry(training=False)
        return departure(self.graph, entry, self.batch, draws, outputs)

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
