"""Cuts of the nodes in a row as other tools make them: the same number of ops in every stage, the
same work, and sums of times that differ by at most the longest node (Barany and Grinberg, arXiv
1308.2452, section 4), by which torchgpipe balances a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from gpipe_compiler.passes.cut.contract import Contracted


def classic_cuts(graph: Contracted, stages: int) -> Iterator[tuple[int, ...]]:
    if graph.size < stages:
        return
    yield cut_at(graph, equal_ends([len(members) for members in graph.members], stages))
    work = (graph.seconds[0, 0] + graph.seconds[0, 1]).tolist()
    yield cut_at(graph, equal_ends(work, stages))
    yield cut_at(graph, block_ends(work, stages)[:-1])


def cut_at(graph: Contracted, ends: Sequence[int]) -> tuple[int, ...]:
    """The stage of every node of the problem, from the numbers of nodes before each place to cut.

    Where the last stage would hold nothing but the loss, and may not, it gets a node more.
    """
    last = graph.size - 1
    if ends and ends[-1] == last and graph.last and not graph.last_alone:
        ends = [min(end, last - (len(ends) - i)) for i, end in enumerate(ends)]
    stage_of = [0] * sum(map(len, graph.members))
    for node, members in enumerate(graph.members):
        for member in members:
            stage_of[member] = sum(node >= end for end in ends)
    return tuple(stage_of)


def equal_ends(weights: Sequence[float], stages: int) -> list[int]:
    """Where each stage but the last ends, so that all weigh as near to the same as what is whole
    allows; none is empty.
    """
    whole = list(itertools.accumulate(weights))
    ends: list[int] = []
    for stage in range(1, stages):
        wanted = stage * whole[-1] / stages
        low, high = max(ends, default=0) + 1, len(weights) - (stages - stage)
        ends.append(min(range(low, high + 1), key=lambda end: abs(whole[end - 1] - wanted)))
    return ends


def block_ends(times: Sequence[float], blocks: int) -> list[int]:
    """Where each of consecutive blocks ends, whose sums differ by at most the largest item.

    As torchgpipe does it: items are shifted and scaled to 0 ... 1, blocks begin with equal numbers
    of items, and the smallest block takes an item from its neighbour on the side of the largest.
    """
    low, spread = min(times), max(times) - min(times)
    items = [(time - low) / spread if spread else 0.0 for time in times]
    ends = [len(items) // blocks * (block + 1) for block in range(blocks - 1)] + [len(items)]

    def size(block: int) -> float:
        return sum(items[ends[block - 1] if block else 0 : ends[block]])

    sizes = [size(block) for block in range(blocks)]
    while True:
        largest = max(range(blocks), key=lambda block: (sizes[block], block))
        most = sizes[largest]
        giver = -1
        while giver != largest:
            # The nearest of several: the neighbour on that side is larger, so it has an item.
            smallest = min(range(blocks), key=lambda block: (sizes[block], abs(block - largest)))
            if most <= sizes[smallest] + 1:
                return ends
            if largest < smallest:
                giver = smallest - 1
                ends[giver] -= 1
            else:
                giver = smallest + 1
                ends[smallest] += 1
            sizes[giver], sizes[smallest] = size(giver), size(smallest)
