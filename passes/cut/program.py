"""The integer program of a cut: which node lies in which stage, and what that takes at least.

A variable for every node v and stage k says whether v lies in stage k or before. A value is
received by a stage that uses it and does not make it, and sent by the stage that makes it if some
node that uses it lies elsewhere. What cannot be said in rows is left out such that the program's
optimum is never above the true one:

- the longest stage (`Objective.BOTTLENECK`): exact but for a value with users in several later
  stages, whose sending counts once;
- a step of GPipe or of inference, on equal devices: exact, as `criteria.FillDrain` is;
- a step of 1F1B: the linear parts of `criteria.Rounds`;
- other schedules: every device computes all its micro-batches after the first has come to it and,
  unless the backward is split, before the last leaves it.

Devices count as fast as the fastest, links too; memory, updates and constraints do not count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt

from gpipe_compiler.disjoint import DisjointSets
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.contract import topological
from gpipe_compiler.passes.cut.device_order import fastest
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.spec import ScheduleKind

CLOSE = 1e-6
"""Relative: cuts closer together than this count as equally good, as HiGHS is about so exact."""

TINY = 1e-8
"""Smaller coefficients are left out: a time that is not counted makes no bound too high."""

MOST_ROWS = 5_000
"""Larger programs are not solved for whole numbers, which was never seen to end."""

PER_STOP, GROWTH = 8_000, 2.5
"""The search over whole numbers stops to ask whether to go on so many times for each number that it
may touch, over the number of rows to the power of the second: seen to make up for how much longer
it takes between two stops in larger programs (0.01 s in one of 2,000 rows, 0.1 s of 4,000)."""

REST = 1e-7
"""Relative: as near as HiGHS is to get to the optimum."""

Expression = Any
"""A linear expression of HiGHS, a variable, or a number."""


@dataclass(frozen=True)
class Shares:
    """The problem where every device and link is the best there is, in shares of a target.

    Attributes:
        owner: of every node, the one that stands for all that share its stage.
        moves: (producer, consumers, seconds forward, seconds back).
        again: 1 where every stage is known to compute again before a backward, else 0.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    owner: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    moves: tuple[tuple[int, tuple[int, ...], float, float], ...]
    again: float

    @classmethod
    def of(cls, problem: CutProblem, setting: CutSetting, target_s: float) -> Shares:
        """Those of a problem in a setting."""
        kinds = {seat.kind for seat in setting.seats}
        costs = [problem.nodes if kind == 0 else problem.other_kinds[kind - 1] for kind in kinds]
        links = [k for a, row in enumerate(setting.links) for b, k in enumerate(row) if a != b]
        link = fastest(links)
        count = range(len(problem.nodes))
        find = DisjointSets(count)
        for group in (*problem.groups, tuple(sorted(problem.last))):
            find.join(group)
        owner = tuple(find.leader(node) for node in count)
        edges = {(owner[a], owner[b]) for a, b in problem.edges() if owner[a] != owner[b]}
        moves = []
        for value in problem.values:
            producer = value.producer if value.producer == GRAPH_INPUT else owner[value.producer]
            users = tuple(sorted({owner[user] for user in value.consumers} - {producer}))
            if users and value.bytes + value.gradient_bytes:
                there, back = link.seconds(value.bytes), link.seconds(value.gradient_bytes)
                moves.append((producer, users, _share(there, target_s), _share(back, target_s)))
        line = setting.kind is ScheduleKind.GPIPE and setting.microbatches > 1
        return cls(
            tuple(_share(min(cost[n].forward_s for cost in costs), target_s) for n in count),
            tuple(_share(min(cost[n].backward_s for cost in costs), target_s) for n in count),
            owner,
            tuple(sorted(edges)),
            tuple(moves),
            float(bool(setting.recompute) and all(setting.recompute) and line),
        )


def _share(seconds: float, of: float) -> float:
    """What a time is of another one; nothing where HiGHS would take it for nothing."""
    return seconds / of if seconds > TINY * of else 0.0


class Program:
    """The program of one target, which is 1.

    Attributes:
        possible: False where no cut reaches the target, as some node fits into no stage.
        solved: whether it was solved to the end.
    """

    def __init__(self, shares: Shares, setting: CutSetting, *, fewer: bool) -> None:
        self.shares, self.setting = shares, setting
        self.count, self.m = setting.stages, setting.microbatches
        self.shared = len(set(setting.placement)) < self.count
        self.line = setting.kind in (None, ScheduleKind.GPIPE) and not self.shared
        self.longest = setting.objective is Objective.BOTTLENECK
        self.nodes = sorted(set(shares.owner))
        self.solved = False
        self.model: Any = _solver()
        first, last = self._range()
        self.possible = all(first[node] <= last[node] for node in self.nodes)
        if not self.possible:
            return
        whole = highspy.HighsVarType.kInteger
        self.before: dict[int, list[Expression]] = {
            node: [
                self.model.addVariable(0.0, 1.0, type=whole)
                if first[node] <= stage < last[node]
                else float(stage >= last[node])
                for stage in range(self.count)
            ]
            for node in self.nodes
        }
        self.objective = self.model.addVariable(0.0, 1.0 - CLOSE, obj=1.0)
        self._order(fewer=fewer)
        self.forward, self.backward = self._sums(shares.forward), self._sums(shares.backward)
        self.received, self.returned, self.sent = self._transfers()
        if self.longest:
            self._longest_stage()
        elif self.line:
            self._fill_and_drain()
        elif setting.kind is ScheduleKind.ONE_F_ONE_B and not self.shared:
            self._rounds()
        else:
            self._devices()

    # --- nodes in stages ---------------------------------------------------------------------

    def _range(self) -> tuple[list[int], list[int]]:
        """The first and the last stage that each node can be in."""
        size, count = len(self.shares.owner), self.count
        forward, backward = np.array(self.shares.forward), np.array(self.shares.backward)
        own = np.zeros(size)
        np.add.at(own, list(self.shares.owner), forward + backward)
        most = 1.0 if self.longest else 1.0 / self.m
        if self.line and not self.longest:
            most = (1.0 - float(own.sum())) / (self.m - 1) if self.m > 1 else math.inf
        if not most > 0:
            return [1] * size, [0] * size
        slack = most * (1 + CLOSE)
        above = _closure_sums(self.shares.edges, own)
        below = _closure_sums([(after, before) for before, after in self.shares.edges], own)
        first = [max(0, math.ceil(work / slack - CLOSE) - 1) for work in above]
        last = [min(count - 1, count - math.ceil(work / slack - CLOSE)) for work in below]
        return first, last

    def _within(self, node: int, stage: int) -> Expression:
        """1 where a node lies in this stage; what is given lies in the first."""
        if node == GRAPH_INPUT:
            return float(stage == 0)
        return self.before[node][stage] - (self.before[node][stage - 1] if stage else 0.0)

    def _beside(self, node: int, stage: int) -> Expression:
        """1 where it lies on the device of this stage: between its stages nothing is sent."""
        placement = self.setting.placement
        on = [other for other, its in enumerate(placement) if its == placement[stage]]
        return sum((self._within(node, other) for other in on[1:]), self._within(node, on[0]))

    def _order(self, *, fewer: bool) -> None:
        for node in self.nodes:
            for low, high in itertools.pairwise(self.before[node]):
                self._at_least(high, low)
        for before, after in self.shares.edges:
            for small, large in zip(self.before[after], self.before[before], strict=True):
                self._at_least(large, small)
        for stage in range(0 if fewer else self.count):
            self._at_least(_total(self._within(node, stage) for node in self.nodes), 1.0)

    def _at_least(self, large: Expression, small: Expression) -> None:
        """Adds the row large >= small; between numbers it is known to hold."""
        difference = large - small
        if not isinstance(difference, float):
            self.model.addConstr(difference >= 0.0)

    def _sums(self, seconds: Sequence[float]) -> list[Expression]:
        """For every stage, what its nodes take."""
        own = [pair for pair in zip(self.shares.owner, seconds, strict=True) if pair[1]]
        return [
            self._named(_total(each * self._within(node, stage) for node, each in own))
            for stage in range(self.count)
        ]

    def _named(self, expression: Expression) -> Expression:
        """A variable of at least this, which is short to write again."""
        found = self.model.addVariable(0.0)
        self._at_least(found, expression)
        return found

    # --- values between stages ---------------------------------------------------------------

    def _transfers(self) -> Iterator[list[Expression]]:
        """For every stage, seconds of receiving; of sending gradients back; and of sending."""
        moved: list[list[list[Expression]]] = [[[] for _ in range(self.count)] for _ in range(3)]
        for producer, users, there, back in self.shares.moves:
            for stage in range(self.count):
                near, made = self._beside(producer, stage), self._within(producer, stage)
                arrives = self._largest([(self._within(user, stage), near) for user in users])
                moved[0][stage].append(there * arrives)
                moved[1][stage].append(back * arrives)
                if self.longest:
                    leaves = self._largest([(made, self._beside(user, stage)) for user in users])
                    moved[2][stage].append((there + back) * leaves)
        for rows in moved:
            yield [self._named(_total(parts)) for parts in rows]

    def _largest(self, pairs: Iterable[tuple[Expression, Expression]]) -> Expression:
        """A variable that is at least 0 and each of these differences, where they can be above."""
        parts = [(a, b) for a, b in pairs if a is not b and not _is(a, 0.0) and not _is(b, 1.0)]
        if not parts:
            return 0.0
        found = self.model.addVariable(0.0, 1.0)
        for large, small in parts:
            self._at_least(found, large - small)
        return found

    # --- objectives --------------------------------------------------------------------------

    def _longest_stage(self) -> None:
        for stage in range(self.count):
            own = (1.0 + self.shares.again) * self.forward[stage] + self.backward[stage]
            moved = self.received[stage] + self.returned[stage] + self.sent[stage]
            self._at_least(self.objective, own + moved)

    def _fill_and_drain(self) -> None:
        there, back = self.model.addVariable(0.0), self.model.addVariable(0.0)
        for stage in range(self.count):
            self._at_least(there, self.forward[stage])
            self._at_least(there, self.received[stage])
            again = self.shares.again * self.forward[stage]
            self._at_least(back, self.backward[stage] + again)
            self._at_least(back, self.returned[stage])
        pace = (self.m - 1) * (there + back)
        self._at_least(self.objective, self._way(self.count - 1) + pace)

    def _way(self, last: int, first: int = 0) -> Expression:
        """One micro-batch's way through these stages and back, computing there included."""
        rows = (self.forward, self.backward, self.received, self.returned)
        return _total(row[stage] for row in rows for stage in range(first, last + 1))

    def _rounds(self) -> None:
        whole = self._named(self._way(self.count - 1))
        for stage in range(self.count):
            own, way = self.forward[stage] + self.backward[stage], self._way(stage)
            self._at_least(self.objective, way + (self.m - 1) * own)
            warm = min(self.m, self.count - stage)
            if self.m > warm:
                rounds = whole + self._way(self.count - 1, stage + 1)
                self._at_least(self.objective, rounds + (self.m - warm) * own)
            for port in (self.received[stage], self.returned[stage], self.backward[stage]):
                self._at_least(self.objective, whole + (self.m - 1) * port)

    def _devices(self) -> None:
        placement = self.setting.placement
        ways = (self.forward,) if self.setting.splits_backward else (self.forward, self.backward)
        for device in sorted(set(placement)):
            stages = [stage for stage, its in enumerate(placement) if its == device]
            parts = [row[stage] for row in ways for stage in range(stages[0])]
            parts += [self.m * (self.forward[stage] + self.backward[stage]) for stage in stages]
            self._at_least(self.objective, _total(parts))

    # --- solving -----------------------------------------------------------------------------

    def least(self, work: int) -> tuple[float, tuple[int, ...] | None]:
        """No cut has less of the objective, infinite where none reaches the target; and the stages
        of the nodes in the best that was found, if any.

        Args:
            work: about how many numbers of the program may be touched.
        """
        model, rows = self.model, max(1, self.model.getNumRow())
        model.setOptionValue("solve_relaxation", True)
        model.setOptionValue("simplex_iteration_limit", max(1_000, work // rows * 6))
        model.run()
        status, kinds = model.getModelStatus(), highspy.HighsModelStatus
        if status == kinds.kInfeasible:
            return math.inf, None
        if status != kinds.kOptimal:
            return 0.0, None
        relaxed = float(model.getInfo().objective_function_value) * (1 - REST)
        if rows > MOST_ROWS:
            return relaxed, None
        model.setOptionValue("solve_relaxation", False)
        _limit(model, int(work * PER_STOP / rows**GROWTH))
        model.run()
        if model.getModelStatus() == kinds.kSolveError:
            # Seen where the least is just what the variable may be at most.
            model.setOptionValue("presolve", "off")
            model.run()
        status, info = model.getModelStatus(), model.getInfo()
        self.solved = status == kinds.kOptimal
        if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
            return math.inf, None
        bound = max(float(info.mip_dual_bound), relaxed)
        if self.solved:
            # Without whole numbers left, presolve solves it and says nothing of a bound.
            bound = max(bound, float(info.objective_function_value) * (1 - REST))
        feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return bound, self._read(model.getSolution().col_value) if feasible else None

    def _read(self, values: Sequence[float]) -> tuple[int, ...]:
        """The stage of every node in a solution; stages without any are left out."""

        def reached(before: Expression) -> bool:
            return bool((before if isinstance(before, float) else values[before.index]) > 0.5)

        found = [list(map(reached, self.before[node])).index(True) for node in self.shares.owner]
        used = sorted(set(found))
        return tuple(used.index(stage) for stage in found)


def _is(expression: Expression, number: float) -> bool:
    return isinstance(expression, float) and expression == number


def _total(parts: Iterable[Expression]) -> Expression:
    """The sum of numbers and expressions."""
    known, terms = 0.0, []
    for part in parts:
        if isinstance(part, float):
            known += part
        else:
            terms.append(part)
    return highspy.Highs.qsum(terms) + known if terms else known


def _closure_sums(
    edges: Sequence[tuple[int, int]], own: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """For every node, what it and all that come before it take."""
    after: list[list[int]] = [[] for _ in own]
    for source, target in edges:
        after[source].append(target)
    member = np.eye(len(own), dtype=np.bool_)
    for node in topological(len(own), edges):
        member[after[node]] |= member[node]
    # The order in which `@` adds differs by processor.
    return np.asarray(np.where(member, own, 0.0).sum(axis=1))


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


def _limit(solver: Any, stops: int) -> None:
    """Ends the search when it asks whether to go on for the so manieth time; HiGHS counts no
    iterations there."""
    asked = itertools.count()

    def ask(event: highspy.HighsCallbackEvent) -> None:
        if next(asked) >= stops and event.data_in is not None:
            event.data_in.user_interrupt = True

    solver.cbMipInterrupt.subscribe(ask)
