"""Counts the random aten ops that each op runs.

The runtime seeds every random op by its number in the whole model, so that masks do not depend on
where the model is cut; these counts are where the numbers come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.observe import observed


def random_ops(graph: Graph, *, training: bool | None = None) -> Mapping[str, int]:
    """How many random aten ops one forward runs, by op; ops that run none are left out.

    Random is what draws with the arguments it is called with, seen below autograd as on the host:
    the runtime's own dispatch mode sees the same there and goes by the same rule.

    Args:
        training: whether the forward is that of training; by default where the graph has a loss.
    """
    ops = observed(graph, training=training).ops
    return {name: len(op.drawn) for name, op in ops.items() if op.drawn}


def shared_draws(graph: Graph, *, training: bool | None = None) -> Mapping[str, tuple[bool, ...]]:
    """For the random aten ops of each op in turn, whether what they draw has no batch dimension.

    Such as noise for a weight, or a number that decides for a whole batch: it is drawn once for all
    micro-batches. Runs at the graph's batch size and at twice that.
    """
    ops = observed(graph, training=training).ops
    once = {name: op.drawn for name, op in ops.items() if op.drawn}
    if not once:
        return {}
    twice = observed(graph, 2 * graph.batch_size, training=training).ops
    return {
        name: tuple(
            few == more
            for few, more in itertools.zip_longest(shapes, twice[name].drawn[: len(shapes)])
        )
        for name, shapes in once.items()
    }


def first_numbers(graph: Graph, counts: Mapping[str, int]) -> Mapping[str, int]:
    """The number in the whole model of the first random aten op of each op."""
    numbers: dict[str, int] = {}
    count = 0
    for op in graph.ops:
        numbers[op.name] = count
        count += counts.get(op.name, 0)
    return numbers


def numbers_of(
    ops: Iterable[Op], first: Mapping[str, int], counts: Mapping[str, int]
) -> tuple[int, ...]:
    """The numbers, in the whole model, of the random aten ops that these ops run.

    Args:
        first: of each op's own.
    """
    return tuple(first[op.name] + index for op in ops for index in range(counts.get(op.name, 0)))
