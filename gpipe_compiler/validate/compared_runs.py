"""The model in plain PyTorch: on a mini-batch in one piece, and micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_compiler.frontend.comparable_runs import double, widening, with_other_weights
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph, StateKind
from gpipe_compiler.passes.cross_sample_ops import batchnorm_ops, mixing_ops
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.written_once import sample_writers, written_once
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import BatchNorm, Precision
from gpipe_compiler.runtime.train.comparison import ComparedKind, Tensors, compare, dense
from gpipe_compiler.validate.departure import Both
from gpipe_compiler.validate.draws import Draws
from gpipe_compiler.validate.later_states import later_models
from gpipe_compiler.validate.loss_splitting import Losses
from gpipe_compiler.validate.plain_run import (
    MiniBatch,
    ModelCall,
    Shares,
    all_at_once,
    evaluate,
    flattened,
    one_by_one,
    train_step,
    with_terms,
)
from gpipe_compiler.validate.rounding import doubled, lower_types, rounded


@dataclass(frozen=True, eq=False)
class ComparedRuns:
    """A plan, and a mini-batch on which the model runs in one piece and by micro-batches.

    Attributes:
        shares: the weights of the micro-batches' losses.
        accepted: whether micro-batches may give other results than the mini-batch.
        frozen: whether BatchNorm normalises by its running statistics in training, too.
        rounded: a type to whose rounding they may differ; None for that of each tensor's own.
        forced: whether the model decides otherwise than its graph, which computes the terms of a
            loss: where there are several, outputs alone are compared then.
    """

    subject: Subject
    plan: Plan
    batch: MiniBatch
    shares: Shares
    seed: int
    accepted: bool
    frozen: bool = False
    rounded: torch.dtype | None = None
    forced: bool = False

    @property
    def graph(self) -> Graph:
        return self.plan.known_graph

    @property
    def rounds(self) -> bool:
        """Whether 16 bits are computed in, so that micro-batches round otherwise than the whole."""
        return self.plan.precision is not Precision.FP32 or bool(lower_types(self.graph))

    @property
    def written_once(self) -> frozenset[str]:
        return written_once(self.graph)

    @property
    def goes_on(self) -> frozenset[str]:
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

    def entry(self, *, training: bool) -> Entry:
        """The model with its loss, on a copy that may be written to."""
        subject = self.subject
        states = map(self.graph.state.get, effects(self.graph).written_states)
        if any(state is not None and state.kind is StateKind.PARAMETER for state in states):
            # An entry has the parameters of the model itself, which stays as it is.
            model = isolated(subject.model)
            subject = dataclasses.replace(subject, model=model)
        entry = Entry(subject, training, reduces=False)
        for module in entry.model.modules() if self.frozen else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return entry

    def calls(self, entry: Entry, draws: Draws) -> list[ModelCall]:
        calls = one_by_one(self.batch, entry.signature, draws, self.shares)
        by_graph = self.plan.training and not self.forced
        return with_terms(calls, self.graph, draws) if by_graph else calls

    def both(self, draws: Draws, *, training: bool = False) -> Both:
        """The micro-batches and the whole, without gradients and in 32 bits."""
        entry = self.entry(training=training)
        calls = self.calls(entry, draws)
        parts = evaluate(entry, calls, Precision.FP32, self.written_once)
        found = Both(parts[0], parts, self.batch.sizes, self.shares, self.rounded)
        for inner in (False, True) if len(parts) > 1 else ():
            call = all_at_once(self.batch, draws, calls, inner=inner)
            (whole,) = evaluate(entry, [call], Precision.FP32)
            found = dataclasses.replace(found, whole=whole)
            if self._are_alike(found) or not flattened(call):
                break
        return found

    def wholes(self, draws: Draws) -> Iterator[tuple[Tensors, bool]]:
        """Steps on the mini-batch in one piece and in 32 bits, and whether a draw is flattened.

        Where one is, there are two, for the two orders in which samples may lie in it.
        """
        entry = self.entry(training=True)
        calls = self.calls(entry, draws)
        if draws.numbers:
            of_each_size = dict(zip(self.batch.sizes[::-1], calls[::-1], strict=True))
            evaluate(entry, [*of_each_size.values()], Precision.FP32)
        for inner in (False, True):
            call = all_at_once(self.batch, draws, calls, inner=inner)
            yield self.step([call], Precision.FP32), flattened(call)
            if not flattened(call):
                return

    def loop(self, draws: Draws, precision: Precision) -> Tensors:
        """A training step of micro-batches, one after another."""
        entry = self.entry(training=True)
        calls = self.calls(entry, draws)
        deferred = self.plan.batchnorm is BatchNorm.DEFERRED and not self.frozen
        return self.step(calls, precision, self.written_once, deferred=deferred)

    def step(
        self,
        calls: Sequence[ModelCall],
        precision: Precision,
        once: Collection[str] = (),
        *,
        deferred: bool = False,
    ) -> Tensors:
        entry, written = self.entry(training=True), effects(self.graph).written_states
        return train_step(entry, calls, precision, once, written=written, deferred=deferred)

    def later(self) -> Iterator[Self]:
        """The same of the model as training may leave it; see `later_models`."""
        names = frozenset() if self.accepted else self.goes_on
        for model, forced in later_models(self.subject, names, training=self.plan.training):
            subject = dataclasses.replace(self.subject, model=model)
            yield dataclasses.replace(self, subject=subject, forced=forced)

    def moved(self) -> Iterator[Self]:
        """The same of the model with other weights, where micro-batches may come to others."""
        touchy = mixing_ops(self.graph) | frozenset(sample_writers(self.graph))
        moved = with_other_weights(self.subject.model) if touchy and not self.accepted else None
        if moved is not None:
            yield dataclasses.replace(self, subject=dataclasses.replace(self.subject, model=moved))

    def holds(self, check: Callable[[Self], bool]) -> bool:
        """Whether a check holds but for rounding."""
        return check(self) or self.in_double(check)

    def in_double(self, check: Callable[[Self], bool]) -> bool:
        """Whether a check holds in 64 bits: what fails in fewer bits alone is rounding.

        Where a model that computes in 16 bits by itself does not run in 64, their rounding is
        allowed.
        """
        own = lower_types(self.graph)
        try:
            with widening(own) if own else contextlib.nullcontext():
                return check(self._doubled())
        except Exception:  # whatever the model's code raises in a type that it does not expect
            coarsest = max(own, key=lambda dtype: torch.finfo(dtype).eps, default=None)
            return coarsest is not None and check(dataclasses.replace(self, rounded=coarsest))

    def losses_in_double(self, *, training: bool) -> Losses | None:
        """The losses of a forward in 64 bits throughout; None where the model does not run so."""
        draws = Draws.of(self.graph, self.seed, training=training)
        usual = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            with widening({torch.float32, *lower_types(self.graph)}):
                found = self._doubled().both(draws, training=training).losses
        except Exception:  # whatever the model's code raises in a type that it does not expect
            return None
        finally:
            torch.set_default_dtype(usual)
        return found if found is not None and found.whole.dtype is torch.float64 else None

    def _doubled(self) -> Self:
        subject = dataclasses.replace(
            self.subject.with_example(double),
            model=doubled(self.subject.model),
            loss_fn=doubled(self.subject.loss_fn),
        )
        batch = dataclasses.replace(self.batch, inputs=tuple(map(double, self.batch.inputs)))
        return dataclasses.replace(self, subject=subject, batch=batch)

    @property
    def compares_outputs_alone(self) -> bool:
        """Whether the losses of micro-batches are left out."""
        return self.forced and self.graph.loss is not None and self.graph.loss.of_parts

    def _are_alike(self, found: Both) -> bool:
        return not found.unlike if self.compares_outputs_alone else found.alike

    def evaluates_alike(self) -> bool:
        found = self.both(Draws.of(self.graph, self.seed, training=False))
        return self._are_alike(found)

    def forwards_alike(self) -> bool:
        """Whether the results of a forward in training agree. Without finite ones, it is so."""
        found = self.both(Draws.of(self.graph, self.seed, training=True), training=True)
        tensors = [*found.whole.outputs.values(), *found.whole.terms]
        return self._are_alike(found) or not all(bool(dense(t).isfinite().all()) for t in tensors)

    def trains_alike(self) -> bool:
        """Whether a training step agrees, in one of the orders that a draw may have."""
        draws = Draws.of(self.graph, self.seed, training=True)
        if self.compares_outputs_alone:
            return not self.both(draws, training=True).unlike
        loop = self.loop(draws, Precision.FP32)
        return any(self.steps_alike(loop, whole) for whole, _ in self.wholes(draws))

    def steps_alike(self, loop: Tensors, whole: Tensors) -> bool:
        """Whether two training steps agree but for rounding; what is not finite tells nothing."""
        known = {
            kind: {name for name, tensor in group.items() if bool(dense(tensor).isfinite().all())}
            for kind, group in whole.items()
        }
        if len(known[ComparedKind.LOSS]) < len(whole[ComparedKind.LOSS]):
            return True
        one, other = (
            {
                kind: {name: tensor for name, tensor in group.items() if name in known[kind]}
                for kind, group in step.items()
            }
            for step in (loop, whole)
        )
        rows = compare(rounded(one, self.rounded), rounded(other, self.rounded))
        return all(row.passed for row in rows)
