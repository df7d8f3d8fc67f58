"""Stages of a graph, and what a training step of them is expected to take in time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.cluster import Link
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.plan import Prediction, Stage
from gpipe_compiler.plan.plan import recomputing
from gpipe_compiler.planner.stage_table import StageTable
from gpipe_compiler.runtime.schedule.actions import Orders
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.simulate.in_flight import Load, loads
from gpipe_compiler.simulate.step import Lane, Simulation, simulate


@dataclass(frozen=True)
class Candidate:
    """A cut, what its stages hold, and what to expect of them.

    Attributes:
        joint: the stages that take all micro-batches as one.
    """

    found: Cut
    table: StageTable
    stages: tuple[Stage, ...]
    orders: Orders
    joint: tuple[int, ...]
    prediction: Prediction

    @property
    def recomputing(self) -> tuple[bool, ...]:
        """Which stages recompute more than the model itself does."""
        return tuple(not stage.written for stage in self.stages)

    def runs_as(self, other: Candidate) -> bool:
        """Whether the same devices do the same as those of the other."""
        return (self.stages, self.orders, self.joint, self.found.slots) == (
            other.stages,
            other.orders,
            other.joint,
            other.found.slots,
        )

    def bounded_by(self, other: Candidate) -> Candidate:
        """The same, of which no more is known than the lower bound of the other."""
        known = dataclasses.replace(
            self.prediction,
            lower_bound_s=min(other.prediction.lower_bound_s, self.prediction.objective_s),
            proved=False,
        )
        return dataclasses.replace(self, prediction=known)


def predict(
    graph: Graph,
    stages: Sequence[Stage],
    orders: Orders,
    found: Cut,
    between: Callable[[int, int], Link],
    joint: Collection[int] = (),
) -> Prediction:
    """What to expect of these stages, whose times are those of the cut.

    Args:
        between: the link between two stages, over which they add up the gradients of parameters
            that they share.
        joint: the stages that take all micro-batches as one. The cut was made as if none did; its
            lower bound holds for them too.
    """
    times = [recomputing(stage, time) for stage, time in zip(stages, found.times, strict=True)]
    simulation = simulate(orders, times, joint)
    update_s = [time.update_s for time in times]
    device_of = {action.stage: device for device, order in enumerate(orders) for action in order}
    owners = {
        name: held
        for name, held in shared(graph, stages)
        if len({device_of[stage] for stage in held}) > 1
    }
    sum_s = {
        name: _sum_s(graph, name, {device_of[stage]: stage for stage in held}, between)
        for name, held in owners.items()
    }
    step_s = _with_sums(simulation, owners, sum_s, update_s)
    whole = step_s * len(orders)
    microbatches = max((action.microbatch + 1 for order in orders for action in order), default=1)
    held = loads(orders, *remats(stages, joint))
    again_s = sum(simulation.recompute_s) + microbatches * sum(s.segments_s for s in stages)
    alone = {stage: load.of(stage) for load in held for stage in load.stages}
    return Prediction(
        step_s=step_s,
        bottleneck_s=max(simulation.busy_s) / microbatches,
        bubble=1.0 - sum(simulation.busy_s) / whole if whole > 0 else 0.0,
        lower_bound_s=found.lower_bound_s,
        proved=found.proved and not joint and not sum_s,
        peak_bytes=tuple(peak_bytes(stages, alone[stage.index]) for stage in stages),
        device_bytes=tuple(peak_bytes(stages, load) for load in held),
        recompute=again_s / whole if whole > 0 else 0.0,
        shared_sum_s=sum(sum_s.values()),
        longest_s=found.bottleneck_s if found.objective is Objective.BOTTLENECK else None,
    )


def remats(
    stages: Sequence[Stage], joint: Collection[int]
) -> tuple[list[int], Collection[int], list[int]]:
    """The stages that recompute all at once, the joint ones, and those with segments."""
    full, segmented = (
        [stage.index for stage in stages if stage.remat is kind]
        for kind in (Remat.FULL, Remat.SEGMENTS)
    )
    return full, joint, segmented


def shared(graph: Graph, stages: Sequence[Stage]) -> list[tuple[str, tuple[int, ...]]]:
    """The trained parameters that several stages hold, with these stages."""
    if graph.loss is None:
        return []
    owners: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.state:
            if graph.state[name].requires_grad:
                owners.setdefault(name, []).append(stage.index)
    return [(name, tuple(held)) for name, held in owners.items() if len(held) > 1]


def _sum_s(
    graph: Graph, name: str, owners: Mapping[int, int], between: Callable[[int, int], Link]
) -> float:
    """Seconds in which the owners' gradients go to the first of them, and the sum comes back.

    Args:
        owners: a stage on each device that holds some: what these have made goes as one.
    """
    first, *others = (stage for _, stage in sorted(owners.items()))
    size = graph.state[name].bytes
    return 2 * sum(between(first, other).seconds(size) for other in others)


def _with_sums(
    simulation: Simulation,
    owners: Mapping[str, Sequence[int]],
    sum_s: Mapping[str, float],
    update_s: Sequence[float],
) -> float:
    """The end of the step, when shared gradients are summed one after another.

    Each waits for the last backward of its owners, which are updated after it.
    """
    ends: dict[int, float] = {}
    for span in simulation.timeline:
        if span.lane is Lane.DEVICE:
            stage = span.action.stage
            ends[stage] = max(ends.get(stage, 0.0), span.end_s)
    free = 0.0
    for name in sorted(owners, key=lambda name: max(ends[stage] for stage in owners[name])):
        free = max(free, *(ends[stage] for stage in owners[name])) + sum_s[name]
    tied = {stage for stages in owners.values() for stage in stages}
    return max(simulation.step_s, free + max((update_s[stage] for stage in tied), default=0.0))


def peak_bytes(stages: Sequence[Stage], load: Load) -> int:
    """The bytes of some stages of a device at its peak: their state, and what they hold of
    micro-batches."""
    held = [stages[index] for index in load.stages]
    sizes = zip(*(stage.microbatch_bytes for stage in held), strict=True)
    return sum(stage.state_bytes for stage in held) + int(load.peak(*sizes))
