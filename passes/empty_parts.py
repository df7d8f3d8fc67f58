"""Drops from concatenations the parts that have no elements, such as the caches of decoders.

What is left of `torch.cat([torch.tensor([], dtype=t), x])` is x, or `x.to(t)`: the type of the
empty part counts in that of the result. The result is then no copy, so nobody may write to either.
It is not contiguous where x is not: `x.contiguous()` stands there, unless whoever reads it takes
any strides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch

from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    ValueKind,
    called,
)
from gpipe_compiler.ir.ops import reading
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.simplify import VIEWS, takes_any_strides, without_idle
from gpipe_compiler.passes.verbs import origin

_SAME_TYPE = VIEWS | {"view", "reshape", "split", "chunk", "unbind", "contiguous", "squeeze"}


def without_empty_parts(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph without empty parts of concatenations, not annotated; itself without any."""
    if not any(op for op in graph.ops if _is_empty(op)):
        return graph
    found = effects(graph)
    changed: dict[str, Op | None] = {}
    names: dict[str, str] = {}  # what is read instead of the result of an op
    for op in (op for op in graph.ops if op.name not in kept):
        for source, call in _left(graph, found, op):
            if call is not None:
                changed[op.name] = dataclasses.replace(op, call=call)
            else:
                changed[op.name] = None
                names[op.outputs[0]] = source
    if not changed:
        return graph
    ops = [changed.get(op.name, op) for op in graph.ops]

    def is_idle(op: Op) -> bool:
        return op.name not in kept and _is_free(graph, op)

    read = [reading(op, names) for op in ops if op]
    return graph.replace(ops=without_idle(graph, read, is_idle), values={})


def _is_empty(op: Op) -> bool:
    """Whether an op is `torch.tensor([])`, or `torch.empty(0)`."""
    call = op.call
    return isinstance(call, FunctionCall) and (
        (call.function is torch.tensor and list(call.args) == [[]])
        or (call.function is torch.empty and list(call.args) in ([0], [[0]], [(0,)]))
    )


def _is_free(graph: Graph, op: Op) -> bool:
    """Whether an op does nothing but make an empty tensor, or something that is no tensor."""
    return _is_empty(op) or all(graph.values[n].kind is not ValueKind.TENSOR for n in op.outputs)


def _left(graph: Graph, found: Effects, op: Op) -> Iterator[tuple[str, MethodCall | None]]:
    """The part of a concatenation that alone has elements, and what is left to do with it."""
    call = op.call
    if not isinstance(call, FunctionCall) or call.function is not torch.cat or not call.args:
        return
    parts = call.args[0]
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Ref) for part in parts):
        return
    makers = {part.name: graph.producer.get(part.name) for part in parts if isinstance(part, Ref)}
    empty = {name: maker for name, maker in makers.items() if maker and _is_empty(maker)}
    full = [name for name in makers if name not in empty]
    if not empty or len(full) != 1 or len(parts) != len(makers) or len(op.outputs) != 1:
        return
    (result,) = op.outputs
    types = [_asked_type(graph, maker) for maker in empty.values()]
    if not _can_be_one(graph, found, full[0], result):
        return
    any_strides = takes_any_strides(graph, found, result)
    if all(isinstance(item, str) and _same_type(graph, item, full[0]) for item in types):
        if any_strides or not _is_written_as_copy(graph, found, result):
            yield full[0], None if any_strides else MethodCall("contiguous", (Ref(full[0]),))
    elif any_strides and types == [graph.values[result].dtype]:
        yield full[0], MethodCall("to", (Ref(full[0]), graph.values[result].dtype))


def _is_written_as_copy(graph: Graph, found: Effects, name: str) -> bool:
    """Whether something is written that, as the strides of a value are, is a copy or its memory."""
    return any(
        any(
            _is_written_as_copy(graph, found, output)
            or (does != "view" and not found.alias_set(output).isdisjoint(found.written_values))
            for output in op.outputs
        )
        for op in graph.consumers.get(name, ())
        if (does := called(op.call)) in _SAME_TYPE
    )


def _asked_type(graph: Graph, maker: Op) -> torch.dtype | str | None:
    """The type of an empty tensor, or the value whose type it takes; None where it has none."""
    asked = maker.call.kwargs.get("dtype") if isinstance(maker.call, FunctionCall) else None
    if not isinstance(asked, Ref):
        return asked if isinstance(asked, torch.dtype) else None
    reader = graph.producer.get(asked.name)
    if (
        reader is None
        or called(reader.call) != "getattr"
        or not isinstance(reader.call, FunctionCall)
    ):
        return None
    source = reader.call.args[0]
    return source.name if isinstance(source, Ref) else None


def _same_type(graph: Graph, left: str, right: str) -> bool:
    """Whether two values have one type in every precision: parts of one, or of like modules."""
    if graph.values[left].dtype != graph.values[right].dtype:
        return False
    first, second = (graph.producer.get(_origin(graph, name)) for name in (left, right))
    if first is None or second is None:
        return left == right
    modules = [op.call.module for op in (first, second) if isinstance(op.call, ModuleCall)]
    kinds = {graph.modules[path].cls for path in modules}
    return first is second or (len(modules) == 2 and kinds == {torch.nn.Linear})


def _origin(graph: Graph, name: str) -> str:
    """The value that a value is a view of, through ops that keep its type."""
    return origin(graph, name, lambda op: called(op.call) in _SAME_TYPE)


def _can_be_one(graph: Graph, found: Effects, source: str, result: str) -> bool:
    """Whether a copy of a value may be the value itself."""
    if source in graph.ends or not found.unwritten(source, result):
        return False
    others = [op for op in graph.consumers.get(source, ()) if result not in op.outputs]
    # With three summands of a gradient, others would be added up first.
    return all(_is_free(graph, op) for op in others)
