"""Plans for a bare graph: stages, times, a lower bound, without any package to be written."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.cluster import NO_LINK, Cluster, Link
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.graph_file import BareGraph, check_graph
from gpipe_compiler.holding import loads
from gpipe_compiler.passes.cut import Cut, cut
from gpipe_compiler.passes.cut_certificate import CLOSE, certify
from gpipe_compiler.passes.cut_problem import CutProblem, Seconds, Traffic
from gpipe_compiler.passes.cut_setting import Objective, Seat, Setting
from gpipe_compiler.report.units import format_bytes
from gpipe_compiler.runtime.schedule.choosing import devices_for
from gpipe_compiler.runtime.spec import ScheduleKind

DEFAULT_LINK = Link(bandwidth=12e9, latency_s=0.0)
"""PCI Express 3.0 x16 in practice; what moves between devices where nothing else is said."""

MOST_DOWN_SETS = 1_500
"""Above so many places to cut, a sweep and an integer program are quicker than looking at all."""

PROVED = 1e-9
"""A plan this close to its lower bound, relatively, counts as the best."""


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
    """

    stages: int
    microbatches: int = 1
    schedule: ScheduleKind = ScheduleKind.GPIPE
    objective: Objective = Objective.STEP
    training: bool | None = None
    link: Link = DEFAULT_LINK
    memory: float = math.inf
    cluster: Cluster | None = None


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
class BarePlan:
    """Stages of a bare graph, and how good they are.

    Attributes:
        step_time_s: simulated seconds of one mini-batch.
        bottleneck_s: seconds of the longest stage, transfers included.
        lower_bound_s: no plan into as many stages or fewer has less of what was to be short.
        proved: whether the plan is known to be the best.
        seconds: that planning took.
        device_bytes: for every device of the pipeline, memory at its peak.
    """

    graph: str
    stages: tuple[tuple[str, ...], ...]
    step_time_s: float
    bottleneck_s: float
    lower_bound_s: float
    proved: bool
    seconds: float
    objective: Objective
    schedule: ScheduleKind | None
    microbatches: int
    figures: tuple[BareStage, ...]
    device_bytes: tuple[int, ...]

    @property
    def value_s(self) -> float:
        """What was to be short."""
        return self.step_time_s if self.objective is Objective.STEP else self.bottleneck_s

    @property
    def gap(self) -> float:
        """How far the plan may be from the best, as a share of the lower bound."""
        if self.proved or self.lower_bound_s <= 0:
            return 0.0
        return self.value_s / self.lower_bound_s - 1

    def to_json(self) -> str:
        """All of it as JSON text."""
        figures = []
        for figure in self.figures:
            fields = dataclasses.asdict(figure)
            del fields["ops"]
            figures.append(fields)
        document = {
            "graph": self.graph,
            "stages": self.stages,
            "step_time_s": self.step_time_s,
            "bottleneck_s": self.bottleneck_s,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "proved": self.proved,
            "seconds": self.seconds,
            "objective": self.objective.value,
            "schedule": self.schedule.value if self.schedule else None,
            "mode": "train" if self.schedule else "infer",
            "microbatches": self.microbatches,
            "stage_figures": figures,
            "device_bytes": self.device_bytes,
        }
        return json.dumps(document, indent=2) + "\n"


def plan_graph(graph: BareGraph, setting: BareSetting) -> BarePlan:
    """The best plan found into at most so many stages.

    Raises:
        ModelError: when the graph is none.
        UsageError: for no stages or no micro-batches, or for devices that do not suffice.
        PlanError: when no cut fits into memory, or the schedule has no such number of stages.
    """
    started = time.perf_counter()
    check_graph(graph)
    for count, what in ((setting.stages, "stages"), (setting.microbatches, "micro-batches")):
        if count < 1:
            raise UsageError(f"{count} {what}: at least one is needed")
    training = graph.has_backward if setting.training is None else setting.training
    problem = _with_kinds(graph.problem(training=training), setting.cluster)
    search = _Search(problem, setting, training=training)
    search.every_count(min(setting.stages, len(graph.ops)))
    best = search.certified()
    return _plan(graph, best, search.bound_s, time.perf_counter() - started)


class _Search:
    """The cuts into every number of stages up to the one asked for."""

    def __init__(self, problem: CutProblem, asked: BareSetting, *, training: bool) -> None:
        self.problem, self.asked, self.training = problem, asked, training
        self.best: _Found | None = None
        self.bound_s = math.inf
        self._settings: dict[int, Setting] = {}
        self._refusal: PlanError | None = None

    def every_count(self, most: int) -> None:
        """Cuts into so many stages and fewer.

        Raises:
            PlanError: when there is no such cut at all; the one about what was asked for.
        """
        own = [node.forward_s + node.backward_s for node in self.problem.nodes]
        for stages in range(most, 0, -1):
            try:
                setting = _setting(self.asked, stages, training=self.training)
                least = self._least(setting, sum(own), max(own))
                fits = self.best is not None and self.best.found.fits
                if self.best is not None and fits and least >= self.best.value_s:
                    self.bound_s = min(self.bound_s, least)
                    continue
                found = _Found(
                    self.problem, setting, cut(self.problem, setting, MOST_DOWN_SETS, work=0)
                )
            except PlanError as error:
                self._refusal = self._refusal or error
                continue
            self._settings[stages] = setting
            self._take(found)
            # Where the proved best does not fit, no cut into so many stages does.
            if found.found.fits or not found.found.proved:
                self.bound_s = min(self.bound_s, found.found.lower_bound_s)
        if self.best is None:
            assert self._refusal is not None  # every count was either cut or refused
            raise self._refusal
        if not self.best.found.fits:
            raise self._too_small(self.best)

    def _too_small(self, best: _Found) -> PlanError:
        excess = best.found.excess_bytes
        device = max(range(len(excess)), key=excess.__getitem__)
        return PlanError(
            f"no cut into at most {self.asked.stages} stages fits into memory: the one that comes "
            f"closest, into {best.setting.stages}, needs {format_bytes(excess[device])} more on "
            f"device {best.found.seats[device]}",
            hint="ask for more stages, fewer micro-batches, another schedule or more --memory",
        )

    def _least(self, setting: Setting, whole_s: float, largest_s: float) -> float:
        """No cut into as many stages takes less, on devices of the first kind."""
        if {seat.kind for seat in setting.seats} != {0}:
            return 0.0
        if setting.objective is Objective.BOTTLENECK:
            return max(whole_s / setting.stages, largest_s)
        device = max(whole_s / (max(setting.placement) + 1), largest_s)
        m = setting.microbatches
        if setting.kind in (None, ScheduleKind.GPIPE):
            return whole_s + (m - 1) * device
        return m * device

    def _take(self, found: _Found) -> None:
        if self.best is None or found.rank < self.best.rank:
            self.best = found

    def certified(self) -> _Found:
        """The best, with a bound by an integer program over all counts at once where none is."""
        assert self.best is not None
        best = self.best
        if self.bound_s >= best.value_s * (1 - PROVED):
            return best
        widest = self._settings[max(self._settings)]
        certificate = certify(self.problem, widest, best.value_s, fewer=True)
        self.bound_s = max(self.bound_s, certificate.bound_s)
        stage_of = certificate.stage_of
        setting = self._settings.get(max(stage_of) + 1) if stage_of else None
        if stage_of and setting:
            better = cut(self.problem, setting, 0, work=0, hint=stage_of)
            self._take(_Found(self.problem, setting, better))
        best = self.best
        if self.bound_s >= best.value_s * (1 - 4 * CLOSE):
            self.bound_s = best.value_s
        return best


def _plan(graph: BareGraph, best: _Found, bound_s: float, seconds: float) -> BarePlan:
    figures = best.figures(graph)
    bound_s = min(bound_s, best.value_s)
    proved = bound_s >= best.value_s * (1 - PROVED)
    return BarePlan(
        graph.name,
        tuple(figure.ops for figure in figures),
        best.found.step_s,
        max(best.totals),
        best.value_s if proved else bound_s,
        proved,
        seconds,
        best.setting.objective,
        best.setting.kind,
        best.setting.microbatches,
        figures,
        best.device_bytes(),
    )


@dataclass(frozen=True)
class _Found:
    """A cut into a certain number of stages."""

    problem: CutProblem
    setting: Setting
    found: Cut

    @property
    def rank(self) -> tuple[int, float]:
        """By how much memory is exceeded, and what was to be short; less is better."""
        return max(self.found.excess_bytes, default=0), self.value_s

    @property
    def value_s(self) -> float:
        """What was to be short."""
        if self.setting.objective is Objective.STEP:
            return self.found.step_s
        return max(self.totals)

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
            link = self.setting.links[self.seat(source)][self.seat(target)]
            taken = link.seconds(value.bytes) + link.seconds(value.gradient_bytes)
            seconds[source] += taken
            seconds[target] += taken
        return tuple(seconds)

    @property
    def totals(self) -> tuple[float, ...]:
        """For every stage, what `Objective.BOTTLENECK` counts."""
        return tuple(
            times.forward_s + times.backward_s + transfer
            for times, transfer in zip(self.found.times, self.transfer_s, strict=True)
        )

    def seat(self, stage: int) -> int:
        """The number in the setting of the device that a stage runs on."""
        return self.found.seats[self.setting.placement[stage]]

    def figures(self, graph: BareGraph) -> tuple[BareStage, ...]:
        """What there is to say of every stage."""
        return tuple(self._figures(graph, stage) for stage in range(self.setting.stages))

    def _figures(self, graph: BareGraph, stage: int) -> BareStage:
        ops = [op for op, its in zip(graph.ops, self.found.stage_of, strict=True) if its == stage]
        names = {op.name for op in ops}
        times = self.found.times[stage]
        received = [value for value, _, target in self.moves if target == stage]
        sent = [value for value, source, _ in self.moves if source == stage]
        return BareStage(
            tuple(name for name in graph.order if name in names),
            self.seat(stage),
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
        """For every device, memory at its peak."""
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


def _with_kinds(problem: CutProblem, cluster: Cluster | None) -> CutProblem:
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


def _setting(asked: BareSetting, stages: int, *, training: bool) -> Setting:
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
