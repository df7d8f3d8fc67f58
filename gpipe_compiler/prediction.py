"""What a training step of a plan is expected to take: time, waiting, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from gpipe_compiler.cluster import Link
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.plan import Prediction, Stage
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.spec import Precision, Remat
from gpipe_compiler.simulate import Lane, Simulation, simulate


def predict(
    graph: Graph,
    stages: Sequence[Stage],
    orders: Orders,
    found: Cut,
    link: Link,
    joint: Collection[int] = (),
) -> Prediction:
    """What to expect of these stages, whose times are those of the cut.

    Args:
        link: over which stages add up the gradients of parameters they share.
        joint: the stages that take all micro-batches as one. The cut was made as if none did; its
            lower bound holds for them too.
    """
    times = [
        dataclasses.replace(time, recompute_s=stage.recompute_s)
        for stage, time in zip(stages, found.times, strict=True)
    ]
    simulation = simulate(orders, times, joint)
    owners = dict(shared(graph, stages))
    sum_s = {name: _sum_s(graph, name, held, link) for name, held in owners.items()}
    step_s = _with_sums(simulation, owners, sum_s)
    whole = step_s * len(orders)
    microbatches = max((action.microbatch + 1 for order in orders for action in order), default=1)
    flying = in_flight(orders, len(stages))
    return Prediction(
        step_s=step_s,
        bottleneck_s=max(simulation.busy_s) / microbatches,
        bubble=1.0 - sum(simulation.busy_s) / whole if whole > 0 else 0.0,
        lower_bound_s=found.lower_bound_s,
        proved=found.proved and not joint and not sum_s,
        peak_bytes=tuple(
            peak_bytes(graph, stage, count, whole=stage.index in joint)
            for stage, count in zip(stages, flying, strict=True)
        ),
        recompute=sum(simulation.recompute_s) / whole if whole > 0 else 0.0,
        shared_sum_s=sum(sum_s.values()),
    )


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


def _sum_s(graph: Graph, name: str, owners: Sequence[int], link: Link) -> float:
    """Seconds in which the owners' gradients go to the first of them, and the sum comes back."""
    return 2 * (len(owners) - 1) * link.seconds(graph.state[name].bytes)


def _with_sums(
    simulation: Simulation,
    owners: Mapping[str, Sequence[int]],
    sum_s: Mapping[str, float],
) -> float:
    """The end of the step, when shared gradients are summed one after another.

    Each waits for the last backward of its owners.
    """
    ends: dict[int, float] = {}
    for span in simulation.timeline:
        if span.lane is Lane.DEVICE:
            stage = span.action.stage
            ends[stage] = max(ends.get(stage, 0.0), span.end_s)
    free = 0.0
    for name in sorted(owners, key=lambda name: max(ends[stage] for stage in owners[name])):
        free = max(free, *(ends[stage] for stage in owners[name])) + sum_s[name]
    return max(simulation.step_s, free)


def peak_bytes(graph: Graph, stage: Stage, flying: int, *, whole: bool = False) -> int:
    """The bytes of a stage at its peak: its state, gradients, and what it keeps of micro-batches.

    A stage that recomputes keeps what it received of each, and one of them whole at a time.

    Args:
        flying: the most micro-batches that wait for their backward at one time.
        whole: whether the stage takes them as one, and has all of them whole for its backward.
    """
    states = [graph.state[name] for name in stage.state]
    fixed = sum(state.bytes for state in states)
    trained = sum(state.bytes for state in states if state.requires_grad)
    if graph.loss is not None:
        fixed += trained
        if graph.precision is not Precision.FP32:
            fixed += trained // 2  # a run keeps 16-bit copies of its weights
    if stage.remat is Remat.FULL and flying > 1 and not whole:
        return fixed + flying * stage.input_bytes + stage.saved_bytes
    return fixed + flying * stage.saved_bytes


def in_flight(orders: Orders, stages: int) -> tuple[int, ...]:
    """For every stage, the most micro-batches that wait for their backward at one time.

    One, where nothing comes back: a stage works on one micro-batch after the other.
    """
    most = [1] * stages
    for order in orders:
        for stage in {action.stage for action in order}:
            own = [action for action in order if action.stage == stage]
            if any(action.phase is Phase.BACKWARD for action in own):
                most[stage] = max(accumulate(map(_step, own)))
    return tuple(most)


def _step(action: Compute) -> int:
    return 1 if action.phase is Phase.FORWARD else -1
