"""Names for the values of a graph: readable, valid in emitted code, unique."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import keyword
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    Result,
    called,
)
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.ops import map_result, with_arguments
from gpipe_compiler.ir.own_functions import OwnFunction

_TAKEN = frozenset(
    {
        *(name for name in dir(builtins) if name != "input"),  # as torch's own layers call it
        *keyword.kwlist,
        *keyword.softkwlist,
        *("self", "torch", "nn", "F", "math", "operator", "forward", "training"),
    }
)
"""Words that mean something else where emitted code uses a value's name."""


def identifier(text: str, *, digit_prefix: str = "layer") -> str:
    """The text as a Python name: `layer1.0.conv1` gives `layer1_0_conv1`.

    Args:
        digit_prefix: what stands before a name that would begin with a digit.
    """
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    if not name:
        return "value"
    if name[0].isdigit():
        name = f"{digit_prefix}_{name}"
    return name


class UniqueNames:
    """Hands out every name once."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._next: dict[str, int] = {}

    def unique(self, wish: str) -> str:
        """The wished name when it is free, otherwise the wish with a number: `add`, `add_1`."""
        stem = name = f"{wish}_" if wish in _TAKEN else wish
        number = self._next.get(stem, 0)
        while name in self._used:
            number += 1
            name = f"{stem}_{number}" if stem == wish else f"{stem}{number}"
        self._next[stem] = number
        self._used.add(name)
        return name


def rename(graph: Graph) -> Graph:
    """The same graph with every op and value named after its module path or function."""
    renaming = _Renaming(graph)
    ops = tuple(renaming.op(op) for op in graph.ops)
    loss = graph.loss
    if loss is not None:
        loss = dataclasses.replace(loss, value=renaming.names[loss.value])
    return graph.replace(ops=ops, outputs=renaming.argument(graph.outputs), loss=loss)


def _keys(outputs: Argument, around: str = "") -> Iterator[tuple[str, str]]:
    """What stands in dictionaries of the model's outputs, by its keys: `aux_0_boxes`."""
    match outputs:
        case Ref(name=value) if around:
            yield value, identifier(around)
        case dict():
            for key, item in outputs.items():
                yield from _keys(item, f"{around}_{key}" if around else str(key))
        case tuple() | list():
            for place, item in enumerate(outputs):
                yield from _keys(item, f"{around}_{place}" if around else "")


class _Renaming:
    """The new names so far."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._unique = UniqueNames()
        self.names = {source.name: self._unique.unique(source.name) for source in graph.inputs}
        self._keys = dict(_keys(graph.outputs))

    def argument(self, argument: Argument) -> Argument:
        def new(leaf: Any) -> Argument:
            return Ref(self.names[leaf.name]) if isinstance(leaf, Ref) else leaf

        return map_argument(new, argument)

    def op(self, op: Op) -> Op:
        call = with_arguments(op.call, self.argument)
        base = self._base(op.call)
        if self._graph.loss is not None and op.result == self._graph.loss.value:
            base = "loss"
        if len(op.outputs) == 1:
            key = "" if isinstance(op.call, ModuleCall) else self._keys.get(op.outputs[0], "")
            name = self._unique.unique(_targets(op) or key or base)
            self.names[op.outputs[0]] = name
        else:
            name = self._unique.unique(base)
            wishes = _wishes(op, base)
            wishes = {**wishes, **{v: own for v, own in self._keys.items() if v in wishes}}
            self.names.update((old, self._unique.unique(wishes[old])) for old in op.outputs)
        result = map_result(self.names.__getitem__, op.result)
        return dataclasses.replace(op, name=name, call=call, result=result)

    def _base(self, call: Call) -> str:
        match call:
            case ModuleCall(module=path):
                kind = self._graph.modules[path].cls.__name__.lower()
                bare = path.replace(".", "").isdigit()
                return identifier(path or kind, digit_prefix=kind if bare else "layer")
            case MethodCall(method=method):
                return identifier(method)
            case FunctionCall(function=builtins.getattr, args=(_, str() as attribute)):
                return identifier(attribute)
            case FunctionCall(function=OwnFunction(cls=cls)):
                return identifier(_WORD.sub("_", cls.__name__).lower())
            case FunctionCall(function=function):
                if isinstance(function, torch._ops.OpOverload):
                    return identifier(function._schema.name.split("::")[-1])
                return identifier(_FUNCTION_NAMES.get(function.__name__, function.__name__))


_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""Where another word begins in the name of a class."""

_FUNCTION_NAMES: Mapping[str, str] = {
    "getitem": "item",
    "truediv": "div",
    "floordiv": "floor_div",
    "unless": "layer_out",
    "split_by_values": "split",
}


def _wishes(op: Op, base: str) -> dict[str, str]:
    """A readable name for every value of a multi-output op."""
    targets = _assigned(op)
    found: dict[str, str] = {}

    def walk(result: Result, target: ast.expr | None, name: str) -> None:
        if isinstance(result, str):
            found[result] = target.id if isinstance(target, ast.Name) else name
        elif isinstance(result, tuple):
            parts: list[ast.expr | None] = [None] * len(result)
            if isinstance(target, ast.Tuple) and len(target.elts) == len(result):
                parts = list(target.elts)
            for index, (item, part) in enumerate(zip(result, parts, strict=True)):
                walk(item, part, f"{name}_{index}")

    walk(op.result, targets, base)
    return found


def _targets(op: Op) -> str | None:
    """The variable that the only value of an unpacking op is assigned to."""
    if not isinstance(op.result, tuple):
        return None
    wishes = _wishes(op, "")
    wish = next(iter(wishes.values()))
    return wish if wish.isidentifier() and not wish.startswith("_") else None


def _assigned(op: Op) -> ast.Tuple | None:
    """The targets of `a, b = f(x)` in the user's line, when the op is that call of `f`."""
    if op.source is None or "," not in op.source.code:
        return None
    try:
        statement = ast.parse(op.source.code).body[0]
    except (SyntaxError, IndexError):
        return None
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return None
    value: ast.expr = statement.value
    if isinstance(value, ast.Call):
        value = value.func
    word = getattr(value, "attr", None) or getattr(value, "id", None)
    return statement.targets[0] if word == _called(op.call) else None


def _called(call: Call) -> str | None:
    """The word by which the user's code makes a call."""
    match call:
        case ModuleCall(module=path):
            return path.rsplit(".", 1)[-1]
        case FunctionCall(function=builtins.getattr, args=(_, str() as attribute)):
            return attribute
        case _:
            return called(call) or None
