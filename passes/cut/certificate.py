"""How good a cut can be at all, by integer programs over the stages of the nodes.

Cuts are asked for that take less than a target: with it, most nodes of a deep network can lie in
a few stages only, as what comes before them and after them has to be computed in the stages that
remain. The first target is the cut that is known. Where the program is too large to be solved for
that, lower ones are ruled out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.program import CLOSE, Program, Shares
from gpipe_compiler.passes.cut.setting import CutSetting

WORK = 80_000_000
"""Numbers that the solver may touch, about; some ten seconds."""

TARGETS = 6
"""Programs at most."""

LEFT = 0.01
"""A gap of so much is narrowed no further."""


@dataclass(frozen=True)
class Certificate:
    """What the programs say about a cut.

    Attributes:
        bound_s: no cut has less of the objective; what is known where nothing better can be.
        stage_of: for every node, the stage in what a program takes for a better cut; None where
            none knows of any.
    """

    bound_s: float
    stage_of: tuple[int, ...] | None


def certify(
    problem: CutProblem,
    setting: CutSetting,
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
        work: of a program, about; its end is a count and not a clock, so that it ends at the same
            place on every machine.
        least_s: what no cut is known to be below.
    """
    if setting.kind is None:
        problem = problem.forward_only()
    if not known_s > 0 or setting.stages < 2:
        return Certificate(0.0, None)
    low, high, target = max(0.0, least_s / known_s), 1.0, 1.0
    found: tuple[int, ...] | None = None
    for _ in range(TARGETS):
        program = Program(Shares.of(problem, setting, known_s * target), setting, fewer=fewer)
        reached = math.inf
        if program.possible:
            reached, better = program.least(work)
            found = better or found
        reached = min(reached, 1.0) * (1 - CLOSE)
        if reached >= 1 - 3 * CLOSE:
            low = max(low, target)
        else:
            low, high = max(low, reached * target), target
        if low >= 1 or high - low < LEFT or program.solved:
            break
        target = (low + high) / 2
    return Certificate(low * known_s, found)
