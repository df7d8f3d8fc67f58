"""Writes masks of attention as attention broadcasts them, and without what holds everywhere.

A traced model expands its mask to the batch before it adds a learned bias to it, and so holds both
for every sample. Attention broadcasts a mask of one sample: where only elementwise ops stand
between the expansion and attention, and nobody else reads them, the mask is expanded to one.

Hugging Face's models make the mask of padded batches of index arithmetic: a condition on positions
that is always true, and `mask[rows, columns]` with all rows and columns. What is left of it is
`mask[:, None, None]`: attention broadcasts it to the queries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch
from torch.nn import functional as F

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    MethodCall,
    Mode,
    Op,
    Ref,
    StateRef,
    Value,
    ValueKind,
    called,
)
from gpipe_compiler.ir.ops import reading
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.positions.coordinates import Cases, UnknownError
from gpipe_compiler.passes.positions.known import Positions
from gpipe_compiler.passes.simplify import takes_any_strides, without_idle
from gpipe_compiler.passes.verbs import AND, NOT, OR

_BROADCASTING = AND | OR | NOT | frozenset({
    *("where", "masked_fill", "add", "sub", "mul", "neg", "contiguous", "clone", "to", "float"),
    *("bool", "type"),
})  # fmt: skip
"""Functions and methods that broadcast their operands, sample by sample."""


def narrow_masks(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph with masks of one sample that are expanded; the very same where there are none."""
    if not any(map(is_attention, graph.ops)):
        return graph
    narrow = _narrow(graph, kept)
    ops = tuple(
        _of_one(op) if _is_expansion(op) and op.result in narrow else op for op in graph.ops
    )
    return graph.replace(ops=ops, values={}) if narrow else graph


def _narrow(graph: Graph, kept: Collection[str]) -> set[str]:
    """The values that can be of one sample: the largest set that agrees with itself."""
    found = effects(graph)
    narrow = {
        op.result
        for op in graph.ops
        if isinstance(op.result, str) and op.result not in graph.ends and op.name not in kept
        if _could_be(graph, found, op, op.result)
    }
    while True:
        wrong = {name for name in narrow if not _agrees(graph, narrow, name)}
        if not wrong:
            return narrow
        narrow -= wrong


def _could_be(graph: Graph, found: Effects, op: Op, result: str) -> bool:
    """Whether an op by itself, all its operands being of one sample, makes one sample."""
    value = graph.values[result]
    return (
        value.kind is ValueKind.TENSOR
        and value.batch_dim == 0
        and op.mode is Mode.ALWAYS
        and isinstance(op.call, FunctionCall | MethodCall)
        and (_is_expansion(op) or called(op.call) in _BROADCASTING)
        and "out" not in op.call.kwargs
        and found.alias_set(result).isdisjoint(found.written_values)
    )


def _agrees(graph: Graph, narrow: Collection[str], name: str) -> bool:
    """Whether what makes a value and all that read it allow it to be of one sample."""
    op, rank = graph.producer[name], len(graph.values[name].shape)
    readers = graph.consumers.get(name, ())
    made = all(
        _is_of_one(graph, item, rank) or (isinstance(item, Ref) and item.name in narrow)
        for item in _tensors(graph, op)
    )
    return (
        made
        and bool(readers)
        and all(
            _is_mask(graph, reader, name) or (reader.result in narrow and not _is_expansion(reader))
            for reader in readers
        )
    )


def _tensors(graph: Graph, op: Op) -> Iterator[Ref | StateRef]:
    for item in op.leaves:
        is_number = isinstance(item, Ref) and graph.values[item.name].kind is ValueKind.SCALAR
        if isinstance(item, Ref | StateRef) and not is_number:
            yield item


def _is_of_one(graph: Graph, item: Ref | StateRef, rank: int) -> bool:
    """Whether an operand is the same for all samples of a result with this number of dimensions."""
    if isinstance(item, Ref) and graph.values[item.name].batch_dim is not None:
        return False
    described = graph.values[item.name] if isinstance(item, Ref) else graph.state[item.name]
    return len(described.shape) < rank or described.shape[0] == 1


def is_attention(op: Op) -> bool:
    call = op.call
    return isinstance(call, FunctionCall) and call.function is F.scaled_dot_product_attention


def _is_mask(graph: Graph, op: Op, name: str) -> bool:
    """Whether an op is attention under this mask, with as many dimensions as the query."""
    call = op.call
    if not isinstance(call, FunctionCall) or not is_attention(op) or len(call.args) != 3:
        return False
    operands = [item.name for item in call.args if isinstance(item, Ref)]
    if len(operands) != 3 or name in operands or call.kwargs.get("attn_mask") != Ref(name):
        return False
    rank = len(graph.values[name].shape)
    return rank > 2 and all(
        graph.values[operand].batch_dim == 0 and len(graph.values[operand].shape) == rank
        for operand in operands
    )


def _is_expansion(op: Op) -> bool:
    call = op.call
    return isinstance(call, MethodCall) and call.method == "expand" and not call.kwargs


def _of_one(op: Op) -> Op:
    call = op.call
    assert isinstance(call, MethodCall)
    source, *sizes = call.args
    given: tuple[Argument, ...]
    if isinstance(sizes[0], tuple | list):
        given = (source, (1, *sizes[0][1:]))
    else:
        given = (source, 1, *sizes[1:])
    return dataclasses.replace(op, call=MethodCall("expand", given))


_OF_MASKS = (
    AND
    | OR
    | NOT
    | {
        *("where", "masked_fill", "to", "float", "bool", "type", "type_as"),
        *("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "rsub", "mul", "neg"),
    }
)
"""What is made of masks, whose results have the strides of what they are made of."""


def simplify_padding_masks(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph with masks without such conditions, not annotated; itself where there are none."""
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
    return graph.replace(ops=without_idle(graph, ops, is_idle), values={})


def _left(graph: Graph, found: Effects, positions: Positions, op: Op) -> Iterator[str]:
    """The operand of a conjunction whose other operand holds everywhere."""
    call = op.call
    if called(call) not in AND or not isinstance(call, FunctionCall | MethodCall):
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
    return found.unwritten(source, result) and takes_any_strides(graph, found, result, _OF_MASKS)
