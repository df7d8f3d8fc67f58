"""Plans for a bare graph: stages, times, a lower bound, without any package to be written."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import time
from dataclasses import dataclass

from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.graph_json.file import BareGraph, check_graph
from gpipe_compiler.graph_json.stages import BareCut, BareSetting, BareStage, setting_of, with_kinds
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.passes.cut.ground import Known
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.text.units import format_bytes

MOST_COUNTS = 16
"""Numbers of stages up to which all are looked at, and bounded by more than the busiest device."""

PROVED = 1e-9
"""A plan this close to its lower bound, relatively, counts as the best."""


@dataclass(frozen=True)
class BarePlan:
    """Stages of a bare graph, and how good they are.

    Attributes:
        step_time_s: simulated seconds of one mini-batch.
        bottleneck_s: seconds of the longest stage, transfers included.
        lower_bound_s: no plan into as many stages or fewer has less of what was to be short.
        proved: whether, as was asked, the plan is known to be the best, to within 1e-9 of its
            time.
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
        if self.value_s <= self.lower_bound_s:
            return 0.0
        if self.lower_bound_s <= 0:
            return math.inf
        return self.value_s / self.lower_bound_s - 1

    def to_json(self) -> str:
        fields = dataclasses.asdict(self)
        figures = fields.pop("figures")
        for figure in figures:
            del figure["ops"]
        fields |= {
            "objective": self.objective.value,
            "schedule": self.schedule.value if self.schedule else None,
            "mode": "train" if self.schedule else "infer",
            "gap": self.gap if math.isfinite(self.gap) else None,
            "stage_figures": figures,
        }
        return json.dumps(fields, indent=2) + "\n"


def plan_graph(graph: BareGraph, setting: BareSetting) -> BarePlan:
    """The best plan found, into at most `setting.stages` stages.

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
    problem = with_kinds(graph.problem(training=training), setting.cluster)
    search = _Search(graph, problem, setting, training=training)
    search.every_count(min(setting.stages, len(graph.ops)))
    best = search.best
    assert best is not None  # else it is refused
    bound_s = min(search.bound_s, best.found.objective_s)
    met = bound_s >= best.found.objective_s * (1 - PROVED)
    return BarePlan(
        graph.name,
        tuple(figure.ops for figure in best.figures),
        best.found.step_s,
        best.found.bottleneck_s,
        best.found.objective_s if met else bound_s,
        met and setting.prove,
        time.perf_counter() - started,
        best.setting.objective,
        best.setting.kind,
        best.setting.microbatches,
        best.figures,
        best.device_bytes(),
    )


class _Search:
    """The cuts into every number of stages up to the one asked for."""

    def __init__(
        self, graph: BareGraph, problem: CutProblem, asked: BareSetting, *, training: bool
    ) -> None:
        self.graph, self.problem, self.asked, self.training = graph, problem, asked, training
        self.best: BareCut | None = None
        self.bound_s = math.inf
        self._known = Known()
        self._refusal: PlanError | None = None

    def every_count(self, most: int) -> None:
        """Cuts into at most these stages; of many numbers some, and then those about the best."""
        whole = most <= MOST_COUNTS or self.asked.prove
        tried, new = [0], set(range(1, most + 1)) if whole else _spread(most)
        while new:
            for stages in sorted(new, reverse=True):
                self._count(stages)
            tried = sorted({*tried, *new})
            place = tried.index(self.best.setting.stages) if self.best is not None else 0
            near = tried[max(0, place - 1) : place + 2]
            new = {(low + high) // 2 for low, high in itertools.pairwise(near)} - set(tried)
        if self.best is None:
            assert self._refusal is not None  # every count was either cut or refused
            raise self._refusal
        if not self.best.found.fits:
            raise self._too_small(self.best)
        if len(tried) <= most:
            self.bound_s = min(self.bound_s, self._least_of_all(most))

    def _least_of_all(self, most: int) -> float:
        """No cut into at most these stages takes less: it falls with the number of stages."""
        for stages in range(most, 0, -1):
            with contextlib.suppress(PlanError):  # some schedules cannot have any number of stages
                return self._least(setting_of(self.asked, stages, training=self.training))
        return 0.0

    def _count(self, stages: int) -> None:
        """Cuts into this number of stages, unless that is known to be no better."""
        try:
            setting = setting_of(self.asked, stages, training=self.training)
            least = self._least(setting)
            fits = self.best is not None and self.best.found.fits
            if self.best is not None and fits and least >= self.best.found.objective_s:
                self.bound_s = min(self.bound_s, least)
                return
            best = cut(self.problem, setting, prove=self.asked.prove, known=self._known)
        except PlanError as error:
            self._refusal = self._refusal or error
            return
        found = BareCut(self.graph, self.problem, setting, best)
        if self.best is None or found.rank < self.best.rank:
            self.best = found
        # Where the proved best does not fit, no cut into that many stages does.
        if best.fits or not best.proved:
            self.bound_s = min(self.bound_s, best.lower_bound_s)

    def _too_small(self, best: BareCut) -> PlanError:
        excess = best.found.excess_bytes
        device = max(range(len(excess)), key=excess.__getitem__)
        return PlanError(
            f"no cut into at most {self.asked.stages} stages fits into memory: the one that comes "
            f"closest, into {best.setting.stages}, needs {format_bytes(excess[device])} more on "
            f"device {best.found.slots[device]}",
            hint="ask for more stages, fewer micro-batches, another schedule or more --memory",
        )

    def _least(self, setting: CutSetting) -> float:
        """No cut into as many stages takes less, on devices of the first kind."""
        own = [node.forward_s + node.backward_s for node in self.problem.nodes]
        whole_s, largest_s = sum(own), max(own)
        if {slot.kind for slot in setting.slots} != {0}:
            return 0.0
        if setting.objective is Objective.BOTTLENECK:
            return max(whole_s / setting.stages, largest_s)
        device = max(whole_s / (max(setting.placement) + 1), largest_s)
        m = setting.microbatches
        if setting.kind in (None, ScheduleKind.GPIPE):
            return whole_s + (m - 1) * device
        return m * device


def _spread(most: int) -> set[int]:
    """Numbers up to this one, the closer together the smaller they are."""
    found = set()
    while most:
        found |= {most, most - most // 4}
        most //= 2
    return found
