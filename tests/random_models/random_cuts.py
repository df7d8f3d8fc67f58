"""Cuts nobody would choose."""

from __future__ import annotations

import random
from collections.abc import Callable

from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.simulate.step import StageTimes


def random_cut(seed: int) -> Callable[..., Cut]:
    """In the place of `passes.cut.cut`: a random chain of down-sets, legal and no more."""

    def cut(
        problem: CutProblem,
        setting: CutSetting,
        **_: object,
    ) -> Cut:
        draw = random.Random(seed)
        stages = setting.stages
        graph = contract(problem.check(), stages)
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
        slots = tuple(range(max(setting.placement) + 1))
        return Cut(tuple(stage_of), times, 1.0, 1.0, False, 1, 1.0, slots, (0,) * len(slots))

    return cut


def most_stages(problem: CutProblem) -> int:
    """How many stages a problem can be cut into."""
    return contract(problem.check(), 2).parts
