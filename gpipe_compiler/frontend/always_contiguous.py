"""Lets `contiguous()` of one mode run in both, where the other mode does without."""

from __future__ import annotations

import dataclasses

from gpipe_compiler.ir import Argument, ByMode, MethodCall, Mode, Op, Ref
from gpipe_compiler.ir.ops import with_arguments


def always_contiguous(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """Lets `x.contiguous()` of one mode, which the other mode does without, run in both.

    A recorder leaves it out where it does nothing, as attention without dropout may have other
    strides.
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
