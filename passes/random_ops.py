"""Counts the random aten ops that each op runs.

The runtime seeds every random op by its number in the whole model, so that masks do not depend on
where the model is cut; these counts are where the numbers come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.blocks import per_op, shortest
from gpipe_compiler.passes.dry_run import DryRun, tensors_in
from gpipe_compiler.passes.watch import DispatchWatch
from gpipe_compiler.runtime.random import draws


def random_ops(graph: Graph) -> Mapping[str, int]:
    """How many random aten ops one forward runs, by op; ops that run none are left out.

    Random is what draws with the arguments it is called with, seen below autograd as on the host:
    the runtime's own dispatch mode sees the same there and goes by the same rule. The forward is
    that of training when the graph has a loss, of inference otherwise.

    Raises:
        ModelError: naming the op that cannot run.
    """
    return {name: len(shapes) for name, shapes in _drawn(graph, graph.batch_size).items()}


def shared_draws(graph: Graph) -> Mapping[str, tuple[bool, ...]]:
    """For the random aten ops of each op in turn, whether what they draw has no batch dimension.

    Such as noise for a weight, or a number that decides for a whole batch: it is drawn once for all
    micro-batches. Runs at the graph's batch size and at twice that.

    Raises:
        ModelError: naming the op that cannot run.
    """
    once = _drawn(graph, graph.batch_size)
    twice = _drawn(graph, 2 * graph.batch_size) if once else {}
    return {
        name: tuple(
            few == more
            for few, more in itertools.zip_longest(shapes, twice.get(name, ())[: len(shapes)])
        )
        for name, shapes in once.items()
    }


def _drawn(graph: Graph, batch_size: int) -> Mapping[str, tuple[torch.Size, ...]]:
    """The shapes of what the random aten ops of each op draw."""
    return graph.once(("drawn", batch_size), lambda: _seen_drawn(graph, batch_size))


def _seen_drawn(graph: Graph, batch_size: int) -> Mapping[str, tuple[torch.Size, ...]]:
    run = DryRun.of(shortest(graph), training=graph.loss is not None)
    watch = RandomWatch()
    found: dict[str, tuple[torch.Size, ...]] = {}

    def observer(op: Op, execute: Callable[[], Any]) -> Any:
        watch.shapes = []
        with watch:
            returned = execute()
        if watch.shapes:
            found[op.name] = tuple(watch.shapes)
        return returned

    run.run(batch_size, observer)
    return per_op(graph, found)


def in_eval(graph: Graph) -> Graph:
    """The graph whose forward is that of eval mode."""
    return graph if graph.loss is None else graph.replace(loss=None)


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


class RandomWatch(DispatchWatch):
    """Notes the shapes of what the random aten ops draw that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Notes the op when it draws."""
        if draws(func, args, kwargs):
            self.shapes.append(tensors_in(returned)[0].shape)
