"""Whether a tensor may have other strides, as who reads it gives the same all the same."""

from __future__ import annotations

from collections.abc import Collection

from gpipe_compiler.ir import Graph, Op, called
from gpipe_compiler.passes.effects import Effects

VIEWS = frozenset({"transpose", "permute", "unsqueeze", "expand", "getitem", "size", "getattr"})
"""Functions and methods that take any strides and hand them on."""

_OWN_STRIDES = frozenset({"scaled_dot_product_attention", "matmul"})
"""Functions whose results have strides of their own."""


def takes_any_strides(
    graph: Graph, found: Effects, name: str, besides: Collection[str] = ()
) -> bool:
    """Whether all who read a tensor give the same whatever its strides are.

    Args:
        besides: functions and methods that hand strides on, as views do; with such, also the model
            may return what has others.
    """
    if name in graph.ends and not besides:
        return False
    return all(_gives_same(graph, found, op, besides) for op in graph.consumers.get(name, ()))


def _gives_same(graph: Graph, found: Effects, op: Op, besides: Collection[str]) -> bool:
    does = called(op.call)
    if does in _OWN_STRIDES:
        return True
    if does in ("contiguous", "reshape"):
        # A copy or the tensor itself, as its strides are: a write would reach others or not.
        shared = {name for output in op.outputs for name in found.alias_set(output)}
        if not shared.isdisjoint(found.written_values):
            return False
    elif does not in VIEWS and does not in besides:
        return False
    return does == "contiguous" or all(
        takes_any_strides(graph, found, name, besides) for name in op.outputs
    )
