"""Of all cuts that are nearly as good as the best, the one that opens the fewest modules.

What opens less is said in `modules.py`. Chains of places to cut (`open_chains.py`) are judged
exactly, those that open the least first; the first that is good enough is cut again with all
modules whole that it leaves whole. In graphs of few down-sets all chains are known, so that none
that is good enough opens less. Of larger graphs they are the most promising along the order in
which the model was written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.choose import Cut, cut
from gpipe_compiler.passes.cut.contract import Contracted, contract, relevant
from gpipe_compiler.passes.cut.device_order import DeviceOrder, seat_orders
from gpipe_compiler.passes.cut.evaluator import CutEvaluator
from gpipe_compiler.passes.cut.modules import ModuleNodes, opened, openness
from gpipe_compiler.passes.cut.open_chains import (
    Chains,
    ChainSeconds,
    CutPlaces,
    opened_by_prefixes,
)
from gpipe_compiler.passes.cut.orders import down_sets, masks_between, prefixes
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.in_flight import loads
from gpipe_compiler.simulate.step import recomputed

PLACES = 256
"""Down-sets to cut at, about, at most."""

JUDGED = 600_000
"""Nodes, values and actions of all cuts that are judged exactly, about, at most."""

EACH = 6
"""Cuts judged of all that open as much as each other, where not all are known; and places beside
the ends of the best cut's stages that are looked at, however much they open."""

SLACKS = (0.0, 0.5, 1.0, 1.5, 3.0)
"""By how many times the share the busiest device may be busier, where not all are known."""

ANEW = 4
"""Cuts that are short enough and too large, at most, whose open modules are cut anew for memory."""

QUICK = 20
"""A cut whose modules are mostly whole may work out so many times less than others."""

CLOSE = 1e-9
"""The share by which sums may differ for rounding."""


def cut_inside(
    problem: CutProblem,
    setting: CutSetting,
    modules: Sequence[ModuleNodes],
    best: Cut,
    share: float,
    *,
    work: int = WORK,
) -> Cut:
    """The cut that opens the fewest modules among those that are good enough; the best of these.

    Good enough is what exceeds no memory by more than the best cut does, and whose objective is at
    most a share longer. What is said of how good a cut can be is that of the best.

    Args:
        best: of all cuts of the problem, in the same setting.
        share: such as 0.03.
        work: as of `cut`.
    """
    if share <= 0 or not opened(modules, best.stage_of):
        return best
    least = openness(modules, best.stage_of)
    for stage_of in _Inside(problem, setting, modules, best, share).found():
        if openness(modules, stage_of) == least:
            break
        open_ones = set(opened(modules, stage_of))
        whole = [set(module.nodes) for module in modules if module not in open_ones]
        beside_last = any(group & problem.last and group - problem.last for group in whole)
        closed = replace(
            problem,
            groups=(*problem.groups, *map(tuple, whole)),
            last_alone=problem.last_alone or beside_last,
        )
        found = cut(closed, setting, work=work // QUICK, hint=stage_of)
        excess = max(found.excess_bytes, default=0) <= max(best.excess_bytes, default=0)
        if excess and found.objective_s <= best.objective_s * (1 + share + CLOSE):
            return replace(
                found,
                lower_bound_s=min(best.lower_bound_s, found.objective_s),
                proved=best.proved and found.objective_s <= best.objective_s,
                down_sets=best.down_sets,
            )
    return best


class _Inside:
    """One search."""

    def __init__(
        self,
        problem: CutProblem,
        setting: CutSetting,
        modules: Sequence[ModuleNodes],
        best: Cut,
        share: float,
    ) -> None:
        if setting.kind is None:
            problem = problem.forward_only()
        limited = any(math.isfinite(seat.memory) for seat in setting.seats)
        problem = relevant(problem.check(), memory=limited, updates=True)
        self.setting, self.modules, self.best, self.share = setting, modules, best, share
        self.limit_s = best.objective_s * (1 + share + CLOSE)
        self.room = max(best.excess_bytes, default=0)
        asked = setting.recompute or (False,) * setting.stages
        redone = {action.stage for action in recomputed(setting.orders)}
        again = np.array([float(a and s in redone) for s, a in enumerate(asked)])
        self.evaluator = CutEvaluator(problem, setting, again)
        held = loads(setting.orders, [s for s, a in enumerate(asked) if a]) if limited else ()
        orders = sorted(seat_orders(setting)[0], key=lambda seats: seats != best.seats)
        self.lineups = [DeviceOrder.of(setting, seats, held, again) for seats in orders]
        graph = contract(problem, setting.stages)
        everything = down_sets(graph, PLACES)
        self.places = CutPlaces(graph, modules, everything or self._near(graph))
        seconds = ChainSeconds(self.places, setting, self.lineups[0])
        self.chains = Chains(self.places, seconds, self._longest(float(graph.least_s.sum())))
        self.all = everything is not None
        sizes = len(problem.nodes) + len(problem.values) + sum(map(len, setting.orders))
        self.left = max(EACH, JUDGED // sizes)

    def _near(self, graph: Contracted) -> list[int]:
        """The ends of the best cut's stages, the places around them, and others that open little,
        along the order of the model."""
        row = prefixes(range(graph.size))
        ends = masks_between(graph, self.best.stage_of)
        opens = opened_by_prefixes(graph, self.modules)
        sizes = [mask.bit_count() for mask in ends]
        far = [min(abs(place - size) for size in sizes) for place in range(len(row))]
        order = sorted(range(len(row)), key=lambda p: (far[p] > EACH, opens[p], far[p]))
        return [*ends, *(row[place] for place in order[:PLACES])]

    def _longest(self, total_s: float) -> float:
        """What a device computes for at most in a cut that is good enough, for a micro-batch."""
        setting, m = self.setting, self.setting.microbatches
        if setting.objective is Objective.BOTTLENECK:
            return self.limit_s
        line = setting.kind in (None, ScheduleKind.GPIPE) and not self.lineups[0].shared
        if line and m > 1:
            return (self.limit_s - total_s) / (m - 1) * (1 + CLOSE)
        return self.limit_s / m

    def found(self) -> Iterator[tuple[int, ...]]:
        """Cuts that may be good enough, those that open the least first; nothing follows upon one
        that is."""
        anew = ANEW
        for _, chains in itertools.groupby(self._promising(), key=lambda found: found[0]):
            good: list[tuple[float, tuple[int, ...]]] = []
            large: list[tuple[int, ...]] = []
            for _, stage_of in chains:
                over, value = self._judged(stage_of)
                if value <= self.limit_s:
                    if over:
                        large.append(stage_of)
                    else:
                        good.append((value, stage_of))
            if good:
                yield min(good)[1]
            elif large and anew and not self.all:
                anew -= 1
                yield large[0]
            if good or self.left <= 0:
                return

    def _promising(self) -> list[tuple[int, tuple[int, ...]]]:
        """How much cuts open, and the stages of their nodes; the least open first."""
        chains = self.chains.found(math.inf) if self.all else []
        self.all = self.all and self.chains.all
        if not self.all:
            chains = []
            whole = self.places.masks[-1]
            ends = (*masks_between(self.places.graph, self.best.stage_of), whole)
            busiest = self.chains.busiest(ends)
            for slack in SLACKS:
                found = self.chains.found(busiest * (1 + self.share * slack + CLOSE))
                for _, equal in itertools.groupby(found, key=lambda chain: chain[0]):
                    chains += itertools.islice(equal, EACH)
            chains = sorted(set(chains))
        return [(cost, self._stages(chain)) for cost, _, chain in chains]

    def _stages(self, chain: Sequence[int]) -> tuple[int, ...]:
        """The stage of every node of the problem."""
        graph = self.places.graph
        stages = len(chain) - self.places.member[list(chain)].sum(axis=0)
        stage_of = [0] * sum(map(len, graph.members))
        for members, stage in zip(graph.members, stages.tolist(), strict=True):
            for node in members:
                stage_of[node] = stage
        return tuple(stage_of)

    def _judged(self, stage_of: Sequence[int]) -> tuple[bool, float]:
        """Whether a cut exceeds memory by too much, and its objective, on the best devices for it;
        infinite for what is not allowed."""
        best = True, math.inf
        if not self.evaluator.allows(stage_of):
            return best
        for lineup in self.lineups:
            excess, value = self.evaluator.evaluate(lineup, stage_of).rank(self.setting.objective)
            best = min(best, (excess > self.room, value))
            self.left -= 1
            if self.left <= 0 or (best <= (False, self.limit_s) and not self.all):
                break
        return best
