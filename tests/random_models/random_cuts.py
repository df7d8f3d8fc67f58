"""Cuts nobody would choose."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from gpipe_compiler.cluster import Link
from gpipe_compiler.passes.cut import Cut, StepKind
from gpipe_compiler.passes.cut_contract import contract
from gpipe_compiler.passes.cut_problem import CutProblem
from gpipe_compiler.simulate import StageTimes


def random_cut(seed: int) -> Callable[..., Cut]:
    """In the place of `passes.cut.cut`: a random chain of down-sets, legal and no more."""

    def cut(
        problem: CutProblem,
        *,
        stages: int,
        microbatches: int,
        step: StepKind,
        link: Link,
        recompute: Sequence[bool],
        most_down_sets: int,
    ) -> Cut:
        del microbatches, step, recompute, most_down_sets
        draw = random.Random(seed)
        graph = contract(problem.check(), link, keep=len(problem.nodes) + 1)
        assert graph.parts >= stages, "ask for fewer stages"
        last = graph.size - 1 if graph.last else None
        order: list[int] = []
        while len(order) < graph.size:
            ready = [
                node
                for node in range(graph.size)
                if node not in order
                and graph.before[node] <= set(order)
                and (node != last or len(order) == graph.size - 1)
            ]
            order.append(draw.choice(ready))
        places = range(1, graph.parts)
        ends = sorted(draw.sample(places, stages - 1))
        stage_of = [0] * len(problem.nodes)
        for position, node in enumerate(order):
            for member in graph.members[node]:
                stage_of[member] = sum(end <= position for end in ends)
        times = (StageTimes(1.0, 2.0),) * stages
        return Cut(tuple(stage_of), times, 1.0, 1.0, False, 1)

    return cut


def most_stages(problem: CutProblem, link: Link) -> int:
    """How many stages a problem can be cut into."""
    return contract(problem.check(), link, keep=len(problem.nodes) + 1).parts
