"""Looks for the best settings: plans them one after another, the most promising first."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.cluster import is_host
from gpipe_compiler.errors import GPipeCompilerError, ModelError, PlanError, UsageError
from gpipe_compiler.options import SEARCH_SECONDS, Policy, RematChoice
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice, Frontier, ParetoPoint, SearchStatus
from gpipe_compiler.planner.cut_problem import problem_of
from gpipe_compiler.planner.memory_fit import remeasured
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search_space import (
    SearchSpace,
    WorkSums,
    choices,
    least_peak_bytes,
    least_step_s,
    surely_fits,
)
from gpipe_compiler.runtime.wording import counted
from gpipe_compiler.text.units import format_seconds

MOST_TOO_LARGE = 24
"""Settings that are planned, at most, to find the one nearest to fitting where none can fit."""

MOST_IN_FULL = 6
"""Settings that are planned in full, at most: the best, and others where that does not fit then."""

AT_FIRST = WORK // 20
"""How much a cut may work out while settings are compared (`passes.cut.cut`); the chosen one is
planned again with all the work that a plan gets."""

_STRICTLY = 1 + 1e-9
"""How far a bound has to be above a step to be truly above it, whatever was rounded."""

_CANNOT = (PlanError, UsageError, ModelError)
"""What planning one choice may raise that another one need not."""


@dataclass(frozen=True)
class Explored:
    """What was looked at, and the best of it.

    Attributes:
        plan: the fastest that fits; where nothing does, that which needs the least more memory
            than there is. It is the first point of the frontier.
    """

    frontier: Frontier
    plan: Plan

    @property
    def fits(self) -> bool:
        """Whether it fits its devices."""
        return self.frontier.chosen is not None


def explore(
    planner: Planner,
    wish: SearchSpace,
    policy: Policy,
    *,
    seconds: float = SEARCH_SECONDS,
    progress: Callable[[str], None] = lambda _: None,
) -> Explored:
    """Plans all choices that may be worth it, and takes the fastest that fits.

    The result does not depend on the time that planning takes, unless `seconds` are not enough:
    then what was not reached is among the points. At least one choice is planned.

    Raises:
        GPipeCompilerError: where no choice can be planned, for the first reason.
    """
    training = planner.graph.loss is not None
    batch_size = planner.batch_size // policy.data_parallel

    def by_default(stages: int) -> list[int]:
        try:
            return planner.usual_microbatches(stages, policy)
        except ModelError:  # of every number, which the search reports
            return [1]

    everything = choices(wish, batch_size, policy, training=training, by_default=by_default)
    if not everything:
        raise PlanError(
            "there are no such stages under such a schedule",
            hint="ask for an even number of stages, or for --stages auto",
        )
    run = _Exploration(planner, policy, len(everything), progress, time.monotonic() + seconds)
    return run.look(everything)


@dataclass
class _Exploration:
    """One search; keeps the best plans so far."""

    planner: Planner
    policy: Policy
    count: int
    progress: Callable[[str], None]
    deadline: float
    points: dict[Choice, ParetoPoint] = field(default_factory=dict)
    plans: dict[Choice, Plan] = field(default_factory=dict)
    errors: list[GPipeCompilerError] = field(default_factory=list)
    _work: dict[int, WorkSums | GPipeCompilerError] = field(default_factory=dict)

    def look(self, everything: Sequence[Choice]) -> Explored:
        """Looks at every choice, the one with the lowest bound first."""
        bounded = []
        for choice in everything:
            point = self._bound(choice)
            if point is not None:
                bounded.append(point)
        bounded.sort(key=lambda point: (point.step_s, point.choice.simplicity))
        # Keeping everything comes before AUTO, which is the same where it fits.
        bounded.sort(key=lambda point: point.choice.remat is RematChoice.AUTO)
        for point in bounded:
            self._look_at(point)
        if not self.plans:
            self._plan_some()
        return self._explored()

    def _bound(self, choice: Choice) -> ParetoPoint | None:
        """What is known of a choice before it is planned; None when that is impossible."""
        if self._work and choice.microbatches not in self._work and self._late():
            self.points[choice] = ParetoPoint(choice, SearchStatus.NOT_REACHED)
            return None
        work = self._work_of(choice.microbatches)
        if isinstance(work, GPipeCompilerError):
            self._refuse(choice, work)
            return None
        return ParetoPoint(
            choice,
            SearchStatus.NOT_REACHED,
            least_step_s(work, choice),
            least_peak_bytes(work, choice),
        )

    def _work_of(self, microbatches: int) -> WorkSums | GPipeCompilerError:
        if microbatches not in self._work:
            self.progress(f"exploring: costs with {counted(microbatches, 'micro-batch', 'es')}")
            try:
                prepared = self.planner.prepare(microbatches, self.policy)
            except _CANNOT as error:
                self._work[microbatches] = error
            else:
                problem = problem_of(
                    prepared.facts, prepared.costs[1:], self.policy.counted_optimizer
                )
                training = prepared.graph.loss is not None
                self._work[microbatches] = WorkSums.of(problem, training=training)
        return self._work[microbatches]

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _look_at(self, bound: ParetoPoint) -> None:
        """Plans a choice, unless its bounds show that it cannot be chosen, nor be undominated."""
        choice = bound.choice
        if choice.remat is RematChoice.AUTO and self._keeps_everything(choice):
            return
        over = bound.peak_bytes - self._memory(choice, max)
        if over > 0:
            larger = dataclasses.replace(bound, status=SearchStatus.LARGER, over_bytes=over)
            self.points[choice] = larger
        elif any(self._beats(point, bound) for point in self.points.values()):
            self.points[choice] = dataclasses.replace(bound, status=SearchStatus.SLOWER)
        elif self.plans and self._late():
            self.points[choice] = bound
        else:
            self._plan(choice)

    def _keeps_everything(self, choice: Choice) -> bool:
        """Whether AUTO equals NONE, which then stands for both."""
        keeping = self.points.get(dataclasses.replace(choice, remat=RematChoice.NONE))
        if keeping is None or keeping.status is SearchStatus.PLANNED:
            return keeping is not None and keeping.fits
        work = self._work[choice.microbatches]
        assert isinstance(work, WorkSums)
        return surely_fits(work, choice, self._memory(choice, min))

    @staticmethod
    def _beats(point: ParetoPoint, bound: ParetoPoint) -> bool:
        return (
            point.fits
            and point.step_s * _STRICTLY < bound.step_s
            and point.peak_bytes <= bound.peak_bytes
        )

    def _memory(self, choice: Choice, which: Callable[[Iterable[int]], int]) -> int:
        """Bytes for tensors of the largest or smallest device."""
        cluster = self.planner.cluster.sized(choice.devices)
        return which(device.room for device in cluster.devices)

    def _plan(self, choice: Choice) -> None:
        best = min((p.step_s for p in self.points.values() if p.fits), default=None)
        known = f", best {format_seconds(best)} a step" if best is not None else ""
        self.progress(f"exploring: {len(self.points)} of {self.count} settings{known}")
        try:
            plan = self.planner.plan(choice, self.policy, AT_FIRST)
        except _CANNOT as error:
            self._refuse(choice, error)
            return
        self.points[choice] = planned(choice, plan)
        self._keep(choice, plan)

    def _refuse(self, choice: Choice, error: GPipeCompilerError) -> None:
        self.errors.append(error)
        self.points[choice] = ParetoPoint(choice, SearchStatus.REFUSED, problem=error.problem)

    def _keep(self, choice: Choice, plan: Plan) -> None:
        """Keeps only the plans that may be chosen yet: a plan of a large model is large."""
        self.plans[choice] = plan
        known = [self.points[choice] for choice in self.plans]
        frontier = Frontier.of(known, self.planner.batch_size)
        for point in frontier.points[1:]:
            if not point.fits or point.step_s > frontier.points[0].step_s * (1 + 1e-2):
                del self.plans[point.choice]

    def _explored(self) -> Explored:
        """The best, with what its devices truly take, which may make another one the best."""
        self.progress("exploring: planning the best settings in full")
        in_full: dict[Choice, Plan] = {}
        while True:
            frontier = Frontier.of(self.points.values(), self.planner.batch_size)
            choice = frontier.points[0].choice
            if choice in in_full:
                return Explored(frontier, in_full[choice])
            if len(in_full) < MOST_IN_FULL:
                in_full[choice] = self._in_full(choice)
            else:
                # Whether it truly fits is not known.
                self.points[choice] = dataclasses.replace(
                    self.points[choice], status=SearchStatus.NOT_REACHED
                )

    def _kept(self, choice: Choice) -> Plan:
        if choice not in self.plans:
            self.plans[choice] = self.planner.plan(choice, self.policy, AT_FIRST)
        return self.plans[choice]

    def _measured(self, choice: Choice, plan: Plan) -> Plan:
        """A plan with what its devices truly take, where torch can run its graph."""
        if self.planner.analysis:
            return plan
        facts = self.planner.prepare(choice.microbatches, self.policy).facts
        facts = facts.in_stages([stage.ops for stage in plan.stages])
        traces = facts.memory_traces(on_host=is_host(plan.devices[0]))
        return remeasured(plan, self.policy.counted_optimizer, traces)

    def _in_full(self, choice: Choice) -> Plan:
        """The plan of a choice, exact in memory; its point is corrected where that does not fit."""
        plan = self.planner.plan(choice, self.policy, exact_memory=False)
        if _merit(planned(choice, plan)) <= _merit(self.points[choice]):
            self.points[choice] = planned(choice, plan)
        else:
            plan = self._kept(choice)
        plan = self._measured(choice, plan)
        if most_over(plan) and self.planner.analysis is None:
            again = self.planner.plan(choice, self.policy)
            plan = min(plan, again, key=lambda one: _merit(planned(choice, one)))
        point, exact = self.points[choice], planned(choice, plan)
        if most_over(plan) or exact.step_s != point.step_s:
            self.points[choice] = exact
        else:
            # Compared with others as they are: by the quick model.
            self.points[choice] = dataclasses.replace(point, exact_bytes=exact.exact_bytes)
        return plan

    def _plan_some(self) -> None:
        """Where all is too large by its bounds: plans, to find by how much it truly is.

        Those of the least bounds, until no bound is below the best of them.
        """
        larger = [point for point in self.points.values() if point.status is SearchStatus.LARGER]
        larger.sort(key=lambda point: (point.over_bytes, point.step_s))
        for count, point in enumerate(larger):
            if self.plans and (count >= MOST_TOO_LARGE or self._late()):
                return
            nearest = min((self.points[choice].over_bytes for choice in self.plans), default=None)
            if nearest is not None and point.over_bytes >= nearest:
                return
            self._plan(point.choice)
        if self.plans:
            return
        raise self.errors[0]


def _merit(point: ParetoPoint) -> tuple[int, float]:
    return point.over_bytes, point.step_s


def planned(choice: Choice, plan: Plan) -> ParetoPoint:
    prediction = plan.prediction
    peak = max(prediction.device_bytes, default=0)
    return ParetoPoint(
        choice,
        SearchStatus.PLANNED,
        prediction.step_s,
        peak,
        most_over(plan),
        prediction.bubble,
        prediction.recompute,
        exact_bytes=peak if prediction.memory else 0,
    )


def most_over(plan: Plan) -> int:
    """By how many bytes the plan is too large for the device that it overfills most; 0 for none."""
    pairs = zip(plan.prediction.device_bytes, plan.devices, strict=True)
    return max(0, max((held - device.memory for held, device in pairs), default=0))
