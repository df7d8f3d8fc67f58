"""What ops do, and what is done alike.

Of several names that a function of torch has, graphs have one (`frontend/calls.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    StateKind,
    StateRef,
    called,
)
from gpipe_compiler.ir.own_functions import OwnFunction

_SYNONYMS = {
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "itruediv": "div",
    "truediv": "div",
    "true_divide": "div",
    "pos": "clone",
}

SAME = frozenset(
    {
        *("reshape", "view", "view_as", "flatten", "squeeze", "unsqueeze", "contiguous", "clone"),
        *("float", "double", "half", "bfloat16", "to", "type", "type_as", "detach"),
    }
)
"""Ops that change only the type and the shape of a scalar."""

MOVES = SAME | {"expand", "permute", "transpose", "t", "getitem", "select", "stack", "cat"}
"""What moves elements, or changes their type."""

ORDER = frozenset({"lt", "le", "gt", "ge"})

COMPARING = ORDER | {"eq", "ne", "sign", "round", "floor", "ceil"}
"""Functions that are flat but for steps."""

BOUNDING = frozenset(
    {
        *("clamp", "clamp_min", "clamp_max", "minimum", "maximum"),
        *("floordiv", "floor_divide", "mod", "remainder", "fmod", "bucketize"),
    }
)
"""Functions of numbers and bounds."""

STEPPED = frozenset(
    {
        *("floordiv", "floor_divide", "mod", "remainder", "fmod", "bucketize", "searchsorted"),
        *("trunc", "heaviside", "hardshrink", "softshrink", "threshold", "_threshold"),
    }
)
"""Others that are flat, or another line, from some number on."""

SATURATING = frozenset(
    {
        *("sigmoid", "logsigmoid", "tanh", "softplus", "logaddexp", "logaddexp2", "erf", "erfc"),
        *("exp", "exp2", "expm1", "softmax", "hardtanh", "hardsigmoid", "hardswish", "relu6"),
        *("gelu", "silu", "mish", "elu", "celu", "selu", "leaky_relu", "leakyrelu", "softsign"),
    }
)
"""Functions that are as good as flat, or as a line, far from 0."""

FINITE = frozenset({"isfinite", "isinf", "isnan"})

AND = frozenset({"and_", "bitwise_and", "logical_and"})
OR = frozenset({"or_", "bitwise_or", "logical_or"})
NOT = frozenset({"invert", "bitwise_not", "logical_not"})
"""Of booleans; all but the logical ones are others of integers."""

FILLED = frozenset(
    {
        *("zeros_like", "ones_like", "full_like", "empty_like", "arange", "zeros", "ones", "full"),
        "empty",
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "rand_like"),
    }
)
"""What asks a tensor for nothing but its size and type."""


_RESHAPING = frozenset(
    {
        *("unsqueeze_", "squeeze_", "t_", "transpose_"),
        *("resize_", "resize_as_", "set_", "as_strided_"),
    }
)


def changes_form(op: Op) -> bool:
    """Whether a method gives another shape to the tensor that it is called on."""
    return called(op.call) in _RESHAPING


def verb(op: Op) -> str:
    """What an op does, however it is written: `add` for `a + b`, `a += b`, `torch.add(a, b)`.

    "" for modules, and functions that are not torch's.
    """
    match op.call:
        case FunctionCall(function=torch.linalg.norm | torch.linalg.vector_norm):
            return "norm"
        case FunctionCall(function=OwnFunction(text=text)) if text:
            return "clone"  # whose gradient goes through a hook
        case FunctionCall(function=function):
            name = getattr(function, "__name__", "")
            own = function in [getattr(home, name, None) for home in (torch, F, operator)]
            return _SYNONYMS.get(name, name) if own else ""
        case MethodCall(method=method):
            name = method if method.endswith("__") else method.removesuffix("_")
            return _SYNONYMS.get(name, name)
        case _:
            return ""


def writes(op: Op) -> bool:
    """Whether an arithmetic op, or a method, writes over its first operand."""
    match op.call:
        case FunctionCall(function=function):
            return function in (operator.iadd, operator.isub, operator.imul, operator.itruediv)
        case MethodCall(method=method):
            return method.endswith("_")
        case _:
            return True


def name_of(graph: Graph, op: Op) -> str:
    """What an op does, also where it is written as a module of torch's: the name of its class."""
    if not isinstance(op.call, ModuleCall):
        return verb(op)
    cls = graph.modules[op.call.module].cls
    return cls.__name__.lower() if getattr(nn, cls.__name__, None) is cls else ""


_REARRANGED = frozenset(
    {
        *("view", "reshape", "flatten", "contiguous", "detach", "squeeze", "unsqueeze"),
        *("transpose", "permute", "movedim", "t", "to", "long", "int"),
    }
)
"""What keeps all elements of a tensor, as long as it keeps their type and their memory."""


def origin(graph: Graph, value: str, passed: Callable[[Op], bool]) -> str:
    """The value that a value is made of by ops that are passed, each by its first argument."""
    while (op := graph.producer.get(value)) is not None and passed(op):
        first = op.call.args[0] if op.call.args else None
        if not isinstance(first, Ref):
            break
        value = first.name
    return value


def elements_of(graph: Graph, tensor: Argument) -> Argument:
    """The tensor whose elements these are, before they were put in another order or shape."""

    def rearranges(op: Op) -> bool:
        if verb(op) not in _REARRANGED or not isinstance(op.call.args[0], Ref):
            return False
        before, after = graph.values[op.call.args[0].name], graph.values[op.outputs[0]]
        return before.dtype == after.dtype and before.storage == after.storage

    return Ref(origin(graph, tensor.name, rearranges)) if isinstance(tensor, Ref) else tensor


_FILLED_WITH = {"zeros": 0.0, "new_zeros": 0.0, "zeros_like": 0.0}
_FILLED_WITH |= {"ones": 1.0, "new_ones": 1.0, "ones_like": 1.0}


def number_of(graph: Graph, argument: Argument) -> float | None:
    """The number that every element of an argument is; None where that is not known."""
    match argument:
        case bool() | int() | float():
            return float(argument)
        case StateRef(name=name) if graph.state[name].kind is StateKind.CONSTANT:
            tensor = graph.tensors[name]
            return float(tensor) if tensor.numel() == 1 and not tensor.is_meta else None
        case Ref(name=name):
            op = graph.producer.get(name)
            return None if op is None else _number_made(graph, op)
        case _:
            return None


def _number_made(graph: Graph, op: Op) -> float | None:
    name, args = called(op.call), op.call.args
    if name in _FILLED_WITH:
        return _FILLED_WITH[name]
    if name in ("full", "full_like", "new_full") and len(args) > 1:
        return number_of(graph, args[-1])
    if name in ("tensor", "as_tensor", "scalar_tensor", "new_tensor") and args:
        return number_of(graph, args[-1])
    if verb(op) in MOVES and args:
        return number_of(graph, args[0])
    if verb(op) == "mul" and len(args) == 2 and 0 in [number_of(graph, item) for item in args]:
        return 0.0
    return None


_ABOVE: Mapping[str, tuple[str, bool]] = {
    "gt": ("gt", True),
    "le": ("gt", False),
    "ge": ("ge", True),
    "lt": ("ge", False),
    "ne": ("ne", True),
    "eq": ("ne", False),
}
"""Comparisons: the one of three that they are, or the opposite of."""


def counted_above_zero(graph: Graph, condition: Argument) -> tuple[str, bool] | None:
    """The scalar of which a condition asks whether it is above 0, and whether it holds then.

    Of whole numbers, as many as there are, `n >= 1`, `n != 0` and `n` itself ask that too, and so
    does `mask.any()` of how many are true.
    """
    op = graph.producer.get(condition.name) if isinstance(condition, Ref) else None
    if op is None or not op.call.args or not isinstance(op.call.args[0], Ref):
        return None
    first, *rest = op.call.args
    if called(op.call) == "any" and not rest and graph.values[first.name].dtype is torch.bool:
        return condition.name, True
    if called(op.call) in NOT:
        inner = counted_above_zero(graph, first)
        return None if inner is None else (inner[0], not inner[1])
    whole = is_number_of(graph, first)
    if called(op.call) == "bool" and whole:
        return first.name, True
    kind, holds = _ABOVE.get(called(op.call), ("", True))
    bound = number_of(graph, rest[0]) if len(rest) == 1 else None
    asks = (kind, bound) == ("gt", 0) or (whole and (kind, bound) in (("ge", 1), ("ne", 0)))
    return (first.name, holds) if asks else None


def is_number_of(graph: Graph, value: Ref) -> bool:
    """Whether a value is how many of some booleans are true, in any type."""
    op = graph.producer.get(value.name)
    if op is None or not op.call.args or not isinstance(source := op.call.args[0], Ref):
        return False
    if verb(op) in SAME:
        return is_number_of(graph, source)
    counts = verb(op) == "sum" and _are_booleans(graph, source)
    return counts or verb(op) == "count_nonzero"


def _are_booleans(graph: Graph, value: Ref) -> bool:
    """Whether a value is of booleans, be it of zeros and ones in another type."""
    op = graph.producer.get(value.name)
    if graph.values[value.name].dtype is torch.bool or op is None or verb(op) not in SAME:
        return graph.values[value.name].dtype is torch.bool
    return isinstance(op.call.args[0], Ref) and _are_booleans(graph, op.call.args[0])


def asks_for_number(
    graph: Graph, condition: Argument, one: Argument, other: Argument
) -> tuple[None, bool] | None:
    """Of `isfinite` and `isnan` of one of both, whether the condition holds where it is one."""
    op, holds = graph.producer.get(getattr(condition, "name", "")), True
    while op is not None and called(op.call) in ("invert", "logical_not", "bitwise_not"):
        op, holds = graph.producer.get(op.inputs[0]), not holds
    if op is None or verb(op) not in ("isfinite", "isnan"):
        return None
    holds = holds is (verb(op) == "isfinite")
    return (None, holds) if op.call.args[0] == (one if holds else other) else None
