"""Searches families of down-sets on every order of devices, the best cut so far as cutoff."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.criteria import FillDrain, Rounds, Sends
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.evaluator import CutEvaluator, CutScore
from gpipe_compiler.passes.cut.exact import Enumeration, Goal
from gpipe_compiler.passes.cut.local import improve_chain
from gpipe_compiler.passes.cut.ordered import Ordered
from gpipe_compiler.passes.cut.search import TOLERANCE, Criterion, SearchResult, search
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.space import Space
from gpipe_compiler.passes.cut.tables import BoundTables, bottleneck_chain, least_excess, tables
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.step import recomputed

ORDERED_WORK = 5_000_000
"""Limits labels that follow orders, which cost the cube of the micro-batches each, per stage."""

FEWEST_LABELS, MOST_LABELS = 16, 4_000
"""Such labels per stage."""

WORK = 600_000_000
"""Numbers worked out, about, by searches whose length is not known beforehand; by the one through
all chains of a small graph in some ten seconds. All other limits here are for that much."""

SHORTLY = WORK // 40
"""As much of it as an enumeration gets that is no proof."""

SMALL = 16
"""Nodes of a graph that is small in this sense; of larger ones, a tenth has to do."""

GLANCE = 400
"""Labels per stage in a first search for a good cut of 1F1B."""

MOST_ROUNDS, ROUNDS_IN_ALL = 10_000, 500_000
"""In a second one; and in that of all stages together."""

IMPROVED = 12
"""Orders of devices, the most promising ones, on which a first cut is bettered."""

MOST_ACTIONS = 60_000
"""Actions times stages up to which boundaries are moved one by one, a simulation each."""

_LINES = (None, ScheduleKind.GPIPE)
_ORDERED = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)


class Solver:
    """The best cut so far, and the searches that better it.

    Args:
        repeats: for every stage, how many micro-batches it computes again.
        total_s: computing of the whole graph once, on the fastest devices.
        work: numbers worked out, about, by all searches whose length is not known beforehand.

    Attributes:
        proves: whether what searches leave open is enumerated, which may take long. Else it is
            only where stages share devices, of whose steps little else is known, and `SHORTLY`.
    """

    def __init__(
        self,
        setting: CutSetting,
        evaluator: CutEvaluator,
        device_orders: Sequence[DeviceOrder],
        repeats: tuple[int, ...],
        total_s: float,
        work: int = WORK,
    ) -> None:
        self.setting, self.evaluator = setting, evaluator
        self.device_orders, self.repeats = device_orders, repeats
        self.proves = False
        self.room = 0
        self.least_excess = True
        self._best: CutScore | None = None
        self._family: Space | None = None
        self._improved: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self.work = self._work = work
        self._m = setting.microbatches
        self.total_s = total_s
        self._actions = sum(map(len, setting.orders))
        self._step = setting.objective is Objective.STEP

    @property
    def found(self) -> bool:
        """Whether there is any cut yet."""
        return self._best is not None

    @property
    def score(self) -> CutScore:
        assert self._best is not None, "nothing was found"
        return self._best

    @property
    def value(self) -> float:
        """The objective of the best cut so far, of those that exceed memory by the least."""
        if self._best is None or max(self._best.excess) > self.room:
            return math.inf
        return self._best.rank(self.setting.objective)[1]

    def reaches(self, bound: float) -> bool:
        """Whether a lower bound proves the best cut so far."""
        return self.found and self.least_excess and bound >= self.value * (1 - 1e-9)

    def search(self, space: Space, *, last: bool) -> float:
        """Searches a family on all orders of devices.

        Args:
            last: whether no further search of it follows, so that what remains open is worth more
                time.

        Returns:
            a lower bound on all cuts in the family and on the best so far.
        """
        if not self._make_room(space, last=last):
            return math.inf
        device_orders = [device_order.roomier(self.room) for device_order in self.device_orders]
        device_orders = self._begin(space, device_orders)
        bounds = []
        for device_order in device_orders:
            space.limit(self.longest_stage())
            bounds.append(self._prove_by(space, device_order, tables(space, device_order)))
        if last and self._enumerates:
            self._work = self._for_enumeration(space)
            for index in sorted(range(len(device_orders)), key=bounds.__getitem__):
                if bounds[index] < self.value * (1 - TOLERANCE):
                    space.limit(self.longest_stage())
                    bounds[index] = max(bounds[index], self._enumerate(space, device_orders[index]))
        return min(bounds, default=math.inf)

    @property
    def _enumerates(self) -> bool:
        return self.proves or self.device_orders[0].shared

    def _for_enumeration(self, space: Space) -> int:
        if not self.proves:
            return min(self.work, SHORTLY)
        if space.graph.size <= SMALL:
            return self.work
        return self.work // (60 if self._step else 10)

    def _make_room(self, space: Space, *, last: bool) -> bool:
        """Finds out by how much memory must be exceeded; False where there is no cut at all."""
        self.room = 0
        self.least_excess = True
        if not any(device_order.limited for device_order in self.device_orders):
            return True
        if not self.device_orders[0].shared:
            by_memory = {
                tuple(device_order.memory): device_order for device_order in self.device_orders
            }
            least = min(least_excess(space, device_order) for device_order in by_memory.values())
            if not math.isfinite(least):
                return False
            if self._best is not None:
                least = min(least, max(self._best.excess))
            self.room = math.ceil(least)
            self.least_excess = last or not self.room
            return True
        self._begin(space, self.device_orders)
        if math.isfinite(self.value):
            return True
        self._begin(space, [device_order.roomier(math.inf) for device_order in self.device_orders])
        if self._best is None:
            return False
        least = max(self._best.excess)
        self.least_excess = last
        self._work = self.work if self.proves else self._for_enumeration(space)
        for device_order in self.device_orders if last else ():
            todo = Enumeration(
                space, device_order, self.evaluator, self.setting, self.repeats, Goal.EXCESS
            )
            outcome, self._work = todo.run(least, self._work)
            self.least_excess = self.least_excess and outcome.bound >= least
            if outcome.chain is not None:
                self._offer(space, device_order, outcome.chain)
                least = max(self._best.excess)
                self.least_excess = last and outcome.bound > least - 1
        self.room = least
        return True

    def _begin(self, space: Space, device_orders: Sequence[DeviceOrder]) -> list[DeviceOrder]:
        """Finds good cuts; returns the orders of devices with any cut in the family."""
        found: list[tuple[tuple[float, float], int, DeviceOrder, tuple[int, ...]]] = []
        for device_order in device_orders:
            chain = bottleneck_chain(space, device_order, apart=not self._step)
            if chain is not None:
                found.append(
                    (self._offer(space, device_order, chain), len(found), device_order, chain)
                )
        for _, _, device_order, chain in sorted(found, key=lambda entry: entry[:2])[:IMPROVED]:
            self._improve(space, device_order, chain)
        return [device_order for _, _, device_order, _ in found]

    # --- searches ----------------------------------------------------------------------------

    def _prove_by(self, space: Space, device_order: DeviceOrder, bounds: BoundTables) -> float:
        """Searches by what is known of the schedule; returns a lower bound."""
        stages, m, kind = self.setting.stages, self._m, self.setting.kind
        if not self._step:
            return self._prove_longest(space, device_order, bounds)
        plain = max(float(bounds.way_s[stages, -1]), m * float(bounds.device_s[stages, -1]))
        if device_order.shared:
            return plain
        alone = kind is ScheduleKind.ONE_F_ONE_B and (m == 1 or stages == 1)
        if kind in _LINES or alone:
            updates = any(
                rate.update_s_per_byte or rate.update_latency_s for rate in device_order.rates
            )
            drain = FillDrain(m, device_order.again, updates)
            return self._search(space, device_order, bounds, drain).bound_s
        if kind not in _ORDERED:
            return plain
        least = plain
        if kind is ScheduleKind.ONE_F_ONE_B:
            # With few labels for a good cut, and then with many.
            for beam in (GLANCE, max(GLANCE, min(MOST_ROUNDS, ROUNDS_IN_ALL // stages))):
                rounds = Rounds(m, stages, device_order.again, beam)
                found = self._search(space, device_order, bounds, rounds)
                least = max(least, found.bound_s)
                if found.all_seen:
                    break
                space.limit(self.longest_stage())
            if least >= self.value * (1 - TOLERANCE):
                return least
            space.limit(self.longest_stage())
        if FEWEST_LABELS * stages * m**3 > self.work:
            return least
        most = min(1.0, self.work / WORK)
        beam = min(int(MOST_LABELS * most), int(ORDERED_WORK * most) // m**3)
        beam = max(FEWEST_LABELS, beam)
        asked = {stage for stage, count in enumerate(self.repeats) if count}
        redone = frozenset(a for a in recomputed(self.setting.orders) if a.stage in asked)
        split = self.setting.splits_backward
        ordered = Ordered(self.setting.orders, m, beam, device_order.again, redone, split)
        return max(least, self._search(space, device_order, bounds, ordered).bound_s)

    def _prove_longest(self, space: Space, device_order: DeviceOrder, bounds: BoundTables) -> float:
        """The same for the longest stage."""
        least = float(bounds.stage_s[self.setting.stages, -1])
        if least >= self.value * (1 - TOLERANCE):
            return least
        sends = Sends.of(space, device_order)
        if sends is None:
            return least
        return max(least, self._search(space, device_order, bounds, sends).bound_s)

    def _search(
        self, space: Space, device_order: DeviceOrder, bounds: BoundTables, criterion: Criterion
    ) -> SearchResult:
        found = search(space, device_order, bounds, criterion, self.value)
        if found.chain is not None:
            self._offer(space, device_order, found.chain)
            self._improve(space, device_order, found.chain)
        return found

    def _enumerate(self, space: Space, device_order: DeviceOrder) -> float:
        todo = Enumeration(space, device_order, self.evaluator, self.setting, self.repeats)
        outcome, self._work = todo.run(self.value, self._work)
        if outcome.chain is not None:
            self._offer(space, device_order, outcome.chain)
        return outcome.bound

    def longest_stage(self) -> float:
        """A stage that computes for longer cannot be in a better cut than the best so far."""
        known_s = self.value
        if not self._step or not math.isfinite(known_s):
            return known_s
        if self.setting.kind in _LINES and not self.device_orders[0].shared and self._m > 1:
            return (known_s - self.total_s) / (self._m - 1)
        return known_s / self._m

    def _true(self, device_order: DeviceOrder) -> DeviceOrder:
        """The same order of devices with the memory they have."""
        return next(true for true in self.device_orders if true.slots == device_order.slots)

    def consider(self, stage_of: Sequence[int]) -> None:
        """Keeps a cut, on the best order of devices for it, when it is the best so far."""
        if self.evaluator.allows(stage_of):
            for device_order in self.device_orders:
                self._keep(device_order, stage_of)

    def _improve(self, space: Space, device_order: DeviceOrder, chain: tuple[int, ...]) -> None:
        """Keeps what a chain becomes when its boundaries are moved, unless known or too long."""
        if self._actions * self.setting.stages > MOST_ACTIONS:
            return
        if self._family is not space:
            self._family, self._improved = space, set()
        if (device_order.slots, chain) not in self._improved:
            self._improved.add((device_order.slots, chain))
            better = improve_chain(space, self._true(device_order), chain, self.evaluator)
            self._offer(space, device_order, better)

    def _offer(
        self, space: Space, device_order: DeviceOrder, chain: Sequence[int]
    ) -> tuple[float, float]:
        """Keeps the chain when it is the best so far; returns its rank."""
        stages = space.stages_of(chain)
        stage_of = [0] * sum(map(len, space.graph.members))
        for members, stage in zip(space.graph.members, stages.tolist(), strict=True):
            for node in members:
                stage_of[node] = stage
        return self._keep(self._true(device_order), stage_of)

    def _keep(self, device_order: DeviceOrder, stage_of: Sequence[int]) -> tuple[float, float]:
        score = self.evaluator.evaluate(device_order, stage_of)
        rank = score.rank(self.setting.objective)
        if self._best is None or rank < self._best.rank(self.setting.objective):
            self._best = score
        return rank
