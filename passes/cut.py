"""Chooses the stages: the cut of a problem into consecutive down-sets with the shortest step.

The time of a step is `simulate.py`'s. Where a problem has few down-sets the answer is the best
there is; where it has many, it is the best within a family of down-sets that holds every linear
cut along several topological orders and the neighbourhood of the best cut found, and a lower
bound says how far it can be from the best.

Two modules help where there are too many down-sets (what is agreed of the two hooks; the new
`Contracted` lands with them: `members`, `seconds[kind, forward|backward|weight, node]`,
`values: Movable(producer, consumers, sends, bytes, returns, gradient_bytes)` with
`receive_s(link)` and `gradient_s(link)`, `before`, `kept`, `first_stage` and `last_stage` of every
node, `apart`, `last`, `last_alone`; a down-set is a bit mask over its nodes, node 0 the lowest bit;
a `Lineup` is one order of devices, with `stages` and `paces[stage].kind|receives|sends`):

- `cut_frontier.frontier(graph: Contracted, lineup: Lineup, most: int) -> set[int]`: at most so many
  down-sets that are worth cutting at, added to the linear family;
- `cut_certificate.raised_bound(problem: CutProblem, setting: Setting, found: Cut) -> float`: called
  last, where `found` is not proved: a valid lower bound of the objective asked for over all cuts
  that fit, not above that of `found`; equal to it where it proves that there is none better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.passes.cut_contract import Contracted, contract
from gpipe_compiler.passes.cut_criteria import FillDrain, Ordered, Rounds
from gpipe_compiler.passes.cut_local import chain_times, improve_chain
from gpipe_compiler.passes.cut_orders import neighbourhood, topological_orders
from gpipe_compiler.passes.cut_problem import CutProblem
from gpipe_compiler.passes.cut_search import TOLERANCE, Criterion, search
from gpipe_compiler.passes.cut_setting import Setting
from gpipe_compiler.passes.cut_space import Floats, Space, down_sets, prefixes
from gpipe_compiler.passes.cut_tables import Tables, bottleneck_chain, tables
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate import StageTimes, recomputed, simulate, step_times

MOST_DOWN_SETS = 20_000
"""Above so many the search is no longer over all of them."""

ORDERED_WORK = 5_000_000
"""Limits labels of 1F1B, which cost the cube of the micro-batches each, per stage."""

MOST_LABELS = 4_000
"""Labels of 1F1B per stage at most."""

ROUNDS = 4
"""How often the neighbourhood of the best cut is searched, at most, where not all is."""

NEIGHBOURS = 2_000
"""Down-sets in that neighbourhood at most."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages, and how good they are.

    Attributes:
        stage_of: the stage of every node of the problem.
        times: seconds of one micro-batch in every stage.
        step_s: the simulated time of the step.
        bottleneck_s: the longest stage, transfers included (`Objective.BOTTLENECK`).
        seats: for every device of the pipeline, which of the setting's seats it is.
        lower_bound_s: no cut into as many stages takes less.
        proved: whether `step_s` is the least possible, to within 1e-10 of it.
        down_sets: how many places to cut were looked at.
    """

    stage_of: tuple[int, ...]
    times: tuple[StageTimes, ...]
    step_s: float
    lower_bound_s: float
    proved: bool
    down_sets: int
    bottleneck_s: float = 0.0
    seats: tuple[int, ...] = ()

    @property
    def gap(self) -> float:
        """How far the cut may be from the best, as a share of the lower bound."""
        if self.proved or self.lower_bound_s <= 0:
            return 0.0
        return self.step_s / self.lower_bound_s - 1


def cut(problem: CutProblem, setting: Setting, most_down_sets: int = MOST_DOWN_SETS) -> Cut:
    """The best cut found into stages that are not empty.

    For inference the backward times and gradients of the problem do not count.

    Raises:
        UsageError: for no stages or no micro-batches.
        PlanError: when the problem has fewer parts than stages, or is none.
    """
    stages, microbatches = setting.stages, setting.microbatches
    if stages < 1 or microbatches < 1:
        what, count = ("stages", stages) if stages < 1 else ("micro-batches", microbatches)
        raise UsageError(f"{count} {what}: at least one is needed")
    if setting.kind is None:
        problem = problem.forward_only()
    link = setting.links[0][-1]
    graph = contract(problem.check(), link, keep=stages)
    if graph.parts < stages:
        raise PlanError(
            f"{stages} stages are more than the {graph.parts} parts that the model's "
            f"{len(problem.nodes)} ops can be cut into",
            hint=f"ask for at most {graph.parts}",
        )
    again = setting.recompute or (False,) * stages
    return _Cutter(problem, graph, stages, microbatches, setting, again).best(most_down_sets)


@dataclass
class _Cutter:
    """One run of the cut; remembers the best chain of down-sets so far."""

    problem: CutProblem
    graph: Contracted
    stages: int
    microbatches: int
    setting: Setting
    recompute: tuple[bool, ...]

    def __post_init__(self) -> None:
        self.orders = self.setting.orders
        needed = {action.stage for action in recomputed(self.orders)}
        self.again = np.array(
            [float(asked and s in needed) for s, asked in enumerate(self.recompute)]
        )
        self.total_s = sum(self.graph.forward_s) + sum(self.graph.backward_s)
        self.best_s = math.inf
        self.best_masks: tuple[int, ...] = ()
        self.best_times: tuple[StageTimes, ...] = ()

    def best(self, most_down_sets: int) -> Cut:
        orders = topological_orders(self.graph)
        linear = {mask for order in orders for mask in prefixes(order)}
        everything = down_sets(self.graph, most_down_sets)
        if everything is not None:
            looked = len(everything)
            if len(linear) * 4 < looked:
                self.improve(Space(self.graph, linear))  # a good incumbent spares work
            bound = self.improve(Space(self.graph, everything))
        else:
            family = linear
            for _ in range(ROUNDS):
                before = self.best_s
                self.improve(Space(self.graph, family))
                if not self.best_s < before * (1 - 1e-6):
                    break
                near = neighbourhood(self.graph, self.best_masks[1:-1], NEIGHBOURS)
                family = linear | near
            looked, bound = len(family), 0.0
        bound = min(max(bound, self._simple_bound()), self.best_s)
        return self._cut(bound, looked)

    def improve(self, space: Space) -> float:
        """Searches a family; returns a lower bound on all cuts in it, and in the incumbent."""
        rough = bottleneck_chain(space, self.stages, self.again)
        if rough is None:
            return math.inf
        self._offer(space, rough)
        if (
            self.setting.kind is not ScheduleKind.ONE_F_ONE_B
            or self.microbatches == 1
            or self.stages == 1
        ):
            space.limit(self._longest_stage())
            plain = FillDrain(self.microbatches, self.total_s, self.again)
            return self._search(space, tables(space, self.stages, self.again), plain)
        self._offer(space, improve_chain(space, rough, self._steps))
        space.limit(self._longest_stage())
        bounds = tables(space, self.stages, self.again)
        least = self._search(space, bounds, Rounds(self.microbatches, self.stages, self.again))
        if least >= self.best_s * (1 - TOLERANCE):
            return least
        space.limit(self._longest_stage())
        beam = max(16, min(MOST_LABELS, ORDERED_WORK // self.microbatches**3))
        ordered = Ordered(self.orders, self.microbatches, beam, self.again)
        return max(least, self._search(space, bounds, ordered))

    def _search(self, space: Space, bounds: Tables, criterion: Criterion) -> float:
        """Searches by one criterion, keeps what it finds, and returns its bound."""
        found = search(space, bounds, criterion, self.stages, self.best_s)
        if found.chain is not None:
            chain = found.chain
            if self.setting.kind is ScheduleKind.ONE_F_ONE_B:
                chain = improve_chain(space, chain, self._steps)
            self._offer(space, chain)
        return found.bound_s

    def _steps(self, times: Floats) -> Floats:
        again = times[:, :, :1] * self.again[:, None]
        rest = np.zeros((*again.shape[:2], 2))
        return step_times(self.orders, np.concatenate((times, again, rest), axis=2))

    def _longest_stage(self) -> float:
        """A stage that computes for longer cannot be in a better cut than the best so far."""
        if self.microbatches == 1:
            return math.inf
        if self.setting.kind is ScheduleKind.ONE_F_ONE_B:
            return self.best_s / self.microbatches
        return (self.best_s - self.total_s) / (self.microbatches - 1)

    def _offer(self, space: Space, chain: Sequence[int]) -> None:
        """Keeps the chain when its simulated step is the shortest so far."""
        rows = chain_times(space, tuple(chain))
        times = [
            StageTimes(*map(float, (*row, again * row[0])))
            for row, again in zip(rows, self.again, strict=True)
        ]
        step = simulate(self.orders, times).step_s
        if step < self.best_s:
            self.best_s = step
            self.best_masks = tuple(space.masks[index] for index in chain)
            self.best_times = tuple(times)

    def _simple_bound(self) -> float:
        """A bound that needs no search: the busiest device, and what fills and drains the line."""
        again = 1 + float(self.again.min())
        forward, backward = np.array(self.graph.forward_s), np.array(self.graph.backward_s)
        own = again * forward + backward
        device = max(float(own.sum()) / self.stages, float(own.max()))
        if self.setting.kind is not ScheduleKind.ONE_F_ONE_B:
            return self.total_s + (self.microbatches - 1) * device
        # For stage s with R after it: step >= total - R + (M-1) own and >= total + R + (M-w) own.
        # Half the sum of both, weighed so that the stages' own times add up to the total.
        warm = [min(self.stages - s, self.microbatches) for s in range(self.stages)]
        repeats = [self.microbatches - (w + 1) / 2 for w in warm]
        shared = self.total_s / sum(1 / r for r in repeats) if all(repeats) else 0.0
        return max(self.microbatches * device, self.total_s + shared)

    def _cut(self, bound: float, looked: int) -> Cut:
        stage_of = [0] * len(self.problem.nodes)
        for node, members in enumerate(self.graph.members):
            stage = next(s for s, mask in enumerate(self.best_masks) if mask >> node & 1) - 1
            for member in members:
                stage_of[member] = stage
        proved = bound >= self.best_s * (1 - 1e-9)
        return Cut(
            tuple(stage_of),
            self.best_times,
            self.best_s,
            self.best_s if proved else bound,
            proved,
            looked,
            seats=tuple(range(max(self.setting.placement) + 1)),
        )
