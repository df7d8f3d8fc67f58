"""Betters a cut by moving one boundary at a time: a good incumbent makes the search short."""

from __future__ import annotations

import itertools

import numpy as np

from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.evaluator import CutEvaluator
from gpipe_compiler.passes.cut.space import Floats, Integers, Space

Chain = tuple[int, ...]

NEAREST = 150
"""Down-sets tried on each side of a boundary, nearest in computing time first."""

SWEEPS = 20
"""Times every boundary is tried, at most."""


def improve_chain(
    space: Space, device_order: DeviceOrder, chain: Chain, evaluator: CutEvaluator
) -> Chain:
    """The chain after no single boundary can be moved to a better cut, within the family.

    Better is what is less too large for its devices, and of those alike, has the better objective,
    as the rows of the space tell.
    """
    return _Improving(space, device_order, chain, evaluator).run()


class _Improving:
    def __init__(
        self, space: Space, device_order: DeviceOrder, chain: Chain, evaluator: CutEvaluator
    ) -> None:
        self.space, self.device_order, self.evaluator = space, device_order, evaluator
        self.chain = list(chain)
        costs = [
            self._stage(stage, start, np.array([end]))
            for stage, (start, end) in enumerate(itertools.pairwise(chain))
        ]
        self.costs = np.concatenate(costs, axis=1).T  # (stages, 10)
        self.rank = self._ranks(self.costs[None])[0]

    def run(self) -> Chain:
        boundaries = len(self.chain) - 2
        unmoved = 0
        for turn in range(SWEEPS * boundaries):
            moved = self._move(1 + turn % boundaries)
            unmoved = 0 if moved else unmoved + 1
            if unmoved == boundaries:
                break
        return tuple(self.chain)

    def _ranks(self, costs: Floats) -> list[tuple[float, float]]:
        columns = costs.transpose(0, 2, 1)
        excess, value = self.evaluator.score(self.device_order, columns[:, :7], columns[:, 7:])
        return list(zip(excess.tolist(), value.tolist(), strict=True))

    def _stage(self, stage: int, start: int, ends: Integers) -> Floats:
        """What the stage costs that lies between these, shape (10, ends); NaN where none may."""
        row = self.space.row(start, self.device_order.rates[stage])
        at = np.minimum(np.searchsorted(row.ends, ends), len(row.ends) - 1)
        if not len(row.ends):
            return np.full((10, len(ends)), np.nan)
        found = np.concatenate((row.times[:, at], row.held[:, at]))
        found[:, row.ends[at] != ends] = np.nan
        return found

    def _stages(self, stage: int, starts: Integers, end: int) -> Floats:
        found = np.full((10, len(starts)), np.nan)
        rate = self.device_order.rates[stage]
        for column, start in enumerate(starts.tolist()):
            row = self.space.row(start, rate)
            at = row.ends.searchsorted(end)
            if at < len(row.ends) and row.ends[at] == end:
                found[:7, column], found[7:, column] = row.times[:, at], row.held[:, at]
        return found

    def _move(self, position: int) -> bool:
        """Puts one boundary to its best place between its neighbours; whether that is another."""
        start, here, end = self.chain[position - 1 : position + 2]
        ends = self.space.row(start, self.device_order.rates[position - 1]).ends
        middle = int(np.searchsorted(ends, here))
        near = ends[max(0, middle - NEAREST) : middle + NEAREST]
        near = near[(near < end) & self.space.allowed(position)[near]]
        if not len(near):
            return False
        tried = np.repeat(self.costs[None], len(near), axis=0)
        tried[:, position - 1] = self._stage(position - 1, start, near).T
        tried[:, position] = self._stages(position, near, end).T
        valid = np.flatnonzero(np.isfinite(tried[:, position]).all(axis=1))
        if not len(valid):
            return False
        ranks = self._ranks(tried[valid])
        best = min(range(len(valid)), key=ranks.__getitem__)
        excess, value = ranks[best]
        if not (excess, value) < (self.rank[0], self.rank[1] * (1 - 1e-12)):
            return False
        self.rank = ranks[best]
        self.chain[position] = int(near[valid[best]])
        self.costs = tried[valid[best]]
        return True
