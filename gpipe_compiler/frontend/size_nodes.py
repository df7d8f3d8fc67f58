"""Writes sizes that a model computes as calls in its graph."""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.locate import calling_line, is_asked_by_user
from gpipe_compiler.frontend.position import Position
from gpipe_compiler.ir.symbolic import expression_of

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_BINARY: Mapping[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Min": builtins.min,
    "Max": builtins.max,
    "FloatPow": operator.pow,
    "PowByNatural": operator.pow,
    "Pow": operator.pow,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
}
_UNARY: Mapping[str, Callable[..., Any]] = {
    "ToFloat": builtins.float,
    "TruncToInt": builtins.int,
    "FloorToInt": math.floor,
    "CeilToInt": math.ceil,
    "RoundToInt": builtins.round,
    "Not": operator.not_,
    "Abs": builtins.abs,
    "OpaqueUnaryFn_sqrt": math.sqrt,
    "OpaqueUnaryFn_log2": math.log2,
    "OpaqueUnaryFn_log": math.log,
    "OpaqueUnaryFn_exp": math.exp,
}
"""Functions of torch's on sizes, by name, and what they are on numbers."""

_OF_SYMBOLS: Mapping[Any, Callable[..., Any]] = {
    builtins.max: torch.sym_max,
    builtins.min: torch.sym_min,
    builtins.float: torch.sym_float,
    builtins.int: torch.sym_int,
    math.sqrt: torch.sym_sqrt,
    operator.not_: torch.sym_not,
}
"""What they are on sizes that may vary."""


class SizeNodes:
    """The nodes of a recorded graph that compute sizes."""

    def __init__(self, graph: fx.Graph, position: Position) -> None:
        self._graph = graph
        self._position = position
        self._symbols: dict[Any, tuple[fx.Node, int | None]] = {}
        self._sizes: dict[tuple[object, ...], dict[Any, tuple[fx.Node, int]]] = {}
        self._lines: dict[Any, tuple[SourceLocation | None, int]] = {}
        self._written: dict[Any, fx.Node] = {}

    def note(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Lets the sizes of a tensor be asked of it that no tensor had before."""
        with torch._C.DisableTorchFunction():  # which would take it for the model's own question
            found = _varying(node, tensor)
        for size, place in found.items():
            if size.is_Symbol:
                self._symbols.setdefault(size, place)

    def asked(self, node: fx.Node | None, tensor: torch.Tensor) -> None:
        """A tensor is asked for its sizes: those that follow from others are had from here."""
        if node is None:
            return
        place, found = self._position.place, _varying(node, tensor)
        here = self._sizes.setdefault(place, {})
        for size, first in found.items():
            here.setdefault(size, first)
        keys = [(size, () if size.is_Symbol else place) for size in found]
        new = [key for key in keys if key not in self._lines]
        if new and is_asked_by_user():
            source = self._position.origin()["source"]
            for key in new:
                self._lines[key] = source, found[key[0]][1]
                if not key[0].is_Symbol:  # what is called from here may read it
                    self._node("size", found[key[0]], key[0])
                if key in self._written:
                    self._tell_line(key)

    def note_number(self, node: fx.Node, number: Any) -> None:
        """Lets a number that was read from a tensor be that of a node."""
        expression = expression_of(number)
        if expression.is_Symbol:
            self._symbols.setdefault(expression, (node, None))

    def are_in(self, item: Any) -> bool:
        """Whether there is a size that may vary in a nest."""
        if isinstance(item, tuple | list):
            return any(map(self.are_in, item))
        return isinstance(item, _SYMBOLIC)

    def are_new(self, item: Any) -> bool:
        """Whether what a call returned is a number that it has read from a tensor."""
        if not isinstance(item, _SYMBOLIC):
            return False
        symbols = expression_of(item).free_symbols
        return bool(symbols) and symbols.isdisjoint(self._symbols)

    def written(self, number: Any) -> Any:
        """A size in terms of nodes; a number where it is one."""
        return self._of(expression_of(number))

    def _of(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression.is_Boolean and not expression.free_symbols:
            return bool(expression)
        if expression.is_number:
            return float(expression)
        name = expression.func.__name__
        if expression.is_Symbol:
            return self._asked(expression)
        here = self._sizes.get(self._position.place, {})
        if expression in here:
            return self._node("size", here[expression], expression)
        around = self._asked_around(expression)
        if around is not None:
            return around
        if expression.is_Add:
            times, size = expression.as_content_primitive()
            return (
                self._folded(operator.mul, [size, times]) if size in here else self._sum(expression)
            )
        if expression.is_Mul:
            factors = sorted(expression.args, key=lambda item: item.is_number)
            return self._folded(operator.mul, _as_product(expression, list(here)) or factors)
        if name in _BINARY:
            return self._folded(_BINARY[name], expression.args)
        if name in _UNARY:
            return self._node(_UNARY[name], (self._of(expression.args[0]),), expression)
        raise TraceError(
            f"the model computes {expression} of sizes, which no graph holds",
            location=calling_line(),
        )

    def _asked_around(self, expression: Any) -> fx.Node | None:
        """Where a module that calls this one has asked a tensor for a size."""
        place = self._position.place
        keys = ((expression, place[:depth]) for depth in reversed(range(1, len(place))))
        return next((self._written[key] for key in keys if key in self._lines), None)

    def _asked(self, symbol: Any) -> fx.Node:
        if symbol not in self._symbols:
            raise TraceError(
                "the model uses a size that follows from the values of a tensor",
                location=calling_line(),
            )
        node, dim = self._symbols[symbol]
        if dim is None:
            return node
        return self._node("size", (node, dim), symbol)

    def _sum(self, expression: Any) -> Any:
        terms = sorted(
            expression.args, key=lambda item: (item.could_extract_minus_sign(), item.is_number)
        )
        total, so_far = self._of(terms[0]), terms[0]
        for term in terms[1:]:
            taken = term.could_extract_minus_sign()
            so_far = so_far + term
            function = operator.sub if taken else operator.add
            total = self._node(function, (total, self._of(-term if taken else term)), so_far)
        return total

    def _folded(self, function: Callable[..., Any], items: Any) -> Any:
        first, *others = map(self._of, items)
        return functools.reduce(lambda a, b: self._node(function, (a, b), None), others, first)

    def _node(self, target: Any, args: tuple[Any, ...], expression: Any) -> fx.Node:
        """A node of its own in each module; sizes of inputs are asked at the start, once."""
        position = self._position
        of_input = isinstance(target, str) and args[0].op == "placeholder"
        key = (
            (expression if expression is not None else (target, args)),
            (() if of_input else position.place),
        )
        if key in self._written:
            return self._written[key]
        with position.at_the_start() if of_input else contextlib.nullcontext():
            kind = "call_method" if isinstance(target, str) else "call_function"
            node = self._graph.create_node(kind, target, args)
            node.meta.update(position.origin())
        node.meta["val"] = self._value(target, args)
        self._written[key] = node
        if isinstance(target, str):
            self._tell_line(key)
        return node

    def _tell_line(self, key: Any) -> None:
        """Lets a size be of the line that asks for it, where both that and its use are a module's
        own: calls of functions are told by the order of their lines. One of an input, which is
        asked at the start, is so in any case. A line that asks another tensor for it, where it has
        another place, would tell a wrong name."""
        node = self._written[key]
        asked, place = self._lines.get(key, (None, None))
        own = _function(asked) == _function(node.meta["source"]) == "forward"
        if asked is not None and place == node.args[1] and (own or not key[1]):
            node.meta["source"] = asked

    def _value(self, target: Any, args: tuple[Any, ...]) -> Any:
        values = [item.meta["val"] if isinstance(item, fx.Node) else item for item in args]
        if isinstance(target, str):
            return values[0].shape[values[1]]
        return _OF_SYMBOLS.get(target, target)(*values)


def _varying(node: fx.Node, tensor: torch.Tensor) -> dict[Any, tuple[fx.Node, int]]:
    """The sizes of a tensor that vary, and where they stand first."""
    sizes: tuple[Any, ...] = tensor.shape
    found: dict[Any, tuple[fx.Node, int]] = {}
    for dim, size in enumerate(sizes):
        if isinstance(size, torch.SymInt):
            found.setdefault(expression_of(size), (node, dim))
    return found


def _function(source: SourceLocation | None) -> str:
    """The innermost function with a name that a line is in."""
    lines = () if source is None else (source, *reversed(source.callers))
    return next((line.function for line in lines if not line.function.startswith("<")), "")


def _as_product(expression: Any, sizes: Sequence[Any]) -> list[Any]:
    """Those of some sizes whose product an expression is, with a whole number; [] for none."""
    for place, size in enumerate(sizes):
        if size.is_number:
            continue
        rest = expression / size
        if rest.is_Integer or rest in sizes[place:]:
            return [size, rest]
        if sympy.fraction(rest)[1] == 1 and (others := _as_product(rest, sizes[place:])):
            return [size, *others]
    return []
