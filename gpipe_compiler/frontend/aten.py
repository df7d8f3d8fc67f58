"""What a person writes for a call of an aten operator.

`write(call)` gives the torch function, tensor method or Python operator that dispatches to the same
operator with the same arguments. A rule stands here only where both sides are the same program;
`tests/frontend/test_aten.py` compares every rule with the operator itself. An operator without
a rule stays the call of `torch.ops` that it is.

Source of the operators' signatures: aten/src/ATen/native/native_functions.yaml.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from gpipe_compiler.frontend.aten_functions import (
    FUNCTIONS,
    MISSING,
    Argument,
    AtenCall,
    Rule,
    WrittenCall,
    bind,
    written_as,
)

# --- Python operators -----------------------------------------------------------------------------

_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "matmul": operator.matmul,
    "neg": operator.neg,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "bitwise_not": operator.invert,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
}


def _operator(call: AtenCall) -> WrittenCall | None:
    """`a + b`; a third argument (`alpha`, `rounding_mode`) has no place in an operator."""
    if call.keywords() or len(call.positional()) > 2:
        return None
    return WrittenCall(_OPERATORS[call.name], call.positional())


def _rsub(call: AtenCall) -> WrittenCall | None:
    if "alpha" not in call.defaults:
        return None
    return WrittenCall(operator.sub, (call["other"], call["self"]))


# --- Tensor methods -------------------------------------------------------------------------------

_METHODS = frozenset(
    {
        *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten"),
        *("expand", "expand_as", "repeat", "squeeze", "unsqueeze", "t", "clone", "detach"),
        *("type_as", "masked_fill", "masked_scatter", "mean", "sum", "prod", "std", "var", "amax"),
        *("amin", "max", "min", "argmax", "argmin", "all", "any", "cumsum", "chunk", "split"),
        *("unbind", "tril", "triu", "view_as", "reshape_as", "size", "new_zeros", "new_ones"),
        *("new_empty", "new_full", "softmax", "log_softmax", "index_select", "gather", "scatter"),
        *("scatter_add", "index_add", "index_fill", "index_copy", "narrow", "movedim", "swapaxes"),
        *("roll", "repeat_interleave", "diagonal", "unfold", "select", "slice", "logsumexp"),
        *("topk", "sort", "argsort", "item", "numel", "clamp", "clamp_min", "clamp_max"),
        *("resolve_conj", "adjoint"),
    }
)
"""Operators that read better as methods."""

_SPREAD = frozenset({"view", "reshape", "permute", "expand", "repeat"})
"""Methods that take a list of sizes or dimensions as separate arguments."""

_SIZES = frozenset({"size", "shape", "dims", "repeats"})


def _method(call: AtenCall) -> WrittenCall | None:
    """`x.name(...)`."""
    positional = _unwrapped(call)
    if call.name in _SPREAD and len(positional) > 1 and isinstance(positional[1], (list, tuple)):
        positional = (positional[0], *positional[1], *positional[2:])
    return WrittenCall(call.name, positional, _keywords(call))


def _unwrapped(call: AtenCall) -> tuple[Argument, ...]:
    """Positional arguments; the list of a single dimension becomes the dimension."""
    arguments = [a for a in call.overload._schema.arguments if not a.kwarg_only]
    return tuple(
        value[0] if _is_single_dim(argument, value) else value
        for argument, value in zip(arguments, call.positional(), strict=False)
    )


def _is_single_dim(argument: Any, value: Argument) -> bool:
    return argument.name == "dim" and isinstance(value, (list, tuple)) and len(value) == 1


def _keywords(call: AtenCall) -> dict[str, Argument]:
    """Keyword-only arguments; the usual layout and kind of memory go without saying."""
    usual = {"layout": torch.strided, "pin_memory": False}
    return {
        key: value
        for key, value in call.keywords().items()
        if key not in usual or value is not usual[key]
    }


def _to(call: AtenCall) -> WrittenCall | None:
    """`x.to(dtype)`; a device is added by whoever knows that it is another one."""
    dtype = call.values.get("dtype")
    kwargs = call.given("copy", "memory_format") if "copy" in call.values else {}
    if call.name == "_to_copy":
        kwargs = call.given("memory_format") | {"copy": True}
    return WrittenCall("to", (call["self"],) if dtype is None else (call["self"], dtype), kwargs)


_ATTRIBUTES = {"numpy_T": "T", "mT": "mT", "mH": "mH", "matrix_H": "H"}


def _attribute(call: AtenCall) -> WrittenCall | None:
    """`x.T` and its like."""
    return WrittenCall(getattr, (call["self"], _ATTRIBUTES[call.name]))


# --- torch functions and indexing -----------------------------------------------------------------


def _einsum(call: AtenCall) -> WrittenCall | None:
    """`torch.einsum(...)`, which finds the order of its products itself."""
    return WrittenCall(torch.einsum, (call["equation"], *call["tensors"]))


def brackets(indices: Sequence[Argument]) -> Argument:
    """What stands in the brackets of `x[:, indices]`.

    Args:
        indices: as the operator has them: None is a whole dimension.
    """
    entries = tuple(slice(None) if entry is None else entry for entry in indices)
    return entries[0] if len(entries) == 1 else entries


def _index(call: AtenCall) -> WrittenCall | None:
    return WrittenCall(operator.getitem, (call["self"], brackets(call["indices"])))


# --- the table ------------------------------------------------------------------------------------

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_OPERATORS, _operator),
    **dict.fromkeys(_ATTRIBUTES, _attribute),
    **FUNCTIONS,
    "rsub": _rsub,
    "to": _to,
    "_to_copy": _to,
    "lift_fresh_copy": written_as("clone", "self"),
    "sym_size": written_as("size", "self", "dim"),
    "sym_numel": written_as("numel", "self"),
    "split_with_sizes": written_as("split", "self", "split_sizes", given=("dim",)),
    "einsum": _einsum,
    "index": _index,
}

_TO_OTHER = written_as("to", "self", "other", given=("copy", "memory_format"))

_PYTHON_METHODS = frozenset({"split", "unflatten"})
"""Methods written in Python whose arguments are those of the operator."""

_NAMESPACES: Mapping[str, types.ModuleType] = {
    "linalg_": torch.linalg,
    "fft_": torch.fft,
    "special_": torch.special,
}


def write(
    overload: torch._ops.OpOverload, args: Sequence[Argument], kwargs: Mapping[str, Argument]
) -> WrittenCall | None:
    """The call as a person writes it; None where there is no other way to write it."""
    if overload.namespace != "aten" or overload._overloadname.split("_")[-1] == "out":
        return None
    call = bind(overload, args, kwargs)
    if any(value is MISSING for value in call.values.values()):
        return None
    rule = _RULES.get(call.name)
    if call.overload is torch.ops.aten.to.other:
        rule = _TO_OTHER
    written = rule(call) if rule is not None else None
    return written if written is not None else _by_name(call)


def _by_name(call: AtenCall) -> WrittenCall | None:
    """The method or function that torch generates from the operator, under the operator's name."""
    name = call.name
    if _takes_self(call) and (name in _METHODS or name.endswith("_")) and _has_method(name):
        return _method(call)
    for prefix, module in _NAMESPACES.items():
        function = getattr(module, name.removeprefix(prefix), None)
        if name.startswith(prefix) and _is_generated(function):
            return WrittenCall(function, _unwrapped(call), _keywords(call))
    for module in (torch, F):
        function = getattr(module, name, None)
        if _is_generated(function):
            return WrittenCall(function, _unwrapped(call), _keywords(call))
    if _takes_self(call) and _has_method(name):
        return _method(call)
    return None


def _takes_self(call: AtenCall) -> bool:
    arguments = call.overload._schema.arguments
    return bool(arguments) and arguments[0].name == "self" and not arguments[0].kwarg_only


def _has_method(name: str) -> bool:
    method = getattr(torch.Tensor, name, None)
    return isinstance(method, types.MethodDescriptorType) or name in _PYTHON_METHODS


def _is_generated(function: object) -> TypeGuard[Callable[..., Any]]:
    """Whether torch's code generator made the function from the operator's schema."""
    return isinstance(function, types.BuiltinFunctionType)
