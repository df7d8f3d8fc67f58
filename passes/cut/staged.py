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

import math
from enum import Enum

import numpy as np
import numpy.typing as npt

from gpipe_compiler.options.choices import Objective
from gpipe_compiler.passes.cut.best_case import CLOSE, Ideal
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.program import Linear, Program, total
from gpipe_compiler.passes.cut.setting import Setting
from gpipe_compiler.runtime.spec import ScheduleKind


class Form(Enum):
    """What a program says of the objective: what it is, but for the last, which is a bound."""

    LONGEST = "longest stage"
    LINE = "fill and drain"
    LOOSE = "rounds and devices"


class Stages:
    """The program of one problem.

    Attributes:
        possible: False where what is known cannot be bettered, as some node fits into no stage.
    """

    def __init__(self, ideal: Ideal, setting: Setting, *, fewer: bool) -> None:
        self.ideal, self.setting = ideal, setting
        self.count, self.m = setting.stages, setting.microbatches
        self.program = Program()
        self.possible = self._place(self._longest())
        if not self.possible:
            return
        self.objective = self.program.variable(0.0, 1.0 - CLOSE)
        self._order()
        if not fewer:
            self._none_empty()
        self.forward = self._sums(ideal.forward)
        self.backward = self._sums(ideal.backward)
        self.received, self.returned, self.sent = self._transfers()
        if self.form is Form.LONGEST:
            self._bottleneck()
        elif self.form is Form.LINE:
            self._line()
        elif setting.kind is ScheduleKind.ONE_F_ONE_B and not self._shared:
            self._rounds()
        else:
            self._devices()

    def read(self, values: npt.NDArray[np.float64]) -> tuple[int, ...]:
        """The stage of every node in a solution; stages without any are left out."""
        found = []
        for node in self.ideal.owner:
            before = [self._until(node, stage) for stage in range(self.count)]
            reached = [
                b.constant + sum(values[v] * f for v, f in b.terms.items()) > 0.5 for b in before
            ]
            found.append(reached.index(True))
        used = sorted(set(found))
        return tuple(used.index(stage) for stage in found)

    @property
    def form(self) -> Form:
        """What is least."""
        if self.setting.objective is Objective.BOTTLENECK:
            return Form.LONGEST
        line = self.setting.kind in (None, ScheduleKind.GPIPE) and not self._shared
        return Form.LINE if line else Form.LOOSE

    @property
    def _shared(self) -> bool:
        return len(set(self.setting.placement)) < self.count

    # --- nodes in stages ---------------------------------------------------------------------

    def _longest(self) -> float:
        """What a stage may compute for one micro-batch in a cut that is better than the known."""
        if self.form is Form.LONGEST:
            return 1.0
        if self.form is Form.LINE:
            return (1.0 - sum(self.ideal.own)) / (self.m - 1) if self.m > 1 else math.inf
        return 1.0 / self.m

    def _place(self, longest: float) -> bool:
        """A variable for every node and stage up to which it may or may not be."""
        first, last = self._range(longest)
        if any(low > high for low, high in zip(first, last, strict=True)):
            return False
        self._before: dict[tuple[int, int], Linear] = {}
        for node in sorted(set(self.ideal.owner)):
            for stage in range(self.count - 1):
                if first[node] <= stage < last[node]:
                    self._before[node, stage] = self.program.variable(whole=True)
                else:
                    self._before[node, stage] = Linear(float(stage >= last[node]))
        return True

    def _range(self, longest: float) -> tuple[list[int], list[int]]:
        """The first and the last stage that each node can be in."""
        size = len(self.ideal.owner)
        own = np.zeros(size)
        np.add.at(own, list(self.ideal.owner), np.array(self.ideal.own))
        after: list[list[int]] = [[] for _ in range(size)]
        for source, target in self.ideal.edges:
            after[source].append(target)
        before: list[list[int]] = [[] for _ in range(size)]
        for source, target in self.ideal.edges:
            before[target].append(source)
        above, below = _closure_sums(before, after, own), _closure_sums(after, before, own)
        if not longest > 0:
            return [1] * size, [0] * size
        slack = longest * (1 + CLOSE)
        first = [max(0, math.ceil(work / slack - CLOSE) - 1) for work in above]
        last = [min(self.count - 1, self.count - math.ceil(work / slack - CLOSE)) for work in below]
        return first, last

    def _until(self, node: int, stage: int) -> Linear:
        """1 where a node lies in this stage or before."""
        if stage < 0:
            return Linear()
        if node == GRAPH_INPUT or stage >= self.count - 1:
            return Linear(1.0)
        return self._before[node, stage]

    def _within(self, node: int, stage: int) -> Linear:
        """1 where a node lies in this stage; what is given lies in the first."""
        if node == GRAPH_INPUT:
            return Linear(float(stage == 0))
        return self._until(node, stage) - self._until(node, stage - 1)

    def _beside(self, node: int, stage: int) -> Linear:
        """1 where it lies on the device of this stage: between its stages nothing is sent."""
        placement = self.setting.placement
        stages = [other for other, its in enumerate(placement) if its == placement[stage]]
        return total([(1.0, self._within(node, other)) for other in stages])

    def _order(self) -> None:
        for node in sorted(set(self.ideal.owner)):
            for stage in range(self.count - 2):
                self._row(self._until(node, stage + 1), self._until(node, stage))
        for before, after in self.ideal.edges:
            for stage in range(self.count - 1):
                self._row(self._until(before, stage), self._until(after, stage))

    def _row(self, large: Linear, small: Linear) -> None:
        """Adds large >= small, two numbers between 0 and 1, where that says anything."""
        if large.terms != small.terms and not (
            (large.fixed and large.constant >= 1) or (small.fixed and small.constant <= 0)
        ):
            self.program.at_least(large, small)

    def _none_empty(self) -> None:
        nodes = sorted(set(self.ideal.owner))
        for stage in range(self.count):
            held = total([(1.0, self._within(node, stage)) for node in nodes])
            self.program.at_least(held, Linear(1.0))

    def _sums(self, seconds: tuple[float, ...]) -> list[Linear]:
        """For every stage, what its nodes take."""
        return [
            total(
                [
                    (own, self._within(owner, stage))
                    for owner, own in zip(self.ideal.owner, seconds, strict=True)
                    if own
                ]
            )
            for stage in range(self.count)
        ]

    # --- values between stages ---------------------------------------------------------------

    def _transfers(self) -> tuple[list[Linear], list[Linear], list[Linear]]:
        """For every stage, seconds of receiving, of sending gradients back, and of sending."""
        received: list[list[tuple[float, Linear]]] = [[] for _ in range(self.count)]
        returned: list[list[tuple[float, Linear]]] = [[] for _ in range(self.count)]
        sent: list[list[tuple[float, Linear]]] = [[] for _ in range(self.count)]
        sends = self.form is Form.LONGEST
        for producer, users, there, back in self.ideal.moves:
            for stage in range(self.count):
                near = self._beside(producer, stage)
                arrives = self._largest([self._within(user, stage) - near for user in users])
                received[stage].append((there, arrives))
                returned[stage].append((back, arrives))
                if sends:
                    made = self._within(producer, stage)
                    leaves = self._largest([made - self._beside(user, stage) for user in users])
                    sent[stage].append((there + back, leaves))
        return [total(r) for r in received], [total(r) for r in returned], [total(s) for s in sent]

    def _largest(self, parts: list[Linear]) -> Linear:
        """A variable that is at least 0 and each of these, where they can be positive."""
        positive = [part for part in parts if part.most() > CLOSE]
        if not positive:
            return Linear()
        found = self.program.variable()
        for part in positive:
            self.program.at_least(found, part)
        return found

    # --- objectives --------------------------------------------------------------------------

    def _bottleneck(self) -> None:
        for stage in range(self.count):
            self.program.at_least(
                self.objective,
                total(
                    [
                        (1.0 + self.ideal.again, self.forward[stage]),
                        (1.0, self.backward[stage]),
                        (1.0, self.received[stage]),
                        (1.0, self.returned[stage]),
                        (1.0, self.sent[stage]),
                    ]
                ),
            )

    def _line(self) -> None:
        there, back = self.program.variable(), self.program.variable()
        for stage in range(self.count):
            self.program.at_least(there, self.forward[stage])
            self.program.at_least(there, self.received[stage])
            again = self.forward[stage].times(self.ideal.again)
            self.program.at_least(back, self.backward[stage] + again)
            self.program.at_least(back, self.returned[stage])
        pace = (there + back).times(self.m - 1)
        self.program.at_least(self.objective, self._way(self.count - 1) + pace)

    def _way(self, stage: int) -> Linear:
        """One micro-batch's way to a stage and back from it, computing there included."""
        rows = (self.forward, self.backward, self.received, self.returned)
        return total([(1.0, row[s]) for row in rows for s in range(stage + 1)])

    def _rounds(self) -> None:
        whole = self._way(self.count - 1)
        for stage in range(self.count):
            own = self.forward[stage] + self.backward[stage]
            way = self._way(stage)
            self.program.at_least(self.objective, way + own.times(self.m - 1))
            warm = min(self.m, self.count - stage)
            if self.m > warm:
                rounds = whole + (whole - way) + own.times(self.m - warm)
                self.program.at_least(self.objective, rounds)
            for port in (self.received[stage], self.returned[stage], self.backward[stage]):
                self.program.at_least(self.objective, whole + port.times(self.m - 1))

    def _devices(self) -> None:
        placement = self.setting.placement
        split = self.setting.splits_backward
        for device in sorted(set(placement)):
            stages = [stage for stage, its in enumerate(placement) if its == device]
            parts = [(1.0, self.forward[stage]) for stage in range(stages[0])]
            if not split:
                parts += [(1.0, self.backward[stage]) for stage in range(stages[0])]
            for stage in stages:
                parts += [(float(self.m), self.forward[stage])]
                parts += [(float(self.m), self.backward[stage])]
            self.program.at_least(self.objective, total(parts))


def _closure_sums(
    before: list[list[int]], after: list[list[int]], own: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """For every node, what it and all that come before it take."""
    size = len(own)
    waiting = [len(nodes) for nodes in before]
    ready = [node for node in range(size) if not waiting[node]]
    member = np.zeros((size, size), dtype=np.bool_)
    for node in ready:
        member[node, node] = True
        for target in after[node]:
            member[target] |= member[node]
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    # The order in which `@` adds differs by processor.
    return np.asarray(np.where(member, own, 0.0).sum(axis=1))
