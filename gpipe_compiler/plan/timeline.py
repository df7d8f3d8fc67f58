"""The times of the stages of a plan, and when each of its actions starts and ends."""

from __future__ import annotations

import dataclasses

import torch

from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.runtime.spec import Crossing, Remat
from gpipe_compiler.simulate.step import Simulation, StageTimes, simulate


def timeline(plan: Plan) -> Simulation:
    return simulate(plan.orders, stage_times(plan), plan.joint)


def stage_times(plan: Plan) -> tuple[StageTimes, ...]:
    """For every stage, seconds of one micro-batch: computing, and moving what it receives."""
    cluster = plan.cluster

    def seconds(crossing: Crossing, target: int) -> float:
        ends = plan.device_of(crossing.source), plan.device_of(target)
        return cluster.between(*ends).seconds(crossing_bytes(crossing))

    times = []
    for stage in plan.stages:
        received = [c for c in plan.crossings if stage.index in c.targets]
        alone = StageTimes(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s if plan.training else 0.0,
            weight_s=stage.weight_s,
            update_s=stage.update_s,
            receive_s=sum(seconds(c, stage.index) for c in received),
            gradient_s=sum(
                seconds(c, stage.index) for c in received if c.gradient and plan.training
            ),
        )
        times.append(recomputing(stage, alone) if plan.training else alone)
    return tuple(times)


def recomputing(stage: Stage, times: StageTimes) -> StageTimes:
    """The times of a stage with what it runs again: segments when their backward has come."""
    return dataclasses.replace(
        times,
        backward_s=times.backward_s + stage.segments_s,
        recompute_s=stage.forward_s if stage.remat is Remat.FULL else 0.0,
    )


def crossing_bytes(crossing: Crossing) -> int:
    return torch.Size(crossing.example_shape).numel() * crossing.dtype.itemsize
