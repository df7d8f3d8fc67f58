"""Calls attention without a mask where positions alone make it, which lets torch run flash kernels.

A model that is called without padding often passes no mask, and is traced with one of index
arithmetic. Where that is the causal mask at any length that the graph allows, or masks nothing, it
goes; and heads of keys and values that were only repeated for the query heads are left to
`enable_gqa`. A mask that comes from an input or from state that is loaded stays, and so does one
that depends on more than which of query and key is later, such as a window that is narrower than
the sequence. Dropout stays as it is.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection

import torch
from torch.nn import functional as F

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    MethodCall,
    Op,
    Ref,
    StateRef,
    Value,
    called,
)
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.positions.coordinates import (
    Cases,
    Condition,
    Element,
    distances,
    is_causal,
    some,
)
from gpipe_compiler.passes.positions.known import Positions
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.simplify import without_idle
from gpipe_compiler.runtime.sizes import Shape

_WIDEST_HEAD = 256
"""Of keys and values, for which the kernels for groups of query heads are written."""

_WHOLE = slice(None)


def call_attention_plainly(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph with no mask where `is_causal` or nothing says the same; itself if there is none.

    Args:
        graph: annotated; so is the result.
    """
    masked = [op for op in graph.ops if _mask_of(op) is not None]
    if not masked:
        return graph
    found = effects(graph)
    positions = Positions(graph, found)
    changed = {}
    for op in masked:
        if op.name not in kept:
            change = _plain(graph, positions, op)
            if change is not None:
                changed[op.name] = change
    if not changed:
        return graph

    def is_idle(op: Op) -> bool:
        if op.name in kept or op.name in found.writes or op.name in found.state_writes:
            return False
        known = all(name in positions for name in op.outputs)
        return known or _repeats_heads(op) or called(op.call) in ("size", "getattr")

    ops = [changed.get(op.name, op) for op in graph.ops]
    simple = graph.replace(ops=without_idle(graph, ops, is_idle), values={})
    try:
        return annotate(simple, graph.batch_size, graph.precision)
    except ModelError:  # what follows may need the strides that the other kernel gives
        return graph


def _mask_of(op: Op) -> Argument:
    call = op.call
    if not isinstance(call, FunctionCall) or call.function is not F.scaled_dot_product_attention:
        return None
    mask = call.kwargs.get("attn_mask")
    if len(call.args) != 3 or "is_causal" in call.kwargs or call.kwargs.get("enable_gqa"):
        return None
    refs = all(isinstance(item, Ref) for item in call.args)
    return mask if refs and isinstance(mask, Ref | StateRef) else None


def _plain(graph: Graph, positions: Positions, op: Op) -> Op | None:
    """The call without its mask; None where the mask is needed, or not understood."""
    call, mask = op.call, _mask_of(op)
    assert isinstance(call, FunctionCall)
    query, key, value = (graph.values[item.name] for item in call.args)
    described = graph.values[mask.name] if isinstance(mask, Ref) else graph.state[mask.name]
    shape = described.dims if isinstance(described, Value) else described.shape
    if described.requires_grad or not _fits(graph, op, shape, (query, key, value)):
        return None
    element = positions.element(mask)
    allowed = None if element is None else _allowed(element, described.dtype)
    kwargs = {name: item for name, item in call.kwargs.items() if name != "attn_mask"}
    if allowed is None:
        return None
    if allowed is not True:
        length = query.dims[-2]
        if not shape[-2:] == (length, key.dims[-2]) == (length, length):
            return None
        fixed = all(item.batch_dim != len(item.shape) - 2 for item in (query, key))
        known = length if fixed and isinstance(length, int) else None
        held = distances(allowed, len(shape), known)
        if is_causal(held):
            kwargs["is_causal"] = True
        elif not (held and all(held.values())):
            return None
    args = tuple(call.args)
    sources = [_repeated(graph, item.name) for item in args[1:]]
    (one, times), (other, times_too) = sources
    if times > 1 and times == times_too and key.shape[-1] == value.shape[-1] <= _WIDEST_HEAD:
        args, kwargs["enable_gqa"] = (args[0], Ref(one), Ref(other)), True
    return dataclasses.replace(op, call=FunctionCall(call.function, args, kwargs))


def _fits(graph: Graph, op: Op, mask: Shape, operands: tuple[Value, Value, Value]) -> bool:
    """Whether all are of the usual shapes, and the mask makes the result no larger."""
    query, key, value = operands
    if len(op.outputs) != 1 or len(mask) < 2 or len(query.shape) < 2:
        return False
    result = graph.values[op.outputs[0]]
    return (
        result.dims == (*query.dims[:-1], value.dims[-1])
        and result.batch_dim == query.batch_dim
        and query.dims[:-2] == key.dims[:-2] == value.dims[:-2]
    )


def _allowed(element: Element, dtype: torch.dtype | None) -> Condition | None:
    """Where a query sees a key: where a mask is true, or adds 0 and not the least number."""
    if not isinstance(element, Cases):
        return element
    if dtype is None or not dtype.is_floating_point:
        return None
    least = torch.finfo(dtype).min
    if all(affine.offset == 0 or affine.offset <= least for _, affine in element.cases):
        return some(*(when for when, affine in element.cases if affine.offset == 0))
    return None


def _maker(graph: Graph, name: str, *calls: str) -> Op | None:
    """The op that makes a value from another one, by one of some calls."""
    op = graph.producer.get(name)
    if op is None or op.result != name or called(op.call) not in calls:
        return None
    return op if op.call.args and isinstance(op.call.args[0], Ref) else None


def _repeated(graph: Graph, name: str) -> tuple[str, int]:
    """The value whose heads, dimension 1 of 4, are repeated one by one; and how often, 1 if not."""
    result = graph.values[name]
    last = _maker(graph, name, "reshape", "view", "repeat_interleave")
    if last is None or len(result.shape) != 4 or result.batch_dim not in (None, 0):
        return name, 1
    base = last.call.args[0].name
    if not _interleaves(last):
        wide = _maker(graph, base, "expand")
        thin = wide and _maker(graph, wide.call.args[0].name, "unsqueeze", "getitem")
        if thin is None or not _adds_dimension(thin):
            return name, 1
        batch, heads, times, *rest = graph.values[base].dims
        base = thin.call.args[0].name
        if len(rest) != 2 or (batch, heads * times, *rest) != result.dims:
            return name, 1
    before = graph.values[base]
    heads = before.shape[1] if len(before.shape) == 4 else 0
    times = result.shape[1] // heads if heads else 1
    same = (result.dims[0], heads, *result.dims[2:]) == before.dims
    same &= before.requires_grad is result.requires_grad
    if not same or heads * times != result.shape[1] or before.batch_dim != result.batch_dim:
        return name, 1
    return base, times


def _interleaves(op: Op) -> bool:
    """Whether an op repeats each of the heads in place."""
    call = op.call
    if called(call) != "repeat_interleave" or not isinstance(call, FunctionCall | MethodCall):
        return False
    names = ("self", "repeats", "dim")
    given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return type(given.get("repeats")) is int and given.get("dim") in (1, -3)


def _adds_dimension(op: Op) -> bool:
    """Whether an op makes (batch, heads, 1, length, width) of four dimensions."""
    call = op.call
    if isinstance(call, MethodCall | FunctionCall) and called(call) == "unsqueeze":
        return call.args[1:] in ((2,), (-3,))
    if not isinstance(call, FunctionCall) or call.function is not operator.getitem:
        return False
    index = call.args[1]
    return isinstance(index, tuple) and (
        index[:3] == (_WHOLE, _WHOLE, None) and all(entry == _WHOLE for entry in index[3:])
    )


def _repeats_heads(op: Op) -> bool:
    return (
        _interleaves(op)
        or called(op.call) in ("reshape", "view", "expand", "unsqueeze")
        or (_adds_dimension(op))
    )
