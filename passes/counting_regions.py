"""Writes out what a loss counts under `torch.no_grad()`, so that what it is divided by is seen.

Nothing of a block is left but its ops, and a `detach` of what it gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, Op, Ref, RegionCall
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.ops import NoGrad, with_arguments
from gpipe_compiler.passes.split_loss import writes


def without_counting_regions(graph: Graph) -> Graph:
    """The graph, its loss without blocks that switch off gradients and write nothing in place.

    Args:
        graph: annotated; the result is not, where it is another one.
    """
    found = {op.name for op in graph.ops if op.name in graph.loss_only and _is_plain(graph, op)}
    if graph.loss is None or not found:
        return graph
    ops = [part for op in graph.ops for part in (_inside(op) if op.name in found else (op,))]
    made = graph.replace(ops=tuple(ops), values={})
    first = next(place for place, op in enumerate(graph.ops) if op.name in found)
    stay = all(stretch.end <= first for stretch in graph.repeats)
    return dataclasses.replace(made, repeats=graph.repeats) if stay else made


def _is_plain(graph: Graph, op: Op) -> bool:
    """Whether a block only computes on what it is given."""
    call = op.call
    if not isinstance(call, RegionCall) or call.context != NoGrad():
        return False
    return isinstance(op.result, tuple) and not any(
        not isinstance(inner.call, FunctionCall | MethodCall)
        or writes(inner)
        or "out" in inner.call.kwargs
        or any(True for _ in inner.states(graph.modules))
        for inner in call.body.ops
    )


def _inside(op: Op) -> Iterator[Op]:
    assert isinstance(op.call, RegionCall)
    assert isinstance(op.result, tuple)
    body = op.call.body
    given = dict(zip(body.inputs, op.call.args, strict=True))

    def outer(leaf: object) -> object:
        return given.get(leaf.name, leaf) if isinstance(leaf, Ref) else leaf

    for inner in body.ops:
        call = with_arguments(inner.call, lambda argument: map_argument(outer, argument))
        yield dataclasses.replace(inner, call=call, module=op.module, mode=op.mode)
    for name, made in zip(op.result, body.outputs, strict=True):
        if isinstance(name, str):
            yield dataclasses.replace(
                op, name=name, result=name, call=MethodCall("detach", (outer(made),))
            )
