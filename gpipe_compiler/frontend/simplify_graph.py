"""The last steps of lowering: tuples unpacked, names given."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpipe_compiler.frontend.naming import rename
from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    Graph,
    Op,
    Ref,
    RegionBody,
    RegionCall,
    Result,
)
from gpipe_compiler.ir.arguments import map_argument, value_names
from gpipe_compiler.ir.ops import with_arguments


def simplify_graph(graph: Graph) -> Graph:
    """The graph without tuples, and with its own names."""
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
    untupling = _Untupling()
    untupled = tuple(op for old in ops for op in untupling.op(old))
    return untupled, untupling.substitute(outputs)


class _Untupling:
    """Goes over the ops in order and remembers what every untupled name stands for."""

    def __init__(self) -> None:
        self._stands_for: dict[str, Argument] = {}

    def substitute(self, argument: Argument) -> Argument:
        def replace(leaf: Any) -> Argument:
            return self._stands_for.get(leaf.name, leaf) if isinstance(leaf, Ref) else leaf

        return map_argument(replace, argument)

    def op(self, op: Op) -> Iterator[Op]:
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
        if not _unpackable(returned):
            yield dataclasses.replace(op, call=call)
            return
        result, stands_for = _unpack(op.result, returned)
        self._stands_for[op.result] = stands_for
        yield dataclasses.replace(op, call=call, result=result)

    def _block(self, block: RegionBody) -> RegionBody:
        ops, outputs = untuple(block.ops, block.outputs)
        return RegionBody(block.inputs, ops, outputs)

    def _item(self, call: Call) -> tuple[Argument] | None:
        """What `getitem` takes out of an unpacked result."""
        match call:
            case FunctionCall(function=operator.getitem, args=(Ref() as source, int() as key)):
                whole = self.substitute(source)
                return (whole[key],) if isinstance(whole, tuple | list) else None
        return None


_TENSOR = object()


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
