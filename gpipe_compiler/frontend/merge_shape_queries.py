"""Lets ops of a merged graph run in both modes where the results of both modes are equal."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from gpipe_compiler.ir import (
    Argument,
    ByMode,
    Call,
    FunctionCall,
    MethodCall,
    Mode,
    Op,
    Ref,
    Result,
)
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.ops import result_names, with_arguments

_METHODS = frozenset({"size", "dim", "numel"})
_ATTRIBUTES = frozenset({"shape", "device", "dtype", "ndim"})
_ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.getitem}
)


def merge_shape_queries(ops: Sequence[Op], outputs: Argument) -> tuple[tuple[Op, ...], Argument]:
    """The same graph with one op for both modes where each had its own for the same shape.

    A batch size that train mode has from one op and eval mode from another ties all who read it to
    both; asked once it ties nobody. Only questions about shapes and arithmetic on their answers
    are unified: nothing that runs in between can change what they give.
    """
    kept: list[Op] = []
    first: dict[str, int] = {}
    answers: set[str] = set()
    names: dict[str, str] = {}

    def rename(leaf: object) -> object:
        return Ref(names.get(leaf.name, leaf.name)) if isinstance(leaf, Ref) else leaf

    def current(argument: Argument) -> Argument:
        return map_argument(rename, argument)

    for original in ops:
        op = dataclasses.replace(original, call=with_arguments(original.call, current))
        if not _is_query(op.call, answers):
            kept.append(op)
            continue
        key = repr((op.call, _form(op.result)))
        position = first.setdefault(key, len(kept))
        if position == len(kept):
            kept.append(op)
        else:
            earlier = kept[position]
            if earlier.mode is not op.mode:
                kept[position] = dataclasses.replace(earlier, mode=Mode.ALWAYS)
            names.update(zip(result_names(op.result), earlier.outputs, strict=True))
        answers.update(op.outputs)
    return tuple(kept), current(outputs)


def _form(result: Result) -> object:
    """How a result unpacks, without the names."""
    return tuple(map(_form, result)) if isinstance(result, tuple) else result is not None


def _is_query(call: Call, answers: set[str]) -> bool:
    match call:
        case MethodCall():
            return call.method in _METHODS and not call.kwargs
        case FunctionCall(function=function, args=args):
            if function is getattr:
                return len(args) == 2 and args[1] in _ATTRIBUTES
            refs = [leaf for leaf in args if not isinstance(leaf, int)]
            return function in _ARITHMETIC and all(
                isinstance(leaf, Ref) and leaf.name in answers for leaf in refs
            )
        case _:
            return False


def always_contiguous(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Lets `x.contiguous()` of one mode, which the other mode does without, run in both.

    Tracers leave it out where they see that it does nothing, which memory layouts decide.
    """
    sides: dict[ByMode, str] = {}
    alone = {value for op in ops if op.mode is not Mode.ALWAYS for value in op.outputs}
    for op in ops:
        call = op.call
        if op.mode is Mode.ALWAYS or not isinstance(op.result, str):
            continue
        if isinstance(call, MethodCall) and call.method == "contiguous" and len(call.args) == 1:
            own, plain = Ref(op.result), call.args[0]
            if not isinstance(plain, Ref) or plain.name in alone:
                continue
            pair = ByMode(own, plain) if op.mode is Mode.TRAIN else ByMode(plain, own)
            sides[pair] = op.result
    if not sides:
        return ops

    def simplified(argument: Argument) -> Argument:
        match argument:
            case ByMode(train=Ref(), evaluation=Ref()) if argument in sides:
                return Ref(sides[argument])
            case tuple():
                return tuple(map(simplified, argument))
            case list():
                return list(map(simplified, argument))
            case _:
                return argument

    mended = set(sides.values())
    return tuple(
        dataclasses.replace(
            op,
            call=with_arguments(op.call, simplified),
            mode=Mode.ALWAYS if mended.intersection(op.outputs) else op.mode,
        )
        for op in ops
    )
