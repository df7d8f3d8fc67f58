"""How good a cut can be at all, by integer programs over the stages of the nodes.

`staged.py` says what such a program holds. The cut that is known serves as cutoff: with it, most
nodes of a deep network can lie in a few stages only, as what comes before them and after them has
to be computed in the stages that remain. With a cutoff below it they lie in fewer still, and where
there is no solution then, no cut is below that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpipe_compiler.options.choices import Objective
from gpipe_compiler.passes.cut.best_case import CLOSE, Ideal
from gpipe_compiler.passes.cut.inseparable import joined
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.program import Solution
from gpipe_compiler.passes.cut.setting import Setting
from gpipe_compiler.passes.cut.staged import Form, Stages

WORK = 80_000_000
"""Numbers that the solver may touch, about; some ten seconds."""

LEFT = 0.01
"""A gap of so much is narrowed no further by relaxed programs (`_narrowed`)."""

NARROWINGS = 5
"""Relaxed programs at most; one takes up to ten seconds for a thousand nodes in eight stages."""

WHOLE = {Form.LONGEST: 5_000, Form.LINE: 3_000, Form.LOOSE: 1_500}
"""Rows of a program that is solved for what is known itself. Larger ones were never seen to end; a
program that is only a bound of the objective hardly ever proves anything."""

FIRST = 0.1
"""Of what is open: so far above the bound lies the first target that is tried in whole numbers."""

FASTER = 2
"""So many times further is the next one, once it is ruled out, and as many times nearer if not."""

CLIMBING = 0.4
"""Of the work goes into targets below what is known; into one of them, `SHARE` of the work."""

SHARE = 0.15
"""See `CLIMBING`."""

FAILURES = 2
"""Targets given up until the bound is left as it is."""


@dataclass(frozen=True)
class Certificate:
    """What the program says about a cut.

    Attributes:
        bound_s: no cut has less of the objective; what is known where nothing better can be.
        stage_of: for every node, the stage in what the program takes for a better cut; None where
            it knows of none.
    """

    bound_s: float
    stage_of: tuple[int, ...] | None


def certify(
    problem: CutProblem,
    setting: Setting,
    known_s: float,
    *,
    fewer: bool = False,
    work: int = WORK,
    least_s: float = 0.0,
) -> Certificate:
    """Bounds the objective of all cuts from below, as far as the work goes.

    Args:
        known_s: the objective of a cut.
        fewer: whether cuts into fewer stages count too.
        least_s: what no cut is known to be below.
    """
    if setting.kind is None:
        problem = problem.forward_only()
    if not known_s > 0 or setting.stages < 2:
        return Certificate(0.0, None)
    alone = len(set(setting.placement)) == setting.stages
    given = Ideal.of(problem, setting, known_s)
    joins = setting.objective is Objective.BOTTLENECK and alone
    ideal = joined(given) if joins else given
    if ideal is None:
        return Certificate(known_s, None)
    # Where no nodes are joined for what is known, hardly any are for less.
    joining = len(set(ideal.owner)) < len(set(given.owner))
    stages = Stages(ideal, setting, fewer=fewer)
    if not stages.possible:
        return Certificate(known_s, None)
    task = _Task(problem, setting, known_s, fewer, joining)
    low, found = max(0.0, least_s / known_s), None
    if stages.program.rows <= WHOLE[stages.form]:
        solution = stages.program.least(stages.objective, work)
        low = max(low, _share(solution.bound))
        found = None if solution.values is None else stages.read(solution.values)
    if low < 1 - LEFT:
        low = _narrowed(task, low, work)
    if low < 1:
        low, better = _climbed(task, low, work)
        found = better or found
    return Certificate(low * known_s, found)


def _share(bound: float) -> float:
    """A bound of the program, as a share of what is known; 1 when it is as near as can be told."""
    bound = min(bound, 1.0) * (1 - CLOSE)
    return 1.0 if bound >= 1 - 3 * CLOSE else max(bound, 0.0)


@dataclass(frozen=True)
class _Task:
    """What is asked of `certify`.

    Attributes:
        joining: whether nodes are joined that no better cut separates.
    """

    problem: CutProblem
    setting: Setting
    known_s: float
    fewer: bool
    joining: bool

    def below(self, target: float) -> Stages | None:
        """The program of cuts that take less than this share of what is known; None where it is
        plain that there are none."""
        given = Ideal.of(self.problem, self.setting, self.known_s * target)
        ideal = joined(given) if self.joining else given
        if ideal is None:
            return None
        stages = Stages(ideal, self.setting, fewer=self.fewer)
        return stages if stages.possible else None


def _narrowed(task: _Task, low: float, work: int) -> float:
    """A better bound, as a share of what is known, without whole numbers.

    The less a cut may take, the fewer are the stages that each node can lie in, and the more does
    a relaxed cut take. So it is asked for targets below what is known, halving what is open: where
    even a relaxed cut takes longer than the target, no cut reaches it. The higher the target, the
    longer does that take.

    Args:
        work: of all these programs together; of one, a third of it.
    """
    high, share = 1.0, work // 3
    for _ in range(NARROWINGS):
        if high - low < LEFT or not work:
            break
        target = (low + high) / 2
        stages = task.below(target)
        bound = math.inf
        if stages is not None:
            bound, used = stages.program.relaxed(stages.objective, min(share, work))
            work = max(0, work - used)
        low = max(low, min(bound, 1.0) * (1 - CLOSE) * target)
        if _share(bound) < 1:
            high = target
    return low


def _climbed(task: _Task, low: float, work: int) -> tuple[float, tuple[int, ...] | None]:
    """A better bound, as a share of what is known, and a better cut if one is found.

    That no cut is below a target is proved the sooner, the nearer that is to what relaxed programs
    tell. So the first target is a little above that, and every further one is further above the
    last.
    """
    found, high, failures = None, 1.0, 0
    left, share, step = int(work * CLIMBING), int(work * SHARE), (1 - low) * FIRST
    while left >= share and failures < FAILURES and high - low > LEFT / 4:
        target = low + step if low + step < 1 else (low + 1) / 2
        stages = task.below(target)
        solution = Solution(math.inf, None)
        if stages is not None:
            solution = stages.program.least(stages.objective, share)
            if solution.values is not None:
                found = stages.read(solution.values)
        left -= solution.work
        reached = _share(solution.bound)
        low = max(low, reached * target)
        if reached == 1:
            step *= FASTER
        else:
            failures, high, step = failures + 1, target, (target - low) / FASTER
    return low, found
