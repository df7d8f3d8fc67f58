"""Counts the random aten ops that each op runs.

The runtime seeds every random op by its number in the whole model, so that masks do not depend on
where the model is cut; these counts are where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.blocks import per_op, shortest
from gpipe_compiler.passes.dry_run import DryRun
from gpipe_compiler.passes.watch import DispatchWatch


def random_ops(graph: Graph) -> Mapping[str, int]:
    """How many random aten ops one forward runs, by op; ops that run none are left out.

    Random means tagged `nondeterministic_seeded` by torch, seen below autograd as on the host:
    what the runtime's own dispatch mode sees there. The forward is that of training when the
    graph has a loss, of inference otherwise.

    Raises:
        ModelError: naming the op that cannot run.
    """
    run = DryRun.of(shortest(graph), training=graph.loss is not None)
    counter = RandomCounter()
    counts: dict[str, int] = {}

    def observer(op: Op, execute: Callable[[], Any]) -> Any:
        before = counter.count
        with counter:
            returned = execute()
        if counter.count > before:
            counts[op.name] = counter.count - before
        return returned

    run.run(graph.batch_size, observer)
    return per_op(graph, counts)


def random_in_eval(graph: Graph) -> Mapping[str, int]:
    """How many one forward in eval mode runs, by op; ops that run none are left out.

    Raises:
        ModelError: naming the op that cannot run.
    """
    return random_ops(graph if graph.loss is None else graph.replace(loss=None))


def first_numbers(graph: Graph, counts: Mapping[str, int]) -> Mapping[str, int]:
    """The number in the whole model of the first random aten op of each op.

    Args:
        counts: as `random_ops` gives them.
    """
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
        counts: how many each runs.
    """
    return tuple(first[op.name] + index for op in ops for index in range(counts.get(op.name, 0)))


class RandomCounter(DispatchWatch):
    """Counts the random aten ops that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Counts the op when torch tags it as drawing from the generator."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.count += 1
