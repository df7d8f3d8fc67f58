"""What the devices of a plan would do without a pipeline: one of them alone, or all as replicas."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.cluster.machines import NO_LINK
from gpipe_compiler.errors import ModelError, PlanError, UsageError
from gpipe_compiler.options import Objective, Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.plan.stages import WholeModel
from gpipe_compiler.planner.candidates import CandidateBuilder
from gpipe_compiler.planner.planner import Planner, make_plan
from gpipe_compiler.planner.planning import microbatch_size
from gpipe_compiler.planner.search import AT_FIRST
from gpipe_compiler.runtime.spec import BatchNorm, ScheduleKind, WeightSharding

_TYPICAL_BYTES = 2.0**27
"""Of a message by which links of different latencies are compared."""


def without_pipeline(planner: Planner, plan: Plan, policy: Policy) -> tuple[WholeModel, ...]:
    """The whole model on one of the plan's devices, and on each of all that it uses.

    Nothing is recomputed but what the model itself checkpoints. Each device has all of its share
    of the mini-batch at once, as in a plain training loop.
    """
    count = len(plan.orders) * plan.replicas
    if count == 1:
        return ()
    numbers = _numbers(plan)
    cluster = planner.cluster.sized(count)
    used = [cluster.devices[number] for number in numbers]
    if planner.cluster.pooled:
        memory = sum(device.memory for device in planner.cluster.devices)
        used = [dataclasses.replace(device, memory=memory) for device in used]
    kinds = list(dict.fromkeys(used))
    shared = [dataclasses.replace(k, memory=k.memory // count) for k in kinds]
    ring = _slowest(cluster, numbers)
    one = [_whole(planner, plan, policy, (kind,), NO_LINK) for kind in kinds]
    several = [
        _whole(planner, plan, policy, (kind,) * count, ring)
        for kind in (shared if planner.cluster.pooled else kinds)
    ]
    return _better(one), _slower(several)


def _numbers(plan: Plan) -> list[int]:
    """The numbers in the cluster of all devices that the plan uses."""
    slots = plan.slots or tuple(range(len(plan.orders)))
    if plan.replicas == 1:
        return list(slots)
    count = len(plan.orders) * plan.replicas
    apart = len(plan.cluster.sized(count).devices) // plan.replicas
    return [slot + replica * apart for replica in range(plan.replicas) for slot in slots]


def _slowest(cluster: Cluster, numbers: Sequence[int]) -> Link:
    """The slowest link of a ring through these devices, by which their gradients are reduced."""
    pairs = itertools.pairwise((*numbers, numbers[0]))
    links = [cluster.between(one, other) for one, other in pairs]
    return max(links, key=lambda link: link.seconds(_TYPICAL_BYTES))


def _better(found: Sequence[WholeModel]) -> WholeModel:
    """That on the kind of device that is best for it."""
    return min(found, key=lambda whole: (bool(whole.problem), not whole.possible, whole.here_s))


def _slower(found: Sequence[WholeModel]) -> WholeModel:
    """Equal shares on devices of several kinds: the slowest tells the time, the fullest whether
    they fit."""
    fullest = max(found, key=lambda whole: (bool(whole.problem), whole.peak_bytes - whole.memory))
    return dataclasses.replace(
        fullest,
        step_s=max(whole.step_s for whole in found),
        here_s=max(whole.here_s for whole in found),
    )


def _whole(
    planner: Planner, plan: Plan, policy: Policy, devices: tuple[Device, ...], link: Link
) -> WholeModel:
    count = len(devices)
    alone = dataclasses.replace(
        policy,
        schedule=ScheduleKind.GPIPE,
        loss_over_batch=False,
        remat=RematChoice.NONE,
        batchnorm=BatchNorm.MICRO,
        data_parallel=count,
        sharding=policy.sharding if count > 1 else WeightSharding.NONE,
        objective=Objective.STEP,
        cut_inside=0.0,
        prove=False,
    )
    cluster = Cluster(devices, link, places=planner.cluster.places)
    choice = Choice(1, 1, ScheduleKind.GPIPE, 1, RematChoice.NONE)
    try:
        samples = microbatch_size(planner.batch_size, 1, count)
        prepared = planner.resized(samples, plan.microbatches, policy, cluster.kinds)
        builder = CandidateBuilder.of(prepared, cluster, choice, alone, work=AT_FIRST)
        exact = planner.analysis is None
        found = make_plan(builder, planner.batch_size, exact_memory=exact)
    except (ModelError, PlanError, UsageError) as error:
        return WholeModel(count, problem=error.problem)
    return WholeModel(
        count,
        step_s=found.prediction.step_s,
        here_s=found.here_s,
        peak_bytes=max(found.prediction.device_bytes or found.prediction.peak_bytes),
        memory=devices[0].memory,
    )
