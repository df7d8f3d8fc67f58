"""Looks for a good cut in little time: through few places, and then through those about the best.

What it takes does not grow with the square of the nodes: a family has at most so many places to
cut, whatever the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.ground import Ground
from gpipe_compiler.passes.cut.orders import masks_between
from gpipe_compiler.passes.cut.space import Space

ROUNDS = 6
"""How often the places about the best cut are looked at, at most."""

CLOSER = 8
"""So many times closer to the best cut the places of every round are."""


class Searched(Protocol):
    """A search for good cuts, family by family."""

    @property
    def rank(self) -> tuple[float, float]:
        """Excess and objective of the best cut so far, the less the better."""
        ...

    @property
    def stage_of(self) -> Sequence[int]:
        """The best cut so far, the stage of every node of the problem; empty for none."""
        ...

    def family(self, space: Space, *, whole: bool) -> float:
        """Searches these places to cut; returns a lower bound on all cuts there.

        Args:
            whole: whether they are all that there are.
        """
        ...


@dataclass(frozen=True, slots=True)
class Looked:
    """What a search has seen: a lower bound on all cuts, 0 for none, and how many places."""

    bound_s: float
    looked: int


def quick(ground: Ground, lineup: DeviceOrder, searched: Searched) -> Looked:
    """Searches a problem.

    Args:
        lineup: whose links count where places are chosen.
    """
    space = ground.first(lineup)
    if ground.few is not None:
        return Looked(searched.family(space, whole=True), len(ground.few))
    graph, most, places = ground.searched, ground.most, ground.places(lineup)
    looked, share = 0, 1.0
    for turn in range(ROUNDS):
        before = searched.rank
        looked += space.size
        searched.family(space, whole=False)
        if not searched.stage_of:
            everything = places.everywhere(len(places.rows) * graph.size)
            searched.family(Space(graph, everything), whole=False)
        settled = turn > 1 and not searched.rank < (before[0], before[1] * (1 - 1e-6))
        if not searched.stage_of or settled:
            break
        share /= CLOSER
        best = masks_between(graph, searched.stage_of)
        family = {*best, *places.near(best, share, most // 2)}
        space = Space(graph, family | places.beside(best, most))
    return Looked(0.0, looked)
