"""The last steps of lowering: tuples unpacked, sizes tidied, names given."""

from __future__ import annotations

import builtins
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from gpipe_compiler.frontend.naming import rename
from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    Graph,
    MethodCall,
    Op,
    Ref,
    RegionBody,
    RegionCall,
    Result,
)
from gpipe_compiler.ir.arguments import map_argument, value_names
from gpipe_compiler.ir.ops import with_arguments


def simplify_graph(graph: Graph) -> Graph:
    """The graph as every frontend hands it out."""
    loss = graph.loss
    ends = (graph.outputs, None if loss is None else Ref(loss.value))
    ops, ends = untuple(graph.ops, ends)
    outputs, loss_ref = ends
    if loss is not None:
        loss = dataclasses.replace(loss, value=loss_ref.name)
    return rename(graph.replace(ops=_bound(ops, ends), outputs=outputs, loss=loss))


def _bound(ops: Sequence[Op], ends: Argument) -> tuple[Op, ...]:
    """The ops, with names for those results alone that are read."""
    needed = set(value_names(ends))
    bound: list[Op] = []
    for op in reversed(ops):
        call = op.call
        if isinstance(call, RegionCall):
            body = dataclasses.replace(call.body, ops=_bound(call.body.ops, call.body.outputs))
            call = dataclasses.replace(call, body=body)
        bound.append(dataclasses.replace(op, call=call, result=_needed(op.result, needed)))
        needed.update(op.inputs)
    return tuple(reversed(bound))


def _needed(result: Result, needed: set[str]) -> Result:
    """A result with a name only for what is read."""
    if isinstance(result, str):
        return result if result in needed else None
    if isinstance(result, tuple):
        parts = tuple(_needed(item, needed) for item in result)
        return parts if any(part is not None for part in parts) else None
    return None


# --- no tuple is a value: results are bound by unpacking ------------------------------------------


def untuple(ops: Sequence[Op], outputs: Argument) -> tuple[tuple[Op, ...], Argument]:
    """The ops with results unpacked, and the outputs in terms of the new values."""
    tidied = list(_tidy_sizes(ops, outputs))
    untupling = _Untupling(_taken_apart(tidied))
    untupled = tuple(op for old in tidied for op in untupling.op(old))
    return untupled, untupling.substitute(outputs)


class _Untupling:
    """Goes over the ops in order and remembers what every untupled name stands for."""

    def __init__(self, apart: frozenset[str]) -> None:
        self._apart = apart
        self._stands_for: dict[str, Argument] = {}
        self._fields: dict[str, tuple[str, ...]] = {}

    def substitute(self, argument: Argument) -> Argument:
        """An argument in terms of the new values."""

        def replace(leaf: Any) -> Argument:
            return self._stands_for.get(leaf.name, leaf) if isinstance(leaf, Ref) else leaf

        return map_argument(replace, argument)

    def op(self, op: Op) -> Iterator[Op]:
        """The op anew; nothing where it only took a tuple apart."""
        if not isinstance(op.result, str):
            yield dataclasses.replace(op, call=with_arguments(op.call, self.substitute))
            return
        item = self._item(op.call)
        if item is not None:
            self._stands_for[op.result] = item[0]
            return
        call = with_arguments(op.call, self.substitute)
        if isinstance(call, RegionCall):
            call = dataclasses.replace(call, body=self._block(call.body))
            returned: Any = tuple(_TENSOR for _ in call.body.outputs)
        else:
            returned = getattr(op.origin, "meta", {}).get("val")
        if not _unpackable(returned) or (len(returned) > _MANY and op.name not in self._apart):
            yield dataclasses.replace(op, call=call)
            return
        result, stands_for = _unpack(op.result, returned)
        self._stands_for[op.result] = stands_for
        self._fields[op.result] = _field_names(returned)
        yield dataclasses.replace(op, call=call, result=result)

    def _block(self, block: RegionBody) -> RegionBody:
        ops, outputs = untuple(block.ops, block.outputs)
        return RegionBody(block.inputs, ops, outputs)

    def _item(self, call: Call) -> tuple[Argument] | None:
        """What `getitem` or a field's name takes out of an unpacked result."""
        if not isinstance(call, FunctionCall) or len(call.args) != 2:
            return None
        source, key = call.args
        whole = self.substitute(source)
        if not isinstance(source, Ref) or not isinstance(whole, tuple | list):
            return None
        if call.function is operator.getitem and isinstance(key, int):
            return (whole[key],)
        if call.function is operator.getitem and isinstance(key, slice) and not _has_refs(key):
            return (whole[key],)
        fields = self._fields.get(source.name, ())
        if call.function is builtins.getattr and key in fields:
            return (whole[fields.index(str(key))],)
        return None


_TENSOR = object()

_MANY = 8
"""So many values, and nothing that looks at one of them, stay together in a list."""


def _taken_apart(ops: Iterable[Op]) -> frozenset[str]:
    """The values of which `getitem` or a field's name takes a part."""
    return frozenset(
        op.call.args[0].name
        for op in ops
        if isinstance(op.call, FunctionCall)
        and op.call.function in (operator.getitem, builtins.getattr)
        and op.call.args
        and isinstance(op.call.args[0], Ref)
    )


def _unpackable(returned: Any) -> bool:
    """Whether a result is a tuple or list of tensors, possibly nested."""
    if not isinstance(returned, tuple | list) or isinstance(returned, torch.Size) or not returned:
        return False
    return all(
        item is None or item is _TENSOR or isinstance(item, torch.Tensor) or _unpackable(item)
        for item in returned
    )


def _unpack(name: str, returned: Any) -> tuple[Result, Argument]:
    """A result tree with names, and the argument that the whole of it stands for."""
    results: list[Result] = []
    arguments: list[Argument] = []
    for index, item in enumerate(returned):
        if item is None:
            results.append(None)
            arguments.append(None)
        elif isinstance(item, tuple | list):
            result, argument = _unpack(f"{name}.{index}", item)
            results.append(result)
            arguments.append(argument)
        else:
            results.append(f"{name}.{index}")
            arguments.append(Ref(f"{name}.{index}"))
    whole = arguments if isinstance(returned, list) else tuple(arguments)
    return tuple(results), whole


def _field_names(returned: Any) -> tuple[str, ...]:
    """The names of a named tuple's fields, torch's own kind included."""
    names: tuple[str, ...] = getattr(returned, "_fields", ())
    return names or getattr(type(returned), "__match_args__", ())


def _has_refs(argument: Argument) -> bool:
    return next(value_names(argument), None) is not None


def _is_size(call: Call) -> bool:
    """Whether a call gives all sizes of a tensor."""
    if isinstance(call, MethodCall):
        return call.method == "size" and len(call.args) == 1 and not call.kwargs
    return (
        isinstance(call, FunctionCall)
        and call.function is builtins.getattr
        and call.args[1:] == ("shape",)
    )


def _tidy_sizes(ops: Sequence[Op], outputs: Argument) -> Iterator[Op]:
    """The ops with sizes taken one by one, all of a tensor only where they are needed whole."""
    sizes = {op.name: op for op in ops if _is_size(op.call) and op.result == op.name}
    taken = {op.name: _taken_size(op.call, sizes) for op in ops}
    whole = set(value_names(outputs))
    whole.update(name for op in ops if taken[op.name] is None for name in op.inputs)
    for op in ops:
        found = taken[op.name]
        if found is not None:
            receiver = sizes[found[0]].call.args[0]
            yield dataclasses.replace(op, call=MethodCall("size", (receiver, found[1])))
        elif op.name not in sizes or op.name in whole:
            yield op


def _taken_size(call: Call, sizes: Iterable[str]) -> tuple[str, int] | None:
    """Which size a call takes out of which sizes."""
    match call:
        case FunctionCall(function=operator.getitem, args=(Ref(name=name), int() as index)):
            return (name, index) if name in sizes else None
        case _:
            return None
