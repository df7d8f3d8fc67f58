"""Cuts as others make them, and what any cut comes to: what ours are compared with.

All but the last cut the ops in a row, in the order in which the model runs them:

- `equal_parameters`: the layer with the parameters, and what follows up to the next, as one unit;
  the largest stage holds as few parameters as possible (DeepSpeed's `parameters`).
- `equal_ops`: as many ops in every stage.
- `blocks`: sums of times that differ by at most the longest op (Barany and Grinberg, arXiv
  1308.2452, section 4), by which torchgpipe balances a model's layers.
- `best_in_a_row`: the least objective over all cuts along any of several topological orders.

What must share a stage (`contract`) counts as one op of all its ops' parameters and time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from classic import block_ends, cut_at, equal_ends

from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut import Cut, cut
from gpipe_compiler.passes.cut.contract import Contracted, contract
from gpipe_compiler.passes.cut.orders import topological_orders
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.simulate.in_flight import loads
from gpipe_compiler.simulate.step import StageTimes, recomputed, simulate


@dataclass(frozen=True, slots=True)
class Score:
    """What a cut comes to.

    Attributes:
        bottleneck_s: the longest stage with all its transfers, in and out.
    """

    times: tuple[StageTimes, ...]
    step_s: float
    bottleneck_s: float

    def of(self, objective: Objective) -> float:
        """The seconds that are to be few."""
        return self.step_s if objective is Objective.STEP else self.bottleneck_s


def score(problem: CutProblem, stage_of: Sequence[int], setting: CutSetting) -> Score:
    """A cut on equal devices and links, added up value by value: the definitions, and no search."""
    stages = range(setting.stages)
    asked = setting.recompute or (False,) * setting.stages
    again = {action.stage for action in recomputed(setting.orders) if asked[action.stage]}
    link, slot = setting.links[0][-1], setting.slots[0]
    forward, backward, weight, receive, gradient, sent, updated = (
        [0.0] * setting.stages for _ in range(7)
    )
    for node, stage in zip(problem.nodes, stage_of, strict=True):
        forward[stage] += node.forward_s
        backward[stage] += node.backward_s
        weight[stage] += node.weight_s
    for value in problem.values:
        home = 0 if value.producer == GRAPH_INPUT else stage_of[value.producer]
        for target in {stage_of[node] for node in value.consumers} - {home}:
            there, back = link.seconds(value.bytes), link.seconds(value.gradient_bytes)
            receive[target] += there
            gradient[target] += back
            sent[home] += there + back
    for kept in problem.kept:
        for stage in {stage_of[user] for user in kept.users}:
            updated[stage] += kept.updated_bytes * slot.update_s_per_byte
    rerun = [forward[s] if s in again else 0.0 for s in stages]
    times = tuple(
        map(StageTimes, forward, backward, receive, gradient, rerun, weight, updated)
    )  # fmt: skip
    return Score(
        times,
        simulate(setting.orders, times).step_s,
        max(
            t.forward_s + t.backward_s + t.recompute_s + t.receive_s + t.gradient_s + sent[s]
            for s, t in enumerate(times)
        ),
    )


def memory(problem: CutProblem, stage_of: Sequence[int], setting: CutSetting) -> tuple[float, ...]:
    """Bytes that each device needs for a cut, as `simulate/in_flight.py` counts them."""
    state, saved, taken = ([0.0] * setting.stages for _ in range(3))
    for kept in problem.kept:
        for stage in {stage_of[user] for user in kept.users}:
            state[stage] += kept.bytes
            saved[stage] += kept.microbatch_bytes
    for value in problem.values:
        home = -1 if value.producer == GRAPH_INPUT else stage_of[value.producer]
        for target in {stage_of[node] for node in value.consumers} - {home}:
            taken[target] += value.bytes
    again = [stage for stage, asked in enumerate(setting.recompute) if asked]
    return tuple(
        sum(state[s] for s in load.stages)
        + load.peak([taken[s] for s in load.stages], [saved[s] for s in load.stages])
        for load in loads(setting.orders, again)
    )


class Row:
    """The ops of a problem in a row, as the model runs them, and cuts of the row.

    Attributes:
        graph: its nodes are the ops that may be parted, in a topological order.
    """

    def __init__(self, problem: CutProblem, stages: int) -> None:
        self.problem, self.stages = problem, stages
        self.graph = contract(problem, stages)

    def equal_parameters(self) -> tuple[int, ...]:
        """The stage of every op of the problem; the largest stage is as small as can be."""
        trained = any(kept.updated_bytes for kept in self.problem.kept)
        weights = [0.0] * self.graph.size
        place = self._places()
        for kept in self.problem.kept:
            first = min((place[user] for user in kept.users), default=0)
            weights[first] += kept.updated_bytes if trained else kept.bytes
        starts = [node for node, weight in enumerate(weights) if weight]
        if len(starts) < self.stages:  # not as many layers as stages: part any two ops
            starts = list(range(self.graph.size))
        ends = [*starts[1:], self.graph.size]
        ranges = list(zip([0, *starts[1:]], ends, strict=True))
        sizes = balanced([sum(weights[a:b]) for a, b in ranges], self.stages)
        units = list(itertools.accumulate(sizes))
        return cut_at(self.graph, [ranges[unit][0] for unit in units[:-1]])

    def equal_ops(self) -> tuple[int, ...]:
        """The stage of every op of the problem; counts differ as little as what is whole allows."""
        counts = [len(members) for members in self.graph.members]
        return cut_at(self.graph, equal_ends(counts, self.stages))

    def blocks(self) -> tuple[int, ...]:
        """The stage of every op of the problem, by torchgpipe's block partition of times."""
        times = self.graph.seconds[0, 0] + self.graph.seconds[0, 1]
        return cut_at(self.graph, block_ends(times.tolist(), self.stages)[:-1])

    def _places(self) -> list[int]:
        """The node of every op."""
        found = [0] * len(self.problem.nodes)
        for node, members in enumerate(self.graph.members):
            for member in members:
                found[member] = node
        return found


def balanced(weights: Sequence[float], stages: int) -> tuple[int, ...]:
    """How many consecutive units each stage has, so that the heaviest is as light as possible.

    Of several such ways it is the one with the shortest stages first.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (worst, sizes) in best.items():
            total = 0.0
            for end in range(start + 1, len(weights) - (stages - stage - 1) + 1):
                total += weights[end - 1]
                candidate = max(worst, total), (*sizes, end - start)
                if end not in found or candidate < found[end]:
                    found[end] = candidate
        best = found
    return best[len(weights)][1]


def best_in_a_row(problem: CutProblem, setting: CutSetting) -> Cut:
    """The best cut along any of the topological orders in `cut.orders`; each search is complete."""
    graph = contract(problem, setting.stages)
    found = [cut(in_a_row(problem, graph, row), setting) for row in topological_orders(graph)]
    return min(found, key=lambda one: one.objective_s)


def in_a_row(problem: CutProblem, graph: Contracted, row: Sequence[int]) -> CutProblem:
    """The problem whose only cuts are those of one order of the contracted nodes."""
    chain = tuple(
        (graph.members[before][0], graph.members[after][0])
        for before, after in itertools.pairwise(row)
    )
    return dataclasses.replace(problem, precedence=(*problem.precedence, *chain))
