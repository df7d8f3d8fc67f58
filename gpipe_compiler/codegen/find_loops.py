"""Finds the loops of a method: rounds of ops that are alike, one after another."""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.constructors import ModuleNode
from gpipe_compiler.codegen.expressions import Counted, OwnModule
from gpipe_compiler.codegen.loops import (
    DIGITS,
    Growing,
    InList,
    Loop,
    MadeInRound,
    PartKind,
    SameInAll,
    are_apart,
    begin,
    call_arguments,
    calls_module,
    end,
    form_of,
    parts_of,
)
from gpipe_compiler.codegen.sources import begins_with_module, is_repeated, statement_at
from gpipe_compiler.ir import FunctionCall, Graph, Mode, ModuleCall, Op, Ref, RegionCall, StateRef
from gpipe_compiler.ir.arguments import leaves, map_argument
from gpipe_compiler.ir.forms import structure
from gpipe_compiler.ir.ops import called

LONGEST = 200
"""Ops of a round, at most."""

TRIES = 4
"""Lengths of rounds that are tried at one op."""


@dataclass(frozen=True)
class LoopFinder:
    """Finds loops.

    Attributes:
        functions: the names of functions, by the paths of their calls.
        worth: the storages that are worth letting go of; those of the last rounds are added that
            stand for others.
    """

    graph: Graph
    functions: Mapping[str, str]
    holders: Mapping[str, ModuleNode]
    worth: set[int]
    draws: Mapping[str, int]

    def looped(self, ops: Sequence[Op], returns: Collection[str]) -> tuple[Op, ...]:
        """Ops of a method, with loops in place of what repeats."""
        forms: dict[Hashable, int] = {}
        keys = [forms.setdefault(self._key(op), len(forms)) for op in ops]
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        makers = {value: place for place, op in enumerate(ops) for value in op.outputs}
        last = {value: place for place, op in enumerate(ops) for value in op.inputs}
        last.update(dict.fromkeys(returns, len(ops)))
        found: list[Op] = []
        place = 0
        while place < len(ops):
            alike = places[keys[place]]
            index = bisect_right(alike, place)
            sizes = [other - place for other in alike[index : index + TRIES]]
            rounds = (
                _Rounds(self, ops, keys, place, size, makers, last)
                for size in sizes
                if size <= LONGEST
            )
            made = next((item for item in rounds if item.find()), None)
            if made is None:
                found.append(ops[place])
                place += 1
            else:
                found.extend(made.written())
                place += made.size * made.count
        return tuple(found)

    def _key(self, op: Op) -> Hashable:
        """Equal for ops that may be those of one place in different rounds."""
        made = op.call
        if isinstance(made, RegionCall) or op.mode is not Mode.ALWAYS:
            return op.name
        own: Hashable = called(made)
        if isinstance(made, ModuleCall):
            own = self.functions.get(made.module) or DIGITS.sub("", made.module)
        elif isinstance(made, FunctionCall):
            own = id(made.function)
        arguments = call_arguments(made)
        return (
            type(made),
            own,
            structure(arguments),
            tuple(map(form_of, leaves(arguments))),
            len(op.outputs),
            self.draws.get(op.name),
            bool(op.layer),
        )

    def holds(self, path: str) -> bool:
        """Whether a module or state stands where the model has it."""
        holder = self.holders.get(path.rpartition(".")[0])
        return holder is not None and path.rpartition(".")[2] in holder.members

    def is_whole(self, path: str, keys: Sequence[str]) -> bool:
        """Whether these are the keys of all modules of a list, in order."""
        holder = self.holders[path]
        return list(holder.members) == list(keys) and all(map(holder.is_keyed, keys))


@dataclass
class _Rounds:
    """Ops from a place on as rounds of this length.

    Attributes:
        forms: of the ops, the same for ops that may be those of one place in different rounds.
        makers: the places of the ops that make the values.
        last: the places of the ops that read them last.
        kinds: what the parts of the first round are to those of the others, by the places of the
            op and of the part.
        keys: of the modules that the rounds call.
        initial: what the first round is given, by the place and output that the others are given.
    """

    finder: LoopFinder
    ops: Sequence[Op]
    forms: Sequence[int]
    start: int
    size: int
    makers: Mapping[str, int]
    last: Mapping[str, int]
    count: int = 1
    kinds: dict[tuple[int, int], PartKind] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    initial: dict[tuple[int, int], str] = field(default_factory=dict)

    def find(self) -> bool:
        """Whether there are several rounds, and nothing but the last is read after them."""
        sources = (op.source for op in self._round(0) if op.source is not None)
        if not (any(map(is_repeated, sources)) or any(map(calls_module, self._round(0)))):
            return False
        while self._ends(self.count - 1) and self._is_round(self.count):
            self.count += 1
            if self.count == 2 and not (self.initial and self._is_users()):
                return False
        return self.count > 1

    def _ends(self, number: int) -> bool:
        """Whether nobody but the round after it reads what a round makes."""
        end = self._begin(number + 2)
        made = (value for op in self._round(number) for value in op.outputs)
        return all(self.last.get(value, -1) < end for value in made)

    def _begin(self, number: int) -> int:
        return self.start + number * self.size

    def _round(self, number: int) -> Sequence[Op]:
        return self.ops[self._begin(number) : self._begin(number + 1)]

    def _is_users(self) -> bool:
        """Whether these are rounds of a loop of the user's, from where it begins, or of modules."""
        first = self._round(0)
        repeated = [op.source for op in first if op.source is not None and is_repeated(op.source)]
        lines = [known.line for source in repeated if (known := statement_at(source))]
        listed = {place for (place, _), kind in self.kinds.items() if isinstance(kind, InList)}
        if len(lines) < self.size:
            return bool(listed) or (self.size == 1 and isinstance(first[0].call, ModuleCall))
        calls = [*map(calls_module, first)]
        opens = begins_with_module(repeated[0])
        alike = zip(calls, lines, strict=True)
        others = any(own is opens and line == lines[0] for own, line in alike)
        return lines[0] == min(lines) and (calls[0] is opens or not others)

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
        functions = self.finder.functions
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
        holder = self.finder.holders.get(around)
        listed = holder is not None and all(map(holder.is_keyed, (words[place], others[place])))
        decimal = words[place].isdecimal() and others[place].isdecimal()
        held = self.finder.holds(first) and self.finder.holds(second)
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

    def written(self) -> Iterator[Op]:
        """The ops of the last round, between those of the loop."""
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
        first = dataclasses.replace(last[0], source=None)
        arguments = (loop, *map(Ref, self.initial.values()))
        yield dataclasses.replace(
            first, name=label, call=FunctionCall(begin, arguments), result=tuple(carried)
        )
        body = [self._counted(op, place, label, loop.numbers) for place, op in enumerate(last)]
        yield from self.finder.looped(body, loop.after.union(carried.values()))
        arguments = (loop, *map(Ref, (*carried.values(), *outer)))
        yield dataclasses.replace(
            first, name=f"{label}(end)", call=FunctionCall(end, arguments), result=None
        )

    def _loop(self, carried: Mapping[str, str]) -> Loop:
        made = [value for op in self._round(self.count - 1) for value in op.outputs]
        after = (v for v in made if self.last.get(v, -1) >= self._begin(self.count))
        listed = (kind.around for kind in self.kinds.values() if isinstance(kind, InList))
        lists, keys = tuple(dict.fromkeys(listed)), tuple(self.keys[: self.count])
        return Loop(
            lists,
            keys,
            all(self.finder.is_whole(path, keys) for path in lists),
            self._numbers(),
            self.count,
            carried,
            frozenset((*made, *carried)),
            frozenset(after),
            frozenset(self._unlike(made)),
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
        if numbers is None or isinstance(made, RegionCall):
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
        values = self.finder.graph.values
        for value, other in self._others(made):
            known = [values.get(item) for item in (value, other)]
            shapes = [(item.dims, item.batch_dim) if item else None for item in known]
            if shapes[0] != shapes[1]:
                yield value

    def _let_go(self, made: Sequence[str]) -> None:
        """Lets go of what the last round makes where another round has to."""
        values, worth = self.finder.graph.values, self.finder.worth
        for value, other in self._others(made):
            if value in values and other in values and values[other].storage in worth:
                worth.add(values[value].storage)
