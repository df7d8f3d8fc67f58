"""A mixed-integer program in the making, and HiGHS that solves it with bounded, repeatable work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
import numpy.typing as npt

LEAST_ITERATIONS = 1_000
"""Of simplex, whatever the size of the program."""

MOST_ROWS = 9_500
"""Larger programs are not solved for whole numbers: in these a single branch takes seconds."""

RELAXING = 6
"""Iterations are so many times cheaper before the search over whole numbers than in it."""

PER_STOP = 8_000
"""The search over whole numbers stops to ask whether to go on so many times for each number that it
may touch, over the number of rows to the power of `GROWTH`: seen to make up for how much longer it
takes between two stops in larger programs (0.01 s in one of 2,000 rows, 0.1 s in one of 4,000)."""

GROWTH = 2.5
"""See `PER_STOP`."""

REST = 1e-7
"""Relative: as near as HiGHS is to get to the optimum."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A constant and multiples of variables."""

    constant: float = 0.0
    terms: Mapping[int, float] = field(default_factory=dict)

    def __add__(self, other: Linear) -> Linear:
        return total([(1.0, self), (1.0, other)])

    def __sub__(self, other: Linear) -> Linear:
        return total([(1.0, self), (-1.0, other)])

    def times(self, factor: float) -> Linear:
        """So many times as much."""
        return total([(factor, self)])

    @property
    def fixed(self) -> bool:
        """Whether it has no variables."""
        return not self.terms

    def most(self) -> float:
        """The largest it can be when every variable lies between 0 and 1."""
        return self.constant + sum(factor for factor in self.terms.values() if factor > 0)


def total(parts: Sequence[tuple[float, Linear]]) -> Linear:
    """The weighted sum of several."""
    constant = 0.0
    terms: dict[int, float] = {}
    for factor, part in parts:
        constant += factor * part.constant
        for variable, own in part.terms.items():
            terms[variable] = terms.get(variable, 0.0) + factor * own
    return Linear(constant, {variable: own for variable, own in terms.items() if own})


@dataclass(frozen=True)
class Solution:
    """What HiGHS has found.

    Attributes:
        bound: no solution is less; infinite where there is none at all.
        values: of the variables, in the best solution found; None where there is none.
        work: about how many numbers of the program were touched.
    """

    bound: float
    values: npt.NDArray[np.float64] | None
    work: int = 0


class Program:
    """Variables between bounds, rows that must not be negative, and one variable to be least."""

    def __init__(self) -> None:
        self._low: list[float] = []
        self._high: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[Linear] = []

    def variable(self, low: float = 0.0, high: float = 1.0, *, whole: bool = False) -> Linear:
        """A new variable."""
        self._low.append(low)
        self._high.append(high)
        self._whole.append(whole)
        return Linear(0.0, {len(self._low) - 1: 1.0})

    def at_least(self, large: Linear, small: Linear) -> None:
        """Adds the row large >= small."""
        self._rows.append(large - small)

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self._rows)

    def relaxed(self, objective: Linear, work: int) -> tuple[float, int]:
        """A bound on the least, that of the program without whole numbers, and the work it took.

        Args:
            work: about how many numbers of the program may be touched. The bound is infinite
                where there is no solution, and minus infinity where none is found so soon.
        """
        found, used = _relaxed(self._model(objective), self._iterations(work) * RELAXING)
        bound = -math.inf if found is None else found * (1 - REST)
        return bound, used * self.rows // RELAXING

    def least(self, objective: Linear, work: int) -> Solution:
        """Solves for the least of one variable.

        Args:
            work: about how many numbers of the program may be touched in all; what ends the search
                then is a count, not a clock, so that it ends at the same place on every machine.
        """
        if self.rows > MOST_ROWS:
            return Solution(-math.inf, None)
        model = self._model(objective)
        relaxed, used = _relaxed(model, self._iterations(work) * RELAXING)
        used = used * self.rows // RELAXING
        if relaxed is None or relaxed == math.inf:
            return Solution(-math.inf if relaxed is None else relaxed * (1 - REST), None, used)
        per_stop = max(1, self.rows) ** GROWTH / PER_STOP
        budget = _Budget(int(work / per_stop))
        solver = _solver()
        solver.passModel(model)
        solver.cbMipInterrupt.subscribe(budget)
        solver.run()
        used += int(budget.asked * per_stop)
        if solver.getModelStatus() == highspy.HighsModelStatus.kSolveError:
            # Seen where the least is just what the variable may be at most.
            solver.setOptionValue("presolve", "off")
            solver.run()
        status = solver.getModelStatus()
        if status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        ):
            return Solution(math.inf, None, used)
        info = solver.getInfo()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        bound = max(float(info.mip_dual_bound), relaxed * (1 - REST))
        if status == highspy.HighsModelStatus.kOptimal:
            # Without whole variables left, presolve solves it and says nothing of a bound.
            bound = max(bound, float(info.objective_function_value) * (1 - REST))
        return Solution(bound, values, used)

    def _iterations(self, work: int) -> int:
        return max(LEAST_ITERATIONS, work // max(1, self.rows))

    def _model(self, objective: Linear) -> highspy.HighsLp:
        model = highspy.HighsLp()
        columns = len(self._low)
        model.num_col_, model.num_row_ = columns, len(self._rows)
        cost = np.zeros(columns)
        for variable, factor in objective.terms.items():
            cost[variable] = factor
        model.col_cost_ = cost
        model.col_lower_, model.col_upper_ = np.array(self._low), np.array(self._high)
        model.row_lower_ = np.array([-row.constant for row in self._rows])
        model.row_upper_ = np.full(len(self._rows), highspy.kHighsInf)
        lengths = [len(row.terms) for row in self._rows]
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        model.a_matrix_.index_ = np.array(
            [variable for row in self._rows for variable in row.terms], dtype=np.int32
        )
        model.a_matrix_.value_ = np.array([own for row in self._rows for own in row.terms.values()])
        kinds = highspy.HighsVarType
        model.integrality_ = [
            kinds.kInteger if whole else kinds.kContinuous for whole in self._whole
        ]
        return model


def _solver() -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy does not annotate it
    for name, value in (
        ("output_flag", False),
        ("threads", 1),
        ("parallel", "off"),
        ("random_seed", 0),
        ("mip_rel_gap", REST),
        ("mip_abs_gap", 1e-9),
        # A good cut is known, and programs solved inside the search do not ask whether to go on.
        ("mip_heuristic_effort", 0.0),
        ("mip_heuristic_run_rins", False),
        ("mip_heuristic_run_rens", False),
        ("mip_heuristic_run_root_reduced_cost", False),
        ("mip_allow_restart", False),
    ):
        solver.setOptionValue(name, value)
    return solver


def _relaxed(model: highspy.HighsLp, most: int) -> tuple[float | None, int]:
    """The least without whole numbers, infinite where there is no solution, and the iterations of
    simplex; None where it takes more of them than so many.

    The search over whole numbers begins with it, and cannot be ended before that is done.
    """
    solver = _solver()
    solver.setOptionValue("solve_relaxation", True)
    solver.setOptionValue("simplex_iteration_limit", most)
    solver.passModel(model)
    solver.run()
    info = solver.getInfo()
    used = max(0, int(info.simplex_iteration_count))
    match solver.getModelStatus():
        case highspy.HighsModelStatus.kOptimal:
            return float(info.objective_function_value), used
        case highspy.HighsModelStatus.kIterationLimit:
            return None, used
        case highspy.HighsModelStatus.kInfeasible:
            return math.inf, used
    return -math.inf, used  # not known, as the search over whole numbers may tell


class _Budget:
    """Ends the search when it asks for the so manieth time; HiGHS counts no iterations there."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, 0

    def __call__(self, event: highspy.HighsCallbackEvent) -> None:
        self.asked += 1
        answer = event.data_in
        if answer is not None and self.asked > self.most:
            answer.user_interrupt = True
