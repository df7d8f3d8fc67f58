"""What the memory of a plan would be with other settings, its stages left as they are.

Every setting is played like the plan itself (`memory.devices`). A new compile with it may find
better stages for it; it can always have these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.errors import GPipeCompilerError, PlanError
from gpipe_compiler.ir import Graph
from gpipe_compiler.memory.devices import device_memories
from gpipe_compiler.options.policy import Policy
from gpipe_compiler.passes.cost import Costs, OpCost
from gpipe_compiler.passes.costs_by_kind import costs_by_kind
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.inplace import torn, undone
from gpipe_compiler.passes.rehearsal import MemoryTraces
from gpipe_compiler.passes.remat import FEW
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.plan.timeline import timeline
from gpipe_compiler.plan.what_if import Remedy, WhatIf
from gpipe_compiler.planner.memory_fit import layout_of
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.planning import microbatch_size
from gpipe_compiler.planner.remat import DeviceRematOptions, ways
from gpipe_compiler.runtime.schedule import (
    forward_only,
    orders_for,
    placement_for,
    splits_backward,
)
from gpipe_compiler.runtime.schedule.actions import Orders
from gpipe_compiler.runtime.spec import BatchNorm, Crossing, Precision, Remat, ScheduleKind
from gpipe_compiler.text.units import format_limit


def what_if(planner: Planner, plan: Plan, policy: Policy) -> WhatIf:
    """What each remedy would save.

    A remedy that the model or the schedule refuses is left out.

    Args:
        bench: that made the plan, of a graph that torch can run.
        policy: that of the plan; its schedule is the plan's, whatever it says.
    """
    return _Trials(planner, plan, dataclasses.replace(policy, schedule=plan.schedule)).told()


@dataclass(frozen=True)
class _Trials:
    """A plan to be changed."""

    planner: Planner
    plan: Plan
    policy: Policy

    def told(self) -> WhatIf:
        """All that is to be told."""
        found: list[Remedy] = []
        for trial in (
            self._microbatches,
            self._full,
            self._auto,
            self._schedules,
            self._bf16,
        ):
            try:
                found.extend(trial())
            except GPipeCompilerError:
                continue  # what it asks for cannot be had of this model
        return WhatIf(tuple(found))

    # --- the remedies ------------------------------------------------------------------------

    def _microbatches(self) -> Iterator[Remedy]:
        """The next number of micro-batches that is at least twice theirs."""
        plan = self.plan
        batch = plan.batch_size // plan.replicas
        more = (n for n in range(2 * plan.microbatches, batch + 1) if not batch % n)
        count = next(more, None)
        if count is not None:
            changed = dataclasses.replace(
                plan, microbatches=count, orders=self._orders(plan.schedule, count)
            )
            yield self._with_graph(f"--microbatches {count}", changed, plan.precision)

    def _full(self) -> Iterator[Remedy]:
        if self.plan.training and self._whole.stages != self.plan.stages:
            yield self._recomputed

    @cached_property
    def _whole(self) -> Plan:
        """The plan with every stage run again whole."""
        return dataclasses.replace(self.plan, stages=tuple(map(_full, self.plan.stages)))

    @cached_property
    def _recomputed(self) -> Remedy:
        return self._remedy("--remat full", self._whole, self._known)

    def _auto(self) -> Iterator[Remedy]:
        """The fastest way to half of what recomputing everything would save."""
        plan = self.plan
        if not plan.training:
            return
        least = max(self._recomputed.device_bytes)
        most = (max(plan.prediction.device_bytes) + least) / 2
        changed = dataclasses.replace(plan, stages=self._fitted(most))
        if changed.stages not in (plan.stages, self._whole.stages):
            remedy = self._remedy("", changed, self._known)
            words = f"--remat auto --memory {format_limit(max(remedy.device_bytes))}"
            yield dataclasses.replace(remedy, change=words)

    def _schedules(self) -> Iterator[Remedy]:
        """The schedules that put stages where they are; and recomputing on top of the best."""
        plan = self.plan
        if not plan.training or plan.batchnorm is BatchNorm.EXACT:
            return
        for kind in ScheduleKind:
            if kind is plan.schedule or splits_backward(kind):
                continue
            orders = self._placed_orders(kind)
            if orders is None or orders == plan.orders:
                continue
            changed = dataclasses.replace(plan, schedule=kind, orders=orders)
            words = f"--schedule {kind.value}"
            yield self._remedy(words, changed, self._known)
            if self._whole.stages != plan.stages:
                changed = dataclasses.replace(changed, stages=self._whole.stages)
                yield self._remedy(f"{words} --remat full", changed, self._known)

    def _bf16(self) -> Iterator[Remedy]:
        if self.plan.precision is Precision.FP32:
            changed = dataclasses.replace(self.plan, precision=Precision.BF16)
            yield self._with_graph("--precision bf16", changed, Precision.BF16)

    # --- how they are made -------------------------------------------------------------------

    @cached_property
    def _graph(self) -> Graph:
        assert self.plan.graph is not None
        return self.plan.graph

    @cached_property
    def _known(self) -> MemoryTraces:
        """Of the plan's own graph."""
        facts = self.planner.prepare(self.plan.microbatches, self.policy).facts
        return facts.rehearsals if facts.graph is self._graph else MemoryTraces(self._graph)

    @cached_property
    def _estimates(self) -> Sequence[Costs]:
        """The costs of the plan's own graph on each kind of device, by their rooflines."""
        if not self.planner.measured:
            return self.planner.prepare(self.plan.microbatches, self.policy).costs
        return costs_by_kind(self._graph, self.plan.cluster.kinds, measured=False)

    @cached_property
    def _placement(self) -> tuple[int, ...]:
        return self.plan.placement or tuple(range(len(self.plan.stages)))

    def _orders(self, kind: ScheduleKind, microbatches: int) -> Orders:
        if not self.plan.training:
            return forward_only(self._placement, microbatches, self.plan.joint)
        try:
            return orders_for(kind, self._placement, microbatches, self.plan.joint)
        except ValueError as error:
            raise PlanError(str(error)) from error

    def _placed_orders(self, kind: ScheduleKind) -> Orders | None:
        """The orders of another schedule; None where it would put the stages elsewhere."""
        plan = self.plan
        try:
            if placement_for(kind, len(plan.stages), len(plan.orders)) != self._placement:
                return None
            return orders_for(kind, self._placement, plan.microbatches)
        except ValueError:
            return None

    def _remedy(self, words: str, changed: Plan, rehearsals: MemoryTraces) -> Remedy:
        layout = layout_of(changed, self.policy.optimizer)
        memory = device_memories(rehearsals.graph, layout, rehearsals)
        # What the simulation leaves out, as sums of shared gradients, stays.
        step_s = self.plan.prediction.step_s + timeline(changed).step_s - self._step_s
        return Remedy(words, tuple(device.peak for device in memory), step_s)

    @cached_property
    def _step_s(self) -> float:
        return timeline(self.plan).step_s

    def _with_graph(self, words: str, changed: Plan, precision: Precision) -> Remedy:
        """Micro-batches of another size, or in another precision.

        Op times of a plan whose ops were measured change by as much as their rooflines do.
        """
        samples = microbatch_size(changed.batch_size, changed.microbatches, changed.replicas)
        in_place = self.policy.in_place
        plain, graph = self.planner.described(samples, precision, in_place=in_place)
        if in_place:
            stage_of = {
                op: stage.index
                for stage in changed.stages
                for op in stage.ops
                if op not in stage.duplicates
            }
            wrong = torn(graph, plain, effects(graph), stage_of)
            graph = undone(graph, plain, wrong) if wrong else graph
        kinds = self.plan.cluster.kinds
        before, after = self._estimates, costs_by_kind(graph, kinds, measured=False)
        stages = []
        for stage in changed.stages:
            kind = kinds.index(self.plan.device(stage.index))
            stages.append(_scaled(stage, before[kind], after[kind]))
        crossings = tuple(_described(crossing, graph) for crossing in changed.crossings)
        changed = dataclasses.replace(
            changed, graph=graph, stages=tuple(stages), crossings=crossings
        )
        return self._remedy(words, changed, MemoryTraces(graph))

    def _fitted(self, memory: float) -> tuple[Stage, ...]:
        """The stages, recomputing as little as fits so many bytes a device, as the search counts.

        Those of devices that fit stay as they are.
        """
        plan = self.plan
        prepared = self.planner.prepare(plan.microbatches, self.policy)
        split = splits_backward(plan.schedule)
        stages = list(plan.stages)
        for order, size in zip(plan.orders, plan.prediction.device_bytes, strict=True):
            if size <= memory:
                continue
            numbers = sorted({action.stage for action in order})
            kind = plan.cluster.kinds.index(plan.device(numbers[0]))
            costs = prepared.costs[kind].ops
            seconds = {name: cost.forward_s for name, cost in costs.items()}
            known = {n: ways(prepared.facts, stages[n], seconds, FEW) for n in numbers}
            device = DeviceRematOptions.of(order, plan.joint, stages, known, split=split)
            for number, way in device.fastest(memory, tuple(Remat))[1].items():
                stages[number] = way.of(stages[number], split=split)
        return tuple(stages)


def _full(stage: Stage) -> Stage:
    return dataclasses.replace(stage, remat=Remat.FULL, segments=())


def _described(crossing: Crossing, graph: Graph) -> Crossing:
    """The boundary value as it is in another graph of the same ops."""
    value = graph.values[crossing.value]
    assert value.dtype is not None  # only tensors cross
    return dataclasses.replace(crossing, shape=value.shape, dtype=value.dtype)


def _scaled(stage: Stage, before: Costs, after: Costs) -> Stage:
    """A stage whose times have changed as those of its ops did."""
    old = [before.ops[name] for name in stage.ops]
    new = [after.ops[name] for name in stage.ops]

    def ratio(of: Callable[[OpCost], float]) -> float:
        whole = sum(map(of, old))
        return sum(map(of, new)) / whole if whole > 0 else 1.0

    forward, backward = ratio(lambda cost: cost.forward_s), ratio(lambda cost: cost.backward_s)
    return dataclasses.replace(
        stage,
        forward_s=stage.forward_s * forward,
        segments_s=stage.segments_s * forward,
        backward_s=stage.backward_s * backward,
        weight_s=stage.weight_s * backward,
    )
