"""Who reads each value, and which variable holds it: the user's names, reused once dead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.functions import BINARY
from gpipe_compiler.codegen.layout import Binding
from gpipe_compiler.codegen.loops import loop_begun, loop_ended
from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.codegen.sources import statement_at
from gpipe_compiler.ir import ByMode, Call, FunctionCall, Mode, Op, Ref, ValueKind
from gpipe_compiler.ir.arguments import choices, value_names
from gpipe_compiler.ir.left_out import may_leave_out

END = 1 << 60
"""The position after the last statement: what is returned is used there."""


class Variables:
    """Gives values their variables, in program order.

    A name is bound anew (`x = self.conv(x)`) once every value that it holds is dead.

    Args:
        last_use: the position of each value's last reader.
        kind: what a value is; a name keeps to one kind.
    """

    def __init__(
        self, names: Identifiers, last_use: Mapping[str, int], kind: Callable[[str], object]
    ) -> None:
        self._names = names
        self._last_use = last_use
        self._kind = kind
        self._holds: dict[str, set[str]] = {}
        self._like: dict[str, list[str]] = {}
        self._of: dict[str, str] = {}
        self._watched: dict[str, None] = {}

    def assign(self, value: str, wish: str, position: int) -> str:
        """The variable for a value made at `position`, -1 for what the method is given."""
        variable = self._reused(value, wish, position)
        if variable is None:
            return self.fresh(value, wish)
        self._holds[variable].clear()
        return self._bind(value, variable)

    @property
    def named(self) -> frozenset[str]:
        return frozenset(self._holds)

    def is_numbered(self, value: str, wish: str, position: int) -> bool:
        """Whether a value that asks for a name would get one with a number behind it."""
        return wish in self._like and self._reused(value, wish, position) is None

    def dead(self, position: int) -> Iterator[tuple[str, frozenset[str]]]:
        """The variables of which nothing is read after a position, and what they hold."""
        for variable in self._watched:
            held = self._holds[variable]
            if all(self._last_use.get(old, -1) <= position for old in held):
                yield variable, frozenset(held)

    def tensors(self) -> Iterator[tuple[str, frozenset[str]]]:
        """The variables that hold tensors, the latest first, and the values that they hold."""
        for variable, held in reversed(self._holds.items()):
            if held and all(self._kind(value) is ValueKind.TENSOR for value in held):
                yield variable, frozenset(held)

    def forget(self, variable: str) -> None:
        """The variable may go on holding what it does."""
        self._watched.pop(variable, None)

    def release(self, variable: str) -> frozenset[str]:
        """The variable holds nothing any more; what it held."""
        held = frozenset(self._holds[variable])
        self._holds[variable].clear()
        self.forget(variable)
        return held

    def fresh(self, value: str, wish: str) -> str:
        """A variable that holds nothing yet."""
        variable = self._names.take(wish)
        for asked in {wish, variable}:
            self._like.setdefault(asked, []).append(variable)
        return self._bind(value, variable)

    def listed(self, values: Sequence[str], wish: str) -> str:
        """A variable for a list of values, which holds nothing else later."""
        variable = self._names.take(wish)
        for value in values:
            self._bind(value, variable)
        return variable

    def rename(self, variable: str, new: str, position: int) -> bool:
        """Lets a variable that is free before a position hold what another does, if it can."""
        held, old = self._holds.get(variable, set()), self._holds.get(new)
        if old is None and (new in self._names or self._names.take(new) != new):
            return False
        kinds = {self._kind(value) for value in (*held, *(old or ()))}
        if not held or len(kinds) > 1 or (old and not self.free(new, position - 1)):
            return False
        self._like.setdefault(new, [new])
        self._holds[new], self._holds[variable] = held, set()
        self._of.update(dict.fromkeys(held, new))
        self._watched[new] = None
        return True

    def alias(self, value: str, of: str) -> str | None:
        """The variable of the value `of` for `value` too: both are one tensor."""
        variable = self._of.get(of)
        return None if variable is None else self._bind(value, variable)

    def hold(self, values: Mapping[str, str]) -> None:
        """Variables from here on hold these values, and nothing else."""
        for variable in values.values():
            self._holds[variable].clear()
        for value, variable in values.items():
            self._holds[self._of[value]].discard(value)
            self._bind(value, variable)

    def held(self, variable: str) -> Collection[str]:
        return self._holds.get(variable, frozenset())

    def holder(self, value: str) -> str | None:
        """The variable that still holds a value."""
        variable = self._of.get(value)
        return variable if variable and value in self._holds[variable] else None

    def free(self, variable: str, position: int) -> bool:
        """Whether nothing that a variable holds is read after a position."""
        return all(self._last_use.get(old, -1) <= position for old in self._holds[variable])

    def _reused(self, value: str, wish: str, position: int) -> str | None:
        """A variable of that name, or of it with a number, that holds nothing of use any more."""
        for variable in self._like.get(wish, ()):
            if all(self._dead(value, old, position) for old in self._holds[variable]):
                return variable
        return None

    def _bind(self, value: str, variable: str) -> str:
        self._holds.setdefault(variable, set()).add(value)
        self._of[value] = variable
        self._watched[variable] = None
        return variable

    def _dead(self, value: str, old: str, position: int) -> bool:
        return self._last_use.get(old, -1) <= position and self._kind(old) == self._kind(value)


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
        listed: values that stand in lists, in which loops gather them.
        spelled: sizes that are written out wherever they are read, `(h - 1) // 2`.
    """

    count: dict[str, int]
    last: dict[str, int]
    reader: dict[str, Op]
    chosen: frozenset[str]
    partner: dict[str, str]
    loops: tuple[tuple[int, int], ...] = ()
    listed: frozenset[str] = frozenset()
    spelled: frozenset[str] = frozenset()

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
        if value not in reader:  # it is returned
            return False
        compares = isinstance(made, FunctionCall) and BINARY.get(made.function, ("", None))[1]
        choice = reader[value].call.args[:1]
        return (
            compares is Binding.COMPARISON
            and may_leave_out(reader[value].call)
            and choice == (ByMode(Ref(value), False),)
        )

    @classmethod
    def of(
        cls,
        ops: Sequence[Op],
        returns: Sequence[str],
        asked: Collection[str] = (),
        sizes: Collection[str] = (),
    ) -> Uses:
        """The uses in a method or region.

        Args:
            asked: results of `x.shape` and the like that are kept in a variable.
            sizes: values that follow from sizes.
        """
        count: dict[str, int] = {}
        last: dict[str, int] = {}
        reader: dict[str, Op] = {}
        chosen: set[str] = set()
        partner: dict[str, str] = {}
        mode = {value: op.mode for op in ops for value in op.outputs}
        begun = {loop: place for place, op in enumerate(ops) if (loop := loop_begun(op))}
        # What the last round makes and is given has a variable there; after it, it is in a list.
        first = {
            value: values[0]
            for loop in begun
            for values in loop.gathered
            for value in values
            if value in loop.own
        }
        for position, op in enumerate(ops):
            arguments = op.arguments
            for value in value_names(arguments):
                if value in first and first[value] in op.inputs:
                    continue
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
            if value in first and first[value] in returns:
                continue
            count[value] = count.get(value, 0) + 1
            last[value] = END
        spelled = _spelled(ops, sizes, returns)
        for op in reversed(ops):
            written = is_attribute(op.call) or cls.is_condition(op, count, reader)
            written = written or op.result in spelled
            if written and not set(asked).issuperset(op.outputs):
                for value in op.inputs:
                    last[value] = max(last[value], *(last.get(v, -1) for v in op.outputs))
        ended = {loop: place for place, op in enumerate(ops) if (loop := loop_ended(op))}
        loops = tuple((place, ended[loop]) for loop, place in begun.items())
        listed = frozenset(value for loop in begun for value in loop.listed)
        return cls(count, last, reader, frozenset(chosen), partner, loops, listed, spelled)


def _spelled(ops: Sequence[Op], sizes: Collection[str], returns: Collection[str]) -> frozenset[str]:
    """The results of arithmetic of sizes that no statement of the user's makes: it is written where
    they are read, once or in such arithmetic alone."""
    readers: dict[str, list[Op]] = {}
    for op in ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)

    def is_arithmetic(op: Op) -> bool:
        made = op.call
        plain = isinstance(made, FunctionCall) and made.function in BINARY
        return plain and op.result in sizes and op.mode is Mode.ALWAYS

    found: set[str] = set()
    for op in filter(is_arithmetic, ops):
        value = str(op.result)
        first, *others = readers.get(value, [op])
        statement = statement_at(op.source)
        within = statement is not None and statement_at(first.source) == statement
        alone = not others and first.inputs.count(value) == 1
        if within and value not in returns and (alone or all(map(is_arithmetic, (first, *others)))):
            found.add(value)
    return frozenset(found)


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
    if len(around) != len(op.inputs) + 1:
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
