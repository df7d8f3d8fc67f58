"""Which ops in the traces of train and eval mode can be one op in both."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from gpipe_compiler.ir import (
    Argument,
    Autocast,
    Call,
    FunctionCall,
    MethodCall,
    ModuleCall,
    Op,
    Result,
)

_MOST_PAIRS = 1 << 20
"""Pairs of equal items in two lists up to which all of them are looked at to align the lists."""


def aligned(ours: Sequence[Op], theirs: Sequence[Op]) -> Sequence[difflib.Match]:
    """The runs of ops in two lists that can be one op in two modes, in order, and an empty one at
    the end.

    Where items repeat so often that a search among all their pairs would take long, each stands
    for its own repetition only.
    """
    left, right = list(map(key_of, ours)), list(map(key_of, theirs))
    if left == right:
        return difflib.Match(0, 0, len(left)), difflib.Match(len(left), len(left), 0)
    counts = Counter(right)
    if sum(counts[key] for key in left) > _MOST_PAIRS:
        left, right = list(_numbered(left)), list(_numbered(right))
    return difflib.SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()


def _numbered(items: Iterable[Hashable]) -> Iterator[Hashable]:
    """Every item with the number of those before it that are equal to it."""
    seen = Counter[Hashable]()
    for item in items:
        yield item, seen[item]
        seen[item] += 1


_DEFAULTS: Mapping[str, object] = {"dropout_p": 0.0}
"""Arguments of functions without a signature that depend on the mode."""


def key_of(op: Op, *, line: bool = True) -> Hashable:
    """What two ops must share to be one op in two modes: module, line, and what is called.

    Without gradients the same is computed, and in eval mode nobody asks for them.
    """
    source = op.source if line else None
    contexts = (region.context for region in op.regions)
    around = tuple(context for context in contexts if isinstance(context, Autocast))
    where = (op.module, around, *((source.file, source.line) if source else ()))
    return (_call_key(op.call), where, _arity(op.result))


def _call_key(call: Call) -> Hashable:
    match call:
        case FunctionCall(function=function):
            return ("function", id(function), len(call.args), _names_key(call))
        case MethodCall(method="size"):  # of another dimension it is another number
            return ("size", call.args[1:])
        case MethodCall(method=method):
            return ("method", method, len(call.args), tuple(sorted(call.kwargs)))
        case ModuleCall(module=module):
            return ("module", module, len(call.args), tuple(sorted(call.kwargs)))


def _names_key(call: FunctionCall) -> Hashable:
    """Keywords count only where no default is known for them."""
    try:
        inspect.signature(call.function)
    except (TypeError, ValueError):
        return tuple(sorted(key for key in call.kwargs if key not in _DEFAULTS))
    return ()


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
