"""The readers of the values of a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.functions import BINARY
from gpipe_compiler.codegen.layout import Binding
from gpipe_compiler.codegen.loops import loop_begun, loop_ended
from gpipe_compiler.codegen.sources import statement_at
from gpipe_compiler.codegen.variables import END
from gpipe_compiler.ir import ByMode, Call, FunctionCall, Mode, Op, Ref, RegionCall
from gpipe_compiler.ir.arguments import choices, value_names
from gpipe_compiler.ir.left_out import may_leave_out


@dataclass(frozen=True, slots=True)
class Uses:
    """Who reads each value: how often, where last, and the mode partners of single-mode values.

    Attributes:
        count: readings, returns included.
        last: the position of the last reader.
        reader: the position of some reader.
        chosen: values that stand in a choice between modes.
        partner: values of eval mode to those of train mode that stand for the same thing.
        loops: the positions of the ops that begin and end the loops, the outer ones first.
    """

    count: dict[str, int]
    last: dict[str, int]
    reader: dict[str, Op]
    chosen: frozenset[str]
    partner: dict[str, str]
    loops: tuple[tuple[int, int], ...] = ()

    def until(self, position: int) -> int:
        """The position up to which something has to be there that is read at one: all rounds."""
        around = (end for start, end in self.loops if start < position < end)
        return next(around, position)

    @staticmethod
    def is_condition(op: Op, count: Mapping[str, int], reader: Mapping[str, Op]) -> bool:
        """Whether an op compares numbers, for a single op to leave out a layer in training.

        Args:
            count, reader: of values.
        """
        value, made = op.result, op.call
        if op.mode is not Mode.TRAIN or not isinstance(value, str) or count.get(value) != 1:
            return False
        compares = isinstance(made, FunctionCall) and BINARY.get(made.function, ("", None))[1]
        choice = reader[value].call.args[:1]
        return (
            compares is Binding.COMPARISON
            and may_leave_out(reader[value].call)
            and choice == (ByMode(Ref(value), False),)
        )

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
            arguments = op.arguments
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
            written = is_attribute(op.call) or cls.is_condition(op, count, reader)
            if written and not set(asked).issuperset(op.outputs):
                for value in op.inputs:
                    last[value] = max(last[value], *(last.get(v, -1) for v in op.outputs))
        begun = [position for position, op in enumerate(ops) if loop_begun(op)]
        ended = {loop_ended(op): position for position, op in enumerate(ops)}
        loops = tuple((position, ended[loop_begun(ops[position])]) for position in begun)
        return cls(count, last, reader, frozenset(chosen), partner, loops)


def makes_only(op: Op, values: Collection[str]) -> bool:
    """Whether an op makes something, all of it among some values."""
    return bool(op.outputs) and all(value in values for value in op.outputs)


def is_attribute(made: Call) -> bool:
    """`x.shape` and the like: written wherever it is used."""
    return isinstance(made, FunctionCall) and made.function is getattr and len(made.args) == 2


def with_callers(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops of a method; one that is all of a module, between ops of its caller, as of that.

    `self.down(self.act(self.up(x)))` is one statement of the caller, whose only ops are those of
    `up` and `down`; in `act`, the op belongs to another statement.
    """
    maker = {value: op for op in ops for value in op.outputs}
    readers: dict[str, list[Op]] = {}
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.module] = counts.get(op.module, 0) + 1
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    return tuple(_as_of_caller(op, maker, readers) if counts[op.module] == 1 else op for op in ops)


def _as_of_caller(op: Op, maker: Mapping[str, Op], readers: Mapping[str, Sequence[Op]]) -> Op:
    around = [maker[value] for value in op.inputs if value in maker]
    around += [reader for value in op.outputs for reader in readers.get(value, ())]
    if len(around) != len(op.inputs) + 1 or isinstance(op.call, RegionCall):
        return op
    caller = around[-1]
    inside = not caller.module or op.module.startswith(f"{caller.module}.")
    statement = statement_at(caller.source)
    alike = all(
        other.module == caller.module and statement_at(other.source) == statement
        for other in around
    )
    if not inside or not alike or statement is None or op.module == caller.module:
        return op
    return dataclasses.replace(op, module=caller.module, source=caller.source)
