"""Makes masks of attention once for all samples, where every sample has the same.

A traced model expands its mask to the batch before it adds a learned bias to it, and so holds both
for every sample. Attention broadcasts a mask of one sample: where only elementwise ops stand
between the expansion and attention, and nobody else reads them, the mask is expanded to one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

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
    ValueKind,
    called,
)
from gpipe_compiler.passes.effects import Effects, effects

_ELEMENTWISE = frozenset({
    *("where", "masked_fill", "add", "sub", "mul", "neg", "contiguous", "clone", "to", "float"),
    *("and_", "or_", "invert", "logical_and", "logical_or", "logical_not", "bool", "type"),
})  # fmt: skip
"""Functions and methods that broadcast their operands, sample by sample."""


def narrow_masks(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph with such masks of one sample; the very same where there are none.

    Args:
        graph: annotated.
        kept: names of ops that are to stay.
    """
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
        and (_is_expansion(op) or called(op.call) in _ELEMENTWISE)
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
    """The operands that are no numbers."""
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
    """Whether an op is torch's attention."""
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
    """An expansion to one sample."""
    call = op.call
    assert isinstance(call, MethodCall)
    source, *sizes = call.args
    given: tuple[Argument, ...]
    if isinstance(sizes[0], tuple | list):
        given = (source, (1, *sizes[0][1:]))
    else:
        given = (source, 1, *sizes[1:])
    return dataclasses.replace(op, call=MethodCall("expand", given))
