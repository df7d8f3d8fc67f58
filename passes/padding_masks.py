"""Writes masks of attention without the conditions that hold everywhere.

Hugging Face's models make the mask of padded batches of index arithmetic: a condition on positions
that is always true, and `mask[rows, columns]` with all rows and columns. What is left of it is
`mask[:, None, None]`: attention broadcasts it to the queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch

from gpipe_compiler.ir import Argument, FunctionCall, Graph, MethodCall, Op, Ref, Value, called
from gpipe_compiler.ir.ops import reading
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.narrow_masks import is_attention
from gpipe_compiler.passes.positions import Cases, Positions
from gpipe_compiler.passes.positions.coordinates import UnknownError
from gpipe_compiler.passes.simplify import without_unread
from gpipe_compiler.passes.strides import takes_any_strides

_AND = frozenset({"and_", "logical_and", "bitwise_and", "__and__"})

_ELEMENTWISE = _AND | {
    *("or_", "logical_or", "bitwise_or", "__or__", "invert", "logical_not", "bitwise_not"),
    *("where", "masked_fill", "to", "float", "bool", "type", "type_as"),
    *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "rsub", "mul", "neg"),
}
"""What is made of masks, whose results have the strides of what they are made of."""


def simplify_padding_masks(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph with such masks, not annotated; itself where there are none.

    Args:
        graph: annotated.
        kept: names of ops that are to stay.
    """
    if not any(map(is_attention, graph.ops)):
        return graph
    found = effects(graph)
    positions = Positions(graph, found)
    names: dict[str, str] = {}  # what is read instead of the result of an op
    views: dict[str, Op] = {}
    for op in (op for op in graph.ops if op.name not in kept):
        for mask in (*_left(graph, found, positions, op), *_expanded(graph, found, op)):
            names[op.outputs[0]] = names.get(mask, mask)
        for view in _whole(graph, found, positions, op):
            views[op.name] = view
    if not names and not views:
        return graph
    left = (views.get(op.name, op) for op in graph.ops if names.keys().isdisjoint(op.outputs))

    def is_idle(op: Op) -> bool:
        return op.name not in kept and all(name in positions for name in op.outputs)

    ops = [reading(op, names) for op in left]
    return graph.replace(ops=without_unread(graph, ops, is_idle), values={})


def _left(graph: Graph, found: Effects, positions: Positions, op: Op) -> Iterator[str]:
    """The operand of a conjunction whose other operand holds everywhere."""
    call = op.call
    if called(call) not in _AND or not isinstance(call, FunctionCall | MethodCall):
        return
    if len(call.args) != 2 or call.kwargs or len(op.outputs) != 1:
        return
    result = graph.values[op.outputs[0]]
    if result.name in graph.ends:
        return
    for mask, other in (call.args, call.args[::-1]):
        if not isinstance(mask, Ref) or positions.element(other) is not True:
            continue
        value = graph.values[mask.name]
        if not value.dtype is result.dtype is torch.bool:
            continue
        same = (value.dims, value.batch_dim) == (result.dims, result.batch_dim)
        fits = same or (len(value.shape) == len(result.shape) and _only_masks(graph, result.name))
        if fits and _can_be_one(graph, found, mask.name, result.name):
            yield mask.name
            return


def _expanded(graph: Graph, found: Effects, op: Op) -> Iterator[str]:
    """The mask that is expanded for attention alone, which does that itself."""
    call = op.call
    if isinstance(call, MethodCall) and call.method == "expand" and len(op.outputs) == 1:
        mask, result = call.args[0], graph.values[op.outputs[0]]
        if isinstance(mask, Ref) and not result.requires_grad:
            value = graph.values[mask.name]
            alike = len(value.shape) == len(result.shape) and value.dims[-1:] == result.dims[-1:]
            fits = alike and _only_masks(graph, result.name)
            if fits and _can_be_one(graph, found, mask.name, result.name):
                yield mask.name


def _only_masks(graph: Graph, name: str) -> bool:
    """Whether a value is only read as a mask of attention, which is broadcast."""
    if name in graph.ends:
        return False
    for op in graph.consumers.get(name, ()):
        if is_attention(op) and op.call.kwargs.get("attn_mask") == Ref(name):
            continue
        expands = isinstance(op.call, MethodCall) and op.call.method == "expand"
        if not expands or not all(_only_masks(graph, made) for made in op.outputs):
            return False
    return True


def _whole(graph: Graph, found: Effects, positions: Positions, op: Op) -> Iterator[Op]:
    """The op that indexes a tensor by all its rows and columns, as a view of it."""
    call = op.call
    if called(call) != "getitem" or not isinstance(call, FunctionCall) or len(op.outputs) != 1:
        return
    source, index = call.args
    if not isinstance(source, Ref) or not isinstance(index, tuple):
        return
    before, after = graph.values[source.name], graph.values[op.outputs[0]]
    if before.requires_grad or len(index) != len(before.shape):
        return
    dims = [_coordinate(positions, item) for item in index]
    rank = len(after.shape)
    first = [rank - len(graph.values[i.name].shape) for i in index if isinstance(i, Ref)]
    if None in dims or len(first) != len(index):
        return
    places = [start + dim for start, dim in zip(first, dims, strict=True) if dim is not None]
    if _keeps_all(before, after, places) and _can_be_one(graph, found, source.name, after.name):
        parts = tuple(slice(None) if dim in places else None for dim in range(rank))
        yield dataclasses.replace(op, call=dataclasses.replace(call, args=(source, parts)))


def _coordinate(positions: Positions, item: Argument) -> int | None:
    """The dimension whose coordinate an index is; None where it is anything else."""
    element = positions.element(item)
    if not isinstance(element, Cases):
        return None
    try:
        affine = element.only
    except UnknownError:
        return None
    along = [dim for dim, weight in enumerate(affine.weights) if weight]
    plain = affine.offset == 0 and len(along) == 1 and affine.weights[along[0]] == 1
    return along[0] if plain else None


def _keeps_all(before: Value, after: Value, places: list[int]) -> bool:
    """Whether every dimension stands whole at its place, at any batch size; all others are 1."""
    if places != sorted(set(places)):
        return False
    sizes = dict(zip(places, before.dims, strict=True))
    own = None if before.batch_dim is None else places[before.batch_dim]
    return after.batch_dim == own and all(
        size == sizes.get(dim, 1) for dim, size in enumerate(after.dims)
    )


def _can_be_one(graph: Graph, found: Effects, source: str, result: str) -> bool:
    """Whether the two can share memory: nobody writes into either, nor asks for its strides."""
    return found.unwritten(source, result) and takes_any_strides(graph, found, result, _ELEMENTWISE)
