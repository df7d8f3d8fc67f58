"""Looks for a good cut in little time: through few places, and then through those about the best.

What it takes does not grow with the square of the nodes: a family has at most so many places to
cut, whatever the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.frontier import frontier
from gpipe_compiler.passes.cut.lineup import Lineup
from gpipe_compiler.passes.cut.orders import down_sets, masks_between
from gpipe_compiler.passes.cut.places import Places

MOST = 300
"""Places to cut that are looked at together, where stages are few."""

PER_STAGE, MOST_OF_MANY = 62, 500
"""So many per stage where that is more, and no more than so many in all."""

LEAST_PER_STAGE = 6
"""So many per stage whatever it takes."""

SWEPT = 2_000
"""Nodes of a graph up to which a sweep finds places, too (`cut/frontier.py`)."""

LABELS = 4_000
"""Unfinished down-sets that the sweep holds at a time."""

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

    def family(self, graph: Contracted, masks: Collection[int], *, whole: bool) -> float:
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


def few(graph: Contracted, stages: int) -> list[int] | None:
    """All places to cut where they are so few that all are looked at; None where they are not."""
    return down_sets(graph, _most(stages))


def _most(stages: int) -> int:
    return max(MOST, min(PER_STAGE * stages, MOST_OF_MANY), LEAST_PER_STAGE * stages)


def quick(graph: Contracted, lineup: Lineup, searched: Searched) -> Looked:
    """Searches a graph.

    Args:
        lineup: whose links count where places are chosen.
    """
    masks = few(graph, lineup.stages)
    if masks is not None:
        return Looked(searched.family(graph, masks, whole=True), len(masks))
    most = _most(lineup.stages)
    places = Places.of(graph, lineup)
    family = places.everywhere(most) | _asked(graph, lineup.stages)
    if graph.size <= SWEPT:
        family |= frontier(graph, lineup, most, labels=LABELS)
    looked, share = 0, 1.0
    for turn in range(ROUNDS):
        before = searched.rank
        looked += len(family)
        searched.family(graph, family, whole=False)
        if not searched.stage_of:
            searched.family(graph, places.everywhere(len(places.rows) * graph.size), whole=False)
        settled = turn > 1 and not searched.rank < (before[0], before[1] * (1 - 1e-6))
        if not searched.stage_of or settled:
            break
        share /= CLOSER
        best = masks_between(graph, searched.stage_of)
        family = {*best, *places.near(best, share, most // 2)}
        family |= places.beside(best, most)
    return Looked(0.0, looked)


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
