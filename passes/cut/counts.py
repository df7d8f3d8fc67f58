"""Cuts into at most so many equal devices: all counts of stages at once.

What a stage between two down-sets costs does not depend on how many stages there are, on equal
devices of any memory. So the graph is made lean once, as cuts into at most so many stages lose
nothing by that (`cut/contract.py`), its down-sets are found once, one dynamic program tells how
good a cut into every count can be, and only the counts that may better the best cut are searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpipe_compiler.errors import PlanError
from gpipe_compiler.options.choices import Objective
from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.passes.cut.best_case import CLOSE
from gpipe_compiler.passes.cut.bounds import simple_bound
from gpipe_compiler.passes.cut.classic import classic_cuts
from gpipe_compiler.passes.cut.contract import contract, lean, relevant
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.evaluator import CutEvaluator
from gpipe_compiler.passes.cut.ground import Ground, Known
from gpipe_compiler.passes.cut.orders import down_sets
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.quick import quick
from gpipe_compiler.passes.cut.setting import Setting
from gpipe_compiler.passes.cut.solve import Solver
from gpipe_compiler.passes.cut.space import Space
from gpipe_compiler.passes.cut.tables import bottleneck_chains, tables
from gpipe_compiler.runtime.spec import ScheduleKind

MOST_DOWN_SETS = 1_500
"""Above so many places to cut, a sweep and an integer program are quicker than looking at all."""

SHORT = 100
"""Nodes of a graph along whose single orders the best cut of 1F1B is looked for, too."""

ROW_WORK = 8
"""Times the work of one count that the best count gets along single orders of such graphs."""

HOPEFUL = 1.1
"""So many times the best cut of all may the best of a count take, for its boundaries to be moved to
better places."""

WORK = 45_000_000
"""Numbers worked out, about, by searches of one count whose length is not known beforehand; about a
second."""

CERTIFICATE = 40_000_000
"""Numbers that the integer program may touch, about; some ten seconds."""

LARGE = 1_100
"""Nodes from which on it is half as many, as all else takes longer and half a minute is the aim."""

_SAME = 1e-9


def equal_devices(settings: Sequence[Setting]) -> bool:
    """Whether this is for them: one stage a device, all devices and links equal, any memory."""
    widest = settings[0]
    seats = set(widest.seats)
    links = {link for a, row in enumerate(widest.links) for b, link in enumerate(row) if a != b}
    return (
        len(seats) == 1
        and all(math.isinf(seat.memory) and not seat.update_s_per_byte for seat in seats)
        and not any(seat.update_latency_s for seat in seats)
        and len(links) <= 1
        and all(len(set(s.placement)) == s.stages == len(s.seats) for s in settings)
        and not any(any(setting.recompute) for setting in settings)
    )


def cut_counts(
    problem: CutProblem, settings: Sequence[Setting], work: int = WORK, *, prove: bool = False
) -> tuple[Setting, Cut]:
    """The best cut found into any of these numbers of stages, and which of them it is.

    Its lower bound and `proved` are of all cuts into any of them.

    Args:
        problem: without constraints on where nodes lie.
        settings: one for each count, the largest first; they differ in nothing else
            (`equal_devices`).
        work: limits the searches, by a count of numbers and not by a clock.
        prove: whether to find out how far from the best the cut is, whatever that takes.

    Raises:
        PlanError: when the problem can be cut into none of these numbers of stages.
    """
    if settings[0].kind is None:
        problem = problem.forward_only()
    problem = relevant(problem.check(), memory=False, updates=False)
    if settings[0].kind is ScheduleKind.ZB_H1 and not any(n.weight_s for n in problem.nodes):
        # Without a part of a backward that can wait it is 1F1B, of which more is known.
        asked = {setting.stages: setting for setting in settings}
        in_turn = [replace(setting, kind=ScheduleKind.ONE_F_ONE_B) for setting in settings]
        setting, best = _Counts(problem, in_turn, work).best(prove=prove)
        return asked[setting.stages], best
    return _Counts(problem, settings, work).best(prove=prove)


class _Counts:
    """One search over all counts.

    Attributes:
        lossless: whether the best cut into at most so many stages is one of the graph. It need not
            be where a stage that takes no time lets more micro-batches in, as under 1F1B.
    """

    def __init__(self, problem: CutProblem, settings: Sequence[Setting], work: int) -> None:
        self.problem, self.work = problem, work
        self.widest = settings[0]
        self.once = self.widest.objective is Objective.BOTTLENECK
        self.fine = fine = contract(problem, self.widest.stages)
        if fine.parts < settings[-1].stages:
            raise PlanError(
                f"{settings[-1].stages} stages are more than the {fine.parts} parts that the graph "
                "can be cut into"
            )
        self.lossless = self.once or self.widest.kind in (None, ScheduleKind.GPIPE)
        self.graph = lean(fine, keep=settings[-1].stages, once=self.once)
        if not self.lossless and down_sets(fine, MOST_DOWN_SETS) is not None:
            self.graph, self.lossless = fine, True
        self.total_s = float(fine.least_s.sum())
        self.settings = [setting for setting in settings if setting.stages <= fine.parts]
        self.solvers = {
            setting.stages: self._solver(setting, self.total_s)
            for setting in self.settings
            if setting.stages <= self.graph.parts
        }
        self.lineup = self.solvers[max(self.solvers)].lineups[0]
        self.bound_s = min(
            simple_bound(fine, setting, _lineup(setting)) for setting in self.settings
        )
        self.looked = 0

    def _solver(self, setting: Setting, total_s: float) -> Solver:
        judge = CutEvaluator(self.problem, setting, np.zeros(setting.stages))
        repeats = (0,) * setting.stages
        return Solver(setting, judge, [_lineup(setting)], repeats, total_s, self.work)

    @property
    def value(self) -> float:
        """Of the best cut so far."""
        return min(solver.value for solver in self.solvers.values())

    @property
    def rank(self) -> tuple[float, float]:
        """See `Searched`."""
        return 0.0, self.value

    @property
    def stage_of(self) -> Sequence[int]:
        """See `Searched`."""
        return self._leader().verdict.stage_of if math.isfinite(self.value) else ()

    def family(self, space: Space, *, whole: bool) -> float:
        """Searches a family on all counts; returns a bound on its cuts and the best so far.

        Args:
            whole: whether the family is all that there is.
        """
        self.looked = max(self.looked, space.size)
        self._share(space)
        chains = bottleneck_chains(space, self.lineup, apart=self.once)
        for stages, chain in chains.items():
            self.solvers[stages].offer(space, chain)
        self._share(space)
        bounds = tables(space, self.lineup, fewer=True)
        least = {stages: solver.least(bounds) for stages, solver in self.solvers.items()}
        # The best so far first, so that the others have more to better.
        for stages in sorted(least, key=lambda count: (self.solvers[count].value, -count)):
            hopeful = self.solvers[stages].value < self.value * HOPEFUL
            if hopeful and stages in chains and least[stages] < self.value * (1 - _SAME):
                self.solvers[stages].better(space, chains[stages])
                self._share(space)
            if least[stages] < self.value * (1 - _SAME):
                found = self.solvers[stages].close(space, bounds, whole=whole)
                least[stages] = max(least[stages], found)
                self._share(space)
        return min(least.values())

    def best(self, *, prove: bool) -> tuple[Setting, Cut]:
        """The best cut after a search, and how good it is."""
        for stages, solver in self.solvers.items():
            for stage_of in classic_cuts(self.fine, stages) if solver.brief else ():
                solver.consider(stage_of)
        alone = self.lineup.stages == 1
        if alone:
            self.bound_s = max(self.bound_s, self.family(Space(self.graph, [0]), whole=True))
        else:
            stages = self.lineup.stages
            ground = Ground(self.problem, self.graph, self.graph, stages, Known())
            bound_s = quick(ground, self.lineup, self).bound_s
            self.bound_s = max(self.bound_s, bound_s * self.lossless)
        if prove and self.bound_s < self.value * (1 - _SAME):
            for solver in self.solvers.values():
                solver.proves = True
            self._prove()
        solver = self._leader()
        verdict, met = solver.verdict, self.bound_s >= solver.value * (1 - _SAME)
        return solver.setting, Cut(
            verdict.stage_of,
            verdict.times,
            verdict.step_s,
            solver.value if met else self.bound_s,
            met and prove,
            self.looked,
            verdict.bottleneck_s,
            verdict.seats,
            verdict.excess,
            self.widest.objective,
        )

    def _prove(self) -> None:
        masks = down_sets(self.graph, MOST_DOWN_SETS)
        if masks is None:
            self._certify()
            return
        space = Space(self.graph, masks)
        bound_s = self.family(space, whole=True)
        if not self.lossless:
            bound_s = min(bound_s, self._idle(masks))
        self.bound_s = max(self.bound_s, bound_s)
        turns = not self.once and self.widest.kind not in (None, ScheduleKind.GPIPE)
        if turns and self.graph.size <= SHORT and self.bound_s < self.value * (1 - _SAME):
            self._rows(space)

    def _idle(self, masks: Sequence[int]) -> float:
        """A bound on cuts in which nodes that cost nothing may be stages of their own."""
        space = Space(self.graph, masks, idle=True)
        self._share(space)
        bounds = tables(space, _lineup(self.settings[0]), fewer=True)
        least = []
        for setting in self.settings:  # more stages than there are parts left, too
            solver = self._solver(setting, self.total_s)
            solver.known_s = self.value
            bound = solver.least(bounds)
            if bound < self.value * (1 - _SAME):
                bound = max(bound, solver.close(space, bounds, whole=False))
            least.append(bound)
        return min(least)

    def _rows(self, space: Space) -> None:
        """Cuts into the best count, with more work than all counts get."""
        solver = self._leader()
        solver.work = self.work * ROW_WORK
        self._share(space)
        solver.close(space, tables(space, solver.lineups[0]), whole=False)
        solver.work = self.work

    def _share(self, space: Space) -> None:
        """Lets every count, and the family, know of the best cut so far."""
        for solver in self.solvers.values():
            solver.known_s = self.value
        space.limit(self._leader().longest_stage())

    def _leader(self) -> Solver:
        return min(self.solvers.values(), key=lambda solver: solver.value)

    def _certify(self) -> None:
        """A bound by an integer program over all counts; a better cut that it finds is kept."""
        from gpipe_compiler.passes.cut.certificate import certify  # loads a solver

        lean_problem = replace(self.problem, groups=self.graph.members)
        certificate = certify(
            lean_problem,
            self.widest,
            self.value,
            fewer=True,
            work=CERTIFICATE if self.graph.size < LARGE else CERTIFICATE // 2,
            least_s=self.bound_s,
        )
        self.bound_s = max(self.bound_s, certificate.bound_s)
        stage_of = certificate.stage_of
        if stage_of and max(stage_of) + 1 in self.solvers:
            self.solvers[max(stage_of) + 1].consider(stage_of)
        if self.bound_s >= self.value * (1 - 4 * CLOSE):
            self.bound_s = self.value


def _lineup(setting: Setting) -> DeviceOrder:
    """The only order of equal devices, each with one stage."""
    return DeviceOrder.of(setting, range(setting.stages), (), np.zeros(setting.stages))
