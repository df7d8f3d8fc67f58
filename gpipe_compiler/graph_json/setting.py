"""What a bare graph is to be planned for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from gpipe_compiler.cluster import NO_LINK, Cluster, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.options.choices import Objective
from gpipe_compiler.passes.cut.problem import CutProblem, Seconds
from gpipe_compiler.passes.cut.setting import Seat, Setting
from gpipe_compiler.runtime.schedule.choosing import devices_for
from gpipe_compiler.runtime.spec import ScheduleKind

DEFAULT_LINK = Link(bandwidth=12e9, latency_s=0.0)
"""PCI Express 3.0 x16 in practice; what moves between devices where nothing else is said."""


@dataclass(frozen=True)
class BareSetting:
    """What a bare graph is to be planned for.

    Attributes:
        stages: at most so many; fewer where that is better.
        training: None for what the graph has times for.
        link: between any two devices, unless there is a cluster.
        memory: bytes of every device, unless there is a cluster.
        cluster: the devices. The times of the graph are those on its first device; on another
            kind of device they are longer by as much as it is slower at arithmetic.
        prove: whether to find out how far the plan may be from the best, however long that takes.
    """

    stages: int
    microbatches: int = 1
    schedule: ScheduleKind = ScheduleKind.GPIPE
    objective: Objective = Objective.STEP
    training: bool | None = None
    link: Link = DEFAULT_LINK
    memory: float = math.inf
    cluster: Cluster | None = None
    prove: bool = False


def with_kinds(problem: CutProblem, cluster: Cluster | None) -> CutProblem:
    """The problem with times on every kind of device of the cluster."""
    if cluster is None:
        return problem
    first, *others = cluster.kinds
    return dataclasses.replace(
        problem,
        other_kinds=tuple(
            tuple(
                Seconds(node.forward_s * slower, node.backward_s * slower, node.weight_s * slower)
                for node in problem.nodes
            )
            for slower in (first.flops / kind.flops for kind in others)
        ),
    )


def setting_of(asked: BareSetting, stages: int, *, training: bool) -> Setting:
    """What a cut into exactly so many stages is for.

    Raises:
        PlanError: when the schedule cannot have so many stages.
    """
    kind = asked.schedule if training else None
    try:
        devices = devices_for(asked.schedule, stages) if training else stages
    except ValueError as error:
        raise PlanError(str(error)) from error
    if asked.cluster is None:
        seats: tuple[Seat, ...] = (Seat(memory=asked.memory),) * devices
        links = tuple(
            tuple(NO_LINK if a == b else asked.link for b in range(devices)) for a in range(devices)
        )
    else:
        cluster = asked.cluster.sized(devices)
        kinds = cluster.kinds
        there = range(len(cluster.devices))
        devices = min(devices, len(there))
        seats = tuple(
            Seat(kinds.index(device), device.memory, cluster.host(number))
            for number, device in enumerate(cluster.devices)
        )
        links = tuple(tuple(cluster.between(a, b) for b in there) for a in there)
    return Setting(
        kind, stages, asked.microbatches, seats, links, devices, objective=asked.objective
    )
