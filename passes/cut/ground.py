"""What cuts of one problem share.

A plan under a memory limit takes dozens of cuts. They differ in the limits and in what is
recomputed; the contracted graph and the places to cut it are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from functools import cached_property

from gpipe_compiler.passes.cut.contract import Contracted, contract, relevant
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.evaluator import Timing
from gpipe_compiler.passes.cut.frontier import frontier
from gpipe_compiler.passes.cut.orders import down_sets
from gpipe_compiler.passes.cut.places import Places
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.space import Space

MOST = 500
"""Places to cut that are looked at together, where stages are few."""

LEAST_PER_STAGE = 6
"""So many per stage whatever it takes."""

SWEPT = 2_000
"""Nodes of a graph up to which a sweep finds places, too (`cut/frontier.py`)."""

LABELS = 6_000
"""Unfinished down-sets that the sweep holds at a time."""

SWEEP_WORK = 3_000_000
"""Nodes times such down-sets: about ten seconds of a processor, of which a plan takes a minute."""


@dataclass(eq=False)
class Known:
    """The grounds of all problems that were cut so far.

    Attributes:
        swept: the places that sweeps have found, by the form of the graph and the devices. They
            are good places for other times of the same ops as well.
        timings: of the settings so far, by what they follow from; of those that differ in what
            recomputes alone, the steps are the same.
    """

    grounds: dict[Hashable, Ground] = field(default_factory=dict)
    swept: dict[Hashable, Collection[int]] = field(default_factory=dict)
    timings: dict[Hashable, dict[Hashable, Timing]] = field(default_factory=dict)

    def of(self, problem: CutProblem, stages: int, *, memory: bool, updates: bool) -> Ground:
        """The ground of a problem.

        Args:
            memory, updates: as of `contract.relevant`.

        Raises:
            PlanError: when the problem is none, or its constraints contradict each other.
        """
        key = problem, stages, memory, updates
        found = self.grounds.get(key)
        if found is None:
            checked = relevant(problem.check(), memory=memory, updates=updates)
            found = Ground(checked, contract(checked, stages), stages, self)
            self.grounds[key] = found
        return found

    def timing(self, setting: CutSetting) -> Timing:
        """That of a setting."""
        schedule = setting.kind, setting.placement, setting.microbatches
        alike = self.timings.setdefault(schedule, {})
        key = setting.recompute, setting.limited
        if key not in alike:
            steps = next((timing.steps for timing in alike.values()), None)
            alike[key] = Timing.of(setting, steps)
        return alike[key]


@dataclass(eq=False)
class Ground:
    """One problem."""

    problem: CutProblem
    graph: Contracted
    stages: int
    known: Known
    _places: dict[Hashable, Places] = field(default_factory=dict)
    _spaces: dict[Hashable, Space] = field(default_factory=dict)

    @cached_property
    def few(self) -> list[int] | None:
        """All places to cut it where they are so few that all are looked at; else None."""
        return down_sets(self.graph, self.most)

    @property
    def most(self) -> int:
        """Places to cut that are looked at together."""
        return most_places(self.stages)

    def places(self, device_order: DeviceOrder) -> Places:
        """Places along several orders of the nodes.

        Args:
            device_order: whose links count.
        """
        if device_order.rates not in self._places:
            self._places[device_order.rates] = Places.of(self.graph, device_order)
        return self._places[device_order.rates]

    def first(self, device_order: DeviceOrder) -> Space:
        """The family that is looked at first: all places where they are few."""
        key = device_order.rates if self.few is None else ()
        if key not in self._spaces:
            masks = self._spread(device_order) if self.few is None else self.few
            self._spaces[key] = Space(self.graph, masks)
        return self._spaces[key].unlimited()

    def _spread(self, device_order: DeviceOrder) -> set[int]:
        graph = self.graph
        family = self.places(device_order).everywhere(self.most) | _asked(graph, self.stages)
        if graph.size > SWEPT:
            return family
        key = graph.members, graph.before, device_order.rates
        if key not in self.known.swept:
            labels = min(LABELS, SWEEP_WORK // graph.size)
            self.known.swept[key] = frontier(graph, device_order, self.most, labels=labels)
        return family.union(self.known.swept[key])


def most_places(stages: int) -> int:
    """Places to cut that are looked at together."""
    return max(MOST, LEAST_PER_STAGE * stages)


def _asked(graph: Contracted, stages: int) -> set[int]:
    """The smallest and the largest down-set before every stage that the constraints allow."""
    if (
        not any(graph.first_stage[: graph.size - graph.last])
        and min(graph.last_stage) == stages - 1
    ):
        return set()
    found = set()
    for boundary in range(1, stages):
        pairs = list(enumerate(zip(graph.first_stage, graph.last_stage, strict=True)))
        found.add(sum(1 << node for node, (_, last) in pairs if last < boundary))
        found.add(sum(1 << node for node, (first, _) in pairs if first < boundary))
    return found
