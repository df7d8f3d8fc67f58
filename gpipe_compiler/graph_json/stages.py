"""The stages of a bare graph: what they are cut for, and what there is to say of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.cluster import NO_LINK, Cluster, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.graph_json.file import BareGraph
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.passes.cut.problem import CutProblem, Seconds, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.runtime.schedule.choosing import devices_for
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.in_flight import loads

DEFAULT_LINK = Link(bandwidth=12e9, latency_s=0.0)
"""PCI Express 3.0 x16 in practice; what moves between devices where nothing else is said."""


@dataclass(frozen=True)
class BareSetting:
    """What a bare graph is to be planned for.

    Attributes:
        stages: the most there may be; fewer where that is better.
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


def setting_of(asked: BareSetting, stages: int, *, training: bool) -> CutSetting:
    """The setting of a cut into exactly this number of stages.

    Raises:
        PlanError: when the schedule cannot have this number of stages.
    """
    kind = asked.schedule if training else None
    try:
        devices = devices_for(asked.schedule, stages) if training else stages
    except ValueError as error:
        raise PlanError(str(error)) from error
    if asked.cluster is None:
        slots: tuple[DeviceSlot, ...] = (DeviceSlot(memory=asked.memory),) * devices
        links = tuple(
            tuple(NO_LINK if a == b else asked.link for b in range(devices)) for a in range(devices)
        )
    else:
        cluster = asked.cluster.sized(devices)
        kinds = cluster.kinds
        there = range(len(cluster.devices))
        devices = min(devices, len(there))
        slots = tuple(
            DeviceSlot(kinds.index(device), device.memory, cluster.host(number))
            for number, device in enumerate(cluster.devices)
        )
        links = tuple(tuple(cluster.between(a, b) for b in there) for a in there)
    return CutSetting(
        kind, stages, asked.microbatches, slots, links, devices, objective=asked.objective
    )


@dataclass(frozen=True, slots=True)
class BareStage:
    """One stage of a bare plan; seconds and bytes of one micro-batch.

    Attributes:
        ops: names, in an order in which they can run.
        device: its number in the cluster.
        transfer_s: of all that it receives and sends, forward and backward, one after another.
        receive_bytes, send_bytes: forward; a value is sent once to each later stage that uses it.
        gradient_bytes: that come back for what it has sent, and that it sends back.
    """

    ops: tuple[str, ...]
    device: int
    forward_s: float
    backward_s: float
    transfer_s: float
    receive_bytes: float
    send_bytes: float
    gradient_bytes: float
    parameter_bytes: float
    saved_bytes: float

    @property
    def total_s(self) -> float:
        """What `Objective.BOTTLENECK` counts."""
        return self.forward_s + self.backward_s + self.transfer_s


@dataclass(frozen=True)
class BareCut:
    """A cut of a bare graph into a certain number of stages."""

    graph: BareGraph
    problem: CutProblem
    setting: CutSetting
    found: Cut

    @property
    def rank(self) -> tuple[int, float]:
        """By how much memory is exceeded, and what was to be short; less is better."""
        return max(self.found.excess_bytes, default=0), self.found.objective_s

    @cached_property
    def moves(self) -> tuple[tuple[Traffic, int, int], ...]:
        """Every value with a stage that makes it and a later one that uses it."""
        stage_of = self.found.stage_of
        return tuple(
            (value, stage_of[value.producer], target)
            for value in self.problem.values
            for target in sorted({stage_of[user] for user in value.consumers})
            if target != stage_of[value.producer]
        )

    @cached_property
    def transfer_s(self) -> tuple[float, ...]:
        """For every stage, of all that it receives and sends, one after another."""
        seconds = [0.0] * self.setting.stages
        for value, source, target in self.moves:
            link = self.setting.links[self.slot(source)][self.slot(target)]
            taken = link.seconds(value.bytes) + link.seconds(value.gradient_bytes)
            seconds[source] += taken
            seconds[target] += taken
        return tuple(seconds)

    def slot(self, stage: int) -> int:
        """The number in the setting of the device that a stage runs on."""
        return self.found.slots[self.setting.placement[stage]]

    @cached_property
    def figures(self) -> tuple[BareStage, ...]:
        return tuple(map(self._figures, range(self.setting.stages)))

    def _figures(self, stage: int) -> BareStage:
        pairs = zip(self.graph.ops, self.found.stage_of, strict=True)
        ops = [op for op, its in pairs if its == stage]
        names = {op.name for op in ops}
        times = self.found.times[stage]
        received = [value for value, _, target in self.moves if target == stage]
        sent = [value for value, source, _ in self.moves if source == stage]
        return BareStage(
            tuple(name for name in self.graph.order if name in names),
            self.slot(stage),
            times.forward_s,
            times.backward_s,
            self.transfer_s[stage],
            sum(value.bytes for value in received),
            sum(value.bytes for value in sent),
            sum(value.gradient_bytes for value in (*sent, *received)),
            sum(op.parameter_bytes for op in ops),
            sum(op.saved_bytes for op in ops) if self.setting.kind else 0,
        )

    def device_bytes(self) -> tuple[int, ...]:
        stage_of = self.found.stage_of
        state = [0] * self.setting.stages
        saved = [0] * self.setting.stages
        for kept in self.problem.kept:
            for stage in {stage_of[user] for user in kept.users}:
                state[stage] += kept.bytes
                saved[stage] += kept.microbatch_bytes
        taken = [0.0] * self.setting.stages
        for value, _, target in self.moves:
            taken[target] += value.bytes
        return tuple(
            sum(state[stage] for stage in load.stages)
            + round(
                load.peak(
                    [taken[stage] for stage in load.stages], [saved[stage] for stage in load.stages]
                )
            )
            for load in loads(self.setting.orders)
        )
