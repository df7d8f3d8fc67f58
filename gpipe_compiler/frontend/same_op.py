"""Which ops of two traces are one op, and which arguments it is called with in each."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from typing import Any

from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    MethodCall,
    ModuleCall,
    Op,
    Ref,
    RegionCall,
    Result,
)
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.ops import with_arguments

_DEFAULTS: Mapping[str, object] = {"dropout_p": 0.0}
"""Arguments of functions without a signature that depend on the mode."""


def op_key(op: Op) -> Hashable:
    """What two ops must share to be one op in two modes."""
    where = (op.module, op.source.file, op.source.line) if op.source else (op.module,)
    return (_call_key(op.call), where, _arity(op.result))


def _call_key(call: Call) -> Hashable:
    match call:
        case FunctionCall(function=function):
            return ("function", id(function), len(call.args), _names_key(call))
        case MethodCall(method=method):
            return ("method", method, len(call.args), tuple(sorted(call.kwargs)))
        case ModuleCall(module=module):
            return ("module", module, len(call.args), tuple(sorted(call.kwargs)))
        case RegionCall():
            return ("region", repr(call.context), len(call.args), _body_key(call))


def _names_key(call: FunctionCall) -> Hashable:
    """Keywords count only where no default is known for them."""
    try:
        inspect.signature(call.function)
    except (TypeError, ValueError):
        return tuple(sorted(key for key in call.kwargs if key not in _DEFAULTS))
    return ()


def _body_key(call: RegionCall) -> Hashable:
    """The text of a region's body with values numbered, so that names do not matter."""
    numbers: dict[str, int] = {}

    def number(leaf: Any) -> Any:
        return numbers.get(leaf.name, leaf.name) if isinstance(leaf, Ref) else leaf

    def enter(names: tuple[str, ...]) -> None:
        for name in names:
            numbers[name] = len(numbers)

    enter(call.body.inputs)
    lines: list[Hashable] = []
    for op in call.body.ops:
        inner = with_arguments(op.call, lambda item: map_argument(number, item))
        lines.append((_call_key(inner), repr((inner.args, dict(inner.kwargs))), _arity(op.result)))
        enter(op.outputs)
    return (*lines, repr(map_argument(number, call.body.outputs)))


def _arity(result: Result) -> Hashable:
    """The nesting of a result; a result that nothing reads fits a single one."""
    return tuple(map(_arity, result)) if isinstance(result, tuple) else None


def passed(call: Call, key: str) -> Argument:
    """An argument of a call, or the default where it is not passed."""
    if key in call.kwargs:
        return call.kwargs[key]
    if isinstance(call, FunctionCall):
        try:
            parameters = inspect.signature(call.function).parameters
        except (TypeError, ValueError):
            return _DEFAULTS.get(key, inspect.Parameter.empty)
        if key in parameters and list(parameters).index(key) >= len(call.args):
            return parameters[key].default
    return inspect.Parameter.empty
