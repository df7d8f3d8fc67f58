"""What a training step of a plan is expected to take: time, waiting, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from itertools import accumulate

from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.plan import Prediction, Stage
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.spec import Precision, Remat
from gpipe_compiler.simulate import simulate


def predict(
    graph: Graph,
    stages: Sequence[Stage],
    orders: Orders,
    found: Cut,
    joint: Collection[int] = (),
) -> Prediction:
    """What to expect of these stages, whose times are those of the cut.

    Args:
        joint: the stages that take all micro-batches as one. The cut was made as if none did; its
            lower bound holds for them too.
    """
    times = [
        dataclasses.replace(time, recompute_s=stage.recompute_s)
        for stage, time in zip(stages, found.times, strict=True)
    ]
    simulation = simulate(orders, times, joint)
    whole = simulation.step_s * len(orders)
    microbatches = max((action.microbatch + 1 for order in orders for action in order), default=1)
    flying = in_flight(orders, len(stages))
    return Prediction(
        step_s=simulation.step_s,
        bottleneck_s=max(simulation.busy_s) / microbatches,
        bubble=simulation.bubble,
        lower_bound_s=found.lower_bound_s,
        proved=found.proved and not joint,
        peak_bytes=tuple(
            peak_bytes(graph, stage, count, whole=stage.index in joint)
            for stage, count in zip(stages, flying, strict=True)
        ),
        recompute=sum(simulation.recompute_s) / whole if whole > 0 else 0.0,
    )


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
