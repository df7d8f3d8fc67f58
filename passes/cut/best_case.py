"""A cut problem on the best devices and links there are: what an integer program begins with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpipe_compiler.cluster import Link
from gpipe_compiler.disjoint import DisjointSets
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem
from gpipe_compiler.passes.cut.setting import Setting
from gpipe_compiler.runtime.spec import ScheduleKind

CLOSE = 1e-6
"""Relative: cuts closer together than this count as equally good in integer programs, as HiGHS is
exact to about that."""


@dataclass(frozen=True)
class Ideal:
    """The problem where every device and link is the best there is; the known cut takes 1.

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
    def of(cls, problem: CutProblem, setting: Setting, known_s: float) -> Ideal:
        """The problem of some devices, in shares of what the known cut takes."""
        kinds = {seat.kind for seat in setting.seats}
        costs = [problem.nodes if kind == 0 else problem.other_kinds[kind - 1] for kind in kinds]
        link = _fastest(setting)
        find = DisjointSets(range(len(problem.nodes)))
        for group in (*problem.groups, tuple(sorted(problem.last))):
            find.join(group)
        owner = tuple(find.leader(node) for node in range(len(problem.nodes)))
        edges = {(owner[a], owner[b]) for a, b in problem.edges() if owner[a] != owner[b]}
        moves = []
        for value in problem.values:
            producer = value.producer if value.producer == GRAPH_INPUT else owner[value.producer]
            users = tuple(sorted({owner[user] for user in value.consumers} - {producer}))
            if users and value.bytes + value.gradient_bytes:
                there, back = link.seconds(value.bytes), link.seconds(value.gradient_bytes)
                moves.append((producer, users, there / known_s, back / known_s))
        count = range(len(problem.nodes))
        return cls(
            tuple(min(cost[n].forward_s for cost in costs) / known_s for n in count),
            tuple(min(cost[n].backward_s for cost in costs) / known_s for n in count),
            owner,
            tuple(sorted(edges)),
            tuple(moves),
            float(
                bool(setting.recompute)
                and all(setting.recompute)
                and setting.kind is ScheduleKind.GPIPE
                and setting.microbatches > 1
            ),
        )

    @property
    def own(self) -> tuple[float, ...]:
        """Forward and backward of every node."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))


def _fastest(setting: Setting) -> Link:
    links = [
        link for a, row in enumerate(setting.links) for b, link in enumerate(row) if a != b
    ] or [Link(math.inf, 0.0)]
    return Link(max(link.bandwidth for link in links), min(link.latency_s for link in links))
