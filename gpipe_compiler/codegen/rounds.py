"""Ops of a method that may be the rounds of a loop: whether they are, and what it is then."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.expressions import Counted, OwnModule
from gpipe_compiler.codegen.loops import (
    Growing,
    InList,
    Loop,
    MadeInRound,
    PartKind,
    SameInAll,
    are_apart,
    begin,
    calls_module,
    end,
    gather,
    parts_of,
    stand_in_list,
)
from gpipe_compiler.codegen.module_tree import ModuleNode
from gpipe_compiler.codegen.sources import (
    begins_with_module,
    is_repeated,
    repeated_line,
    statement_at,
)
from gpipe_compiler.ir import FunctionCall, Graph, Mode, ModuleCall, Op, Ref, StateRef
from gpipe_compiler.ir.arguments import map_argument, value_names
from gpipe_compiler.ir.ops import common_regions


@dataclass(frozen=True)
class LoopContext:
    """What loops of a method are found and written with.

    Attributes:
        functions: the names of functions, by the paths of their calls.
        worth: the storages that are worth letting go of; those of the last rounds are added that
            stand for others.
    """

    graph: Graph
    functions: Mapping[str, str]
    holders: Mapping[str, ModuleNode]
    worth: set[int]

    def holds(self, path: str) -> bool:
        """Whether a module or state stands where the model has it."""
        holder = self.holders.get(path.rpartition(".")[0])
        return holder is not None and path.rpartition(".")[2] in holder.members

    def is_whole(self, path: str, keys: Sequence[str]) -> bool:
        """Whether these are the keys of all modules of a list, in order."""
        holder = self.holders[path]
        return list(holder.members) == list(keys) and all(map(holder.is_keyed, keys))


@dataclass(frozen=True)
class WrittenRounds:
    """The last round of a loop, between the two ops of the loop.

    Attributes:
        kept: what is read of it later.
    """

    begins: Op
    body: tuple[Op, ...]
    kept: frozenset[str]
    ends: Op


@dataclass
class Rounds:
    """Ops from a place on as rounds of this length.

    Attributes:
        around: the method.
        forms: of the ops, the same for ops that may be those of one place in different rounds.
        makers: the places of the ops that make the values.
        readers: the places of those that read them, in order; of what is returned, the end.
        kinds: what the parts of the first round are to those of the others, by the places of the
            op and of the part.
        keys: of the modules that the rounds call.
        initial: what the first round is given, by the place and output that the others are given.
        gathered: by the place and output of what is read of all rounds together, who reads it.
    """

    around: LoopContext
    ops: Sequence[Op]
    returns: Sequence[str]
    forms: Sequence[int]
    start: int
    size: int
    makers: Mapping[str, int]
    readers: Mapping[str, Sequence[int]]
    count: int = 1
    kinds: dict[tuple[int, int], PartKind] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    initial: dict[tuple[int, int], str] = field(default_factory=dict)
    gathered: dict[tuple[int, int], int] = field(default_factory=dict)

    def find(self) -> bool:
        """Whether there are several rounds, of which nothing but the last is read after them, or
        what all of them make together, as a list."""
        sources = (op.source for op in self._round(0) if op.source is not None)
        if not (any(map(is_repeated, sources)) or any(map(calls_module, self._round(0)))):
            return False
        while (after := self._read_after(self.count - 1)) is not None:
            if (self.count > 1 and after != self.gathered) or not self._is_round(self.count):
                break
            self.count, self.gathered = self.count + 1, after
            # Rounds are given something in every mode in which they have ops, or write in place.
            given = {self.ops[self.start + place].mode for place, _ in self.initial}
            alone = not (given or after) and len({op.mode for op in self._round(0)}) == 1
            fits = alone or given == {self._mode()}
            if self.count == 2 and not (fits and self._is_users()):
                return False
        # The last round may make something else of it: `layers[-1]`, whose result is normed first.
        if self.gathered and not self._is_gathered():
            self.count -= 1
        return self.count > 1 and self._is_gathered()

    def _read_after(self, number: int) -> dict[tuple[int, int], int] | None:
        """Who reads what a round makes, beside itself and the round after it, by place and output;
        None where several do."""
        found: dict[tuple[int, int], int] = {}
        for place, op in enumerate(self._round(number)):
            for output, value in enumerate(op.outputs):
                after = self._readers_from(value, number + 2)
                if len(after) > 1:
                    return None
                if after:
                    found[place, output] = after[0]
        return found

    def _readers_from(self, value: str, number: int) -> list[int]:
        return [place for place in self.readers.get(value, ()) if place >= self._begin(number)]

    def _values(self) -> list[tuple[str, ...]]:
        """What is gathered, of all rounds."""
        rounds = [self._round(number) for number in range(self.count)]
        return [
            tuple(ops[place].outputs[output] for ops in rounds) for place, output in self.gathered
        ]

    def _is_gathered(self) -> bool:
        """Whether what is read of all rounds is read in one list each, in order."""
        if self.count < 3 and not self.initial.keys().isdisjoint(self.gathered):
            return False  # what the last round is given is all that there is in the list before it
        return all(map(self._is_read_as_list, self._values(), self.gathered.values()))

    def _is_read_as_list(self, values: Sequence[str], reader: int) -> bool:
        if reader == len(self.ops):
            return stand_in_list(values, [[*map(Ref, self.returns)]], self.returns)
        # An op like others may become part of another loop, which is given the values one by one.
        alone = self.forms.count(self.forms[reader]) == 1
        op = self.ops[reader]
        lists = [item for item in op.call.args if isinstance(item, list)]
        return (
            alone
            and reader >= self._begin(self.count)
            and op.mode is Mode.ALWAYS
            and stand_in_list(values, lists, value_names(op.arguments))
        )

    def _begin(self, number: int) -> int:
        return self.start + number * self.size

    def _round(self, number: int) -> Sequence[Op]:
        return self.ops[self._begin(number) : self._begin(number + 1)]

    def _is_users(self) -> bool:
        """Whether these are rounds of a loop of the user's, from where it begins, or of modules."""
        first = self._round(0)
        own = [op.source for op in first if op.source is not None and is_repeated(op.source)]
        listed = any(isinstance(kind, InList) for kind in self.kinds.values())
        if len(own) < self.size and (
            listed or (self.size == 1 and isinstance(first[0].call, ModuleCall))
        ):
            return True
        # A module that a loop calls over and over is written out where its calls are unlike.
        lines = [repeated_line(op.source) for op in first]
        known = [
            (calls_module(op), place.line)
            for op, line in zip(first, lines, strict=True)
            if line is not None and (place := statement_at(line))
        ]
        if lines[0] is None or not known:
            return False
        start, opens = known[0][1], begins_with_module(lines[0])
        others = any(call is opens and line == start for call, line in known)
        return start == min(line for _, line in known) and (
            calls_module(first[0]) is opens or not others
        )

    def _mode(self) -> Mode:
        """The mode of all ops of a round, where they are of one."""
        first, *others = {op.mode for op in self._round(0)}
        return Mode.ALWAYS if others else first

    def _is_round(self, number: int) -> bool:
        """Whether the ops after this number of rounds are one more."""
        first, other = self._round(0), self._round(number)
        forms = (self.forms[self._begin(n) : self._begin(n + 1)] for n in (0, number))
        if next(forms) != next(forms):
            return False
        kinds, initial = dict(self.kinds), dict(self.initial)
        keys: set[tuple[str, str]] = set()
        for place, (one, same) in enumerate(zip(first, other, strict=True)):
            if are_apart(one, same):
                return False
            pairs = zip(parts_of(one), parts_of(same), strict=True)
            for index, (item, matching) in enumerate(pairs):
                kind = self._kind(item, matching, number, keys, initial)
                if kind is None or kinds.setdefault((place, index), kind) != kind:
                    return False
        own = [*(self.keys or [key for key, _ in keys]), *(key for _, key in keys)]
        distinct = len({*own}) == len(own) == number + 1
        if own and not (distinct and all(key == own[0] for key, _ in keys)):
            return False
        steps = {kind.step for kind in kinds.values() if isinstance(kind, Growing)}
        if len(steps) > 1 or any(
            int(key) - int(own[0]) != step * place
            for step in steps
            for place, key in enumerate(own)
        ):
            return False
        self.kinds, self.keys, self.initial = kinds, own, initial
        return True

    def _kind(
        self,
        one: object,
        other: object,
        number: int,
        keys: set[tuple[str, str]],
        initial: dict[tuple[int, int], str],
    ) -> PartKind | None:
        """What a part of a round is to that of the first one; None where they do not match."""
        match one, other:
            case Ref(name=first), Ref(name=second):
                return self._value(first, second, number, initial)
            case (
                StateRef(name=first) | OwnModule(path=first),
                StateRef(name=second) | OwnModule(path=second),
            ):
                return self._path(first, second, keys)
        if type(one) is int and type(other) is int and one != other:
            step, rest = divmod(other - one, number)
            return None if rest else Growing(step)
        return SameInAll() if type(one) is type(other) and repr(one) == repr(other) else None

    def _path(self, first: str, second: str, keys: set[tuple[str, str]]) -> PartKind | None:
        functions = self.around.functions
        if first == second or (first in functions and functions[first] == functions.get(second)):
            return SameInAll()
        words, others = first.split("."), second.split(".")
        if len(words) != len(others):
            return None
        pairs = enumerate(zip(words, others, strict=True))
        unlike = [place for place, (word, other) in pairs if word != other]
        if len(unlike) != 1:
            return None
        place = unlike[0]
        keys.add((words[place], others[place]))
        around = ".".join(words[:place])
        holder = self.around.holders.get(around)
        listed = holder is not None and all(map(holder.is_keyed, (words[place], others[place])))
        decimal = words[place].isdecimal() and others[place].isdecimal()
        held = self.around.holds(first) and self.around.holds(second)
        return InList(around) if listed and decimal and held else None

    def _value(
        self, first: str, second: str, number: int, initial: dict[tuple[int, int], str]
    ) -> PartKind | None:
        maker, own = self.makers.get(second, -1), self.makers.get(first, -1)
        if maker < self._begin(number - 1):
            return SameInAll() if first == second and maker < self.start else None
        later, place = divmod(maker - self._begin(number - 1), self.size)
        output = self.ops[maker].outputs.index(second)
        if later:
            same = own == self.start + place and self.ops[own].outputs.index(first) == output
            return MadeInRound(False, place, output) if same and later == 1 else None
        if own >= self.start or initial.setdefault((place, output), first) != first:
            return None
        return MadeInRound(True, place, output)

    def written(self) -> WrittenRounds:
        """The last round, with what stands around it."""
        before, last = self._round(self.count - 2), self._round(self.count - 1)
        carried = {
            before[place].outputs[output]: last[place].outputs[output]
            for place, output in self.initial
        }
        loop, made = self._loop(carried), [value for op in last for value in op.outputs]
        self._let_go(made)
        read = dict.fromkeys(value for op in last for value in op.inputs)
        outer = (value for value in read if value not in loop.own)
        label = f"{last[0].name}(loop)"
        around = common_regions(self.ops[self._begin(0) : self._begin(self.count)])
        first = dataclasses.replace(last[0], source=None, mode=self._mode(), regions=around)
        arguments = (loop, *map(Ref, self.initial.values()))
        begins = dataclasses.replace(
            first, name=label, call=FunctionCall(begin, arguments), result=tuple(carried)
        )
        arguments = (loop, *map(Ref, (*carried.values(), *outer)))
        ends = dataclasses.replace(
            first, name=f"{label}(end)", call=FunctionCall(end, arguments), result=None
        )
        body = tuple(self._body(last, label, loop.numbers))
        return WrittenRounds(begins, body, loop.after.union(carried.values()), ends)

    def _body(self, last: Sequence[Op], label: str, numbers: range | None) -> Iterator[Op]:
        """The ops of a round, with what it adds to lists."""
        lists = {place: number for number, place in enumerate(self.gathered)}
        for place, op in enumerate(last):
            yield self._counted(op, place, label, numbers)
            for output, value in enumerate(op.outputs):
                if (place, output) in lists:
                    own = lists[place, output]
                    call = FunctionCall(gather, (label, own, Ref(value)))
                    name = f"{op.name}({own})"
                    yield dataclasses.replace(op, name=name, call=call, result=None)

    def _loop(self, carried: Mapping[str, str]) -> Loop:
        gathered = self._values()
        together = {
            values[-1]: who for values, who in zip(gathered, self.gathered.values(), strict=True)
        }
        made = [value for op in self._round(self.count - 1) for value in op.outputs]
        after = (v for v in made if {*self._readers_from(v, self.count)} - {together.get(v)})
        listed = (kind.around for kind in self.kinds.values() if isinstance(kind, InList))
        lists, keys = tuple(dict.fromkeys(listed)), tuple(self.keys[: self.count])
        return Loop(
            lists,
            keys,
            all(self.around.is_whole(path, keys) for path in lists),
            self._numbers(),
            self.count,
            carried,
            frozenset((*made, *carried)),
            frozenset(after),
            frozenset(self._unlike(made)),
            tuple(gathered),
            next((op.source for op in self._round(0) if op.source is not None), None),
        )

    def _numbers(self) -> range | None:
        """What the rounds are numbered by: the keys of modules, else the least of the numbers."""
        parts = [parts_of(op) for op in self._round(0)]
        found = [
            (int(str(parts[place][index])), kind.step)
            for (place, index), kind in self.kinds.items()
            if isinstance(kind, Growing)
        ]
        if not found:
            return None
        start, step = min(found)
        start = int(self.keys[0]) if self.keys else start
        return range(start, start + step * self.count, step)

    def _counted(self, op: Op, place: int, label: str, numbers: range | None) -> Op:
        """An op of the last round, with what depends on the number of the round told by that."""
        made = op.call
        if numbers is None:
            return op
        index = itertools.count(int(isinstance(made, ModuleCall)))

        def leaf(item: int | None) -> object:
            by = isinstance(self.kinds[place, next(index)], Growing)
            return Counted(label, (item or 0) - numbers[-1]) if by else item

        args, kwargs = map_argument(leaf, (made.args, dict(made.kwargs)))
        return dataclasses.replace(op, call=dataclasses.replace(made, args=args, kwargs=kwargs))

    def _others(self, made: Sequence[str]) -> Iterator[tuple[str, str]]:
        """What the last round makes, each with what stands for it in another round."""
        for number in range(self.count - 1):
            others = (value for op in self._round(number) for value in op.outputs)
            yield from zip(made, others, strict=True)

    def _unlike(self, made: Sequence[str]) -> Iterator[str]:
        values = self.around.graph.values
        for value, other in self._others(made):
            known = [values.get(item) for item in (value, other)]
            shapes = [(item.dims, item.batch_dim) if item else None for item in known]
            if shapes[0] != shapes[1]:
                yield value

    def _let_go(self, made: Sequence[str]) -> None:
        """Lets go of what the last round makes where another round has to."""
        values, worth = self.around.graph.values, self.around.worth
        for value, other in self._others(made):
            if value in values and other in values and values[other].storage in worth:
                worth.add(values[value].storage)
        for gathered in self._values():
            storages = {values[value].storage for value in gathered if value in values}
            if not storages.isdisjoint(worth):
                worth.update(storages)
