"""Who reads the values of a method."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.functions import AUGMENTED
from gpipe_compiler.codegen.variables import END
from gpipe_compiler.ir import ByMode, Call, FunctionCall, MethodCall, Mode, Op, Ref
from gpipe_compiler.ir.arguments import choices, value_names


@dataclass(frozen=True, slots=True)
class Uses:
    """Who reads each value: how often, where last, and the mode partners of single-mode values.

    Attributes:
        count: readings, returns included.
        last: the position of the last reader.
        reader: the position of some reader.
        chosen: values that stand in a choice between modes.
        partner: values of eval mode to those of train mode that stand for the same thing.
    """

    count: dict[str, int]
    last: dict[str, int]
    reader: dict[str, Op]
    chosen: frozenset[str]
    partner: dict[str, str]

    @classmethod
    def of(cls, ops: Sequence[Op], returns: Sequence[str], asked: Collection[str] = ()) -> Uses:
        """The uses in a method or region.

        Args:
            asked: results of `x.shape` and the like that are kept in a variable.
        """
        count: dict[str, int] = {}
        last: dict[str, int] = {}
        reader: dict[str, Op] = {}
        chosen: set[str] = set()
        partner: dict[str, str] = {}
        mode = {value: op.mode for op in ops for value in op.outputs}
        for position, op in enumerate(ops):
            arguments = (op.call.args, dict(op.call.kwargs))
            for value in value_names(arguments):
                count[value] = count.get(value, 0) + 1
                last[value] = position
                reader[value] = op
            for choice in choices(arguments):
                chosen.update(value_names(choice))
                match choice:
                    case ByMode(train=Ref(name=train), evaluation=Ref(name=evaluation)):
                        if mode.get(train) is Mode.TRAIN and mode.get(evaluation) is Mode.EVAL:
                            partner[evaluation] = train
        for value in returns:
            count[value] = count.get(value, 0) + 1
            last[value] = END
        for op in reversed(ops):
            if is_attribute(op.call) and not set(asked).issuperset(op.outputs):
                for value in op.inputs:
                    last[value] = max(last[value], *(last.get(v, -1) for v in op.outputs))
        return cls(count, last, reader, frozenset(chosen), partner)


def is_attribute(made: Call) -> bool:
    """`x.shape` and the like: written wherever it is used."""
    return isinstance(made, FunctionCall) and made.function is getattr and len(made.args) == 2


def is_in_place(made: Call) -> bool:
    """`x += y`, or a method that ends in one underscore and returns its receiver."""
    match made:
        case FunctionCall(function=function, args=(_, _)):
            return function in AUGMENTED and not made.kwargs
        case MethodCall(method=method):
            return method.endswith("_") and not method.endswith("__")
        case _:
            return False
