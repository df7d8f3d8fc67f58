"""When a method can let go of its values.

A local variable holds its tensor to the end of the method, unless it is bound anew or deleted. For
what the stage has no room to hold so long (`peaks`), the body binds names anew where it can, writes
ops that would nest as statements of their own where a variable would outlive its use in them, and
deletes the rest.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from gpipe_compiler.codegen.expressions import ExpressionWriter, runs_again
from gpipe_compiler.codegen.layout import WIDTH, name
from gpipe_compiler.codegen.methods import Method
from gpipe_compiler.codegen.statements import Statement
from gpipe_compiler.codegen.variables import END, Variables, is_attribute
from gpipe_compiler.ir import Graph, Mode, Op
from gpipe_compiler.ir.blocks import BlockCall, Part
from gpipe_compiler.ir.classes import MethodBlocks
from gpipe_compiler.passes.saved_tensors import OpRun


@dataclass(frozen=True, slots=True)
class Releases:
    """The ends of the memory of a method's values.

    Attributes:
        ends: for each value that is worth letting go of, the position of the last op that reads it
            or what shares its memory.
        asked: results of `x.shape` and the like that are used when the memory of x has ended, and
            so are not to be written where they are used.
    """

    ends: Mapping[str, int]
    asked: frozenset[str]

    @classmethod
    def of(
        cls, graph: Graph, ops: Sequence[Op], method: Method, worth: Collection[int]
    ) -> Releases:
        """Those of a method; who calls it holds its arguments to the end."""
        last: dict[str, int] = {}
        for position, op in enumerate(ops):
            last.update(dict.fromkeys((*op.outputs, *op.inputs), position))
        last.update(dict.fromkeys((*method.returns, *method.arguments), END))
        values = graph.values
        storages = {value: values[value].storage for value in last if value in values}
        ends: dict[int, int] = {}
        for value, storage in storages.items():
            ends[storage] = max(ends.get(storage, -1), last[value])
        found = {v: ends[storage] for v, storage in storages.items() if storage in worth}
        asked = {
            value
            for op in ops
            if is_attribute(op.call)
            for value in op.outputs
            if any(found.get(name, END) < last[value] for name in op.inputs)
        }
        return cls(found, frozenset(asked))

    def worth(self, values: Iterable[str]) -> bool:
        """Whether something of these is worth letting go of, now or later."""
        return not self.ends.keys().isdisjoint(values)

    def done(self, values: Iterable[str], position: int) -> bool:
        """Whether something worth it has ended with the op at a position or before."""
        return any(self.ends.get(value, END) <= position for value in values)


_DELETE = "del "
_LONGEST = WIDTH - 12
"""Characters of a statement, which may stand inside of others."""


@dataclass
class DelWriter:
    """Deletes the variables of a method that hold what nobody reads any more.

    Attributes:
        modes: of the ops that make the values; arguments are there in both.
        last: the position of the last op, after which all variables die.
        idle: variables to be deleted as soon as a statement is one of both modes.
    """

    variables: Variables
    releases: Releases
    writer: ExpressionWriter
    modes: Mapping[str, Mode] = field(default_factory=dict)
    last: int = END
    idle: list[str] = field(default_factory=list)

    def ending(self, position: int) -> list[str]:
        """The variables that nobody reads from here on and whose memory is worth letting go of."""
        found = []
        for variable, held in tuple(self.variables.dead(position)):
            if self.releases.done(held, position):
                found.append(variable)
            elif not self.releases.worth(held):
                self.variables.forget(variable)
        return found

    def before(self, op: Op, statements: list[Statement]) -> None:
        """Deletes before the statement of an op what has waited for one of both modes."""
        if self.idle and op.mode is Mode.ALWAYS:
            _delete(self.idle, op, Mode.ALWAYS, statements)
            self.idle.clear()

    def bound(self, variable: str) -> None:
        """A variable has just been bound anew."""
        if variable in self.idle:
            self.idle.remove(variable)

    def after(self, op: Op, position: int, statements: list[Statement]) -> None:
        """Deletes after the statement of an op what has ended with it."""
        for variable in self.ending(position) if position < self.last else ():
            if variable == self.writer.anchor and not self._other_anchor():
                self.variables.forget(variable)
                continue
            made = {
                self.modes.get(value, Mode.ALWAYS) for value in self.variables.release(variable)
            }
            if made == {op.mode} or (len(made) == 1 and op.mode is Mode.ALWAYS):
                _delete((variable,), op, made.pop(), statements)
            else:
                self.idle.append(variable)

    def _other_anchor(self) -> bool:
        """Lets the device be read off another tensor, if one is there in both modes."""
        for variable, held in self.variables.tensors():
            modes = {self.modes.get(value, Mode.ALWAYS) for value in held}
            if variable != self.writer.anchor and modes == {Mode.ALWAYS}:
                self.writer.follow(variable)
                return True
        return False


def _delete(variables: Sequence[str], op: Op, mode: Mode, statements: list[Statement]) -> None:
    """Adds `del a, b`, or the variables to such a statement that stands there and has room."""
    listed = ", ".join(variables)
    before = statements[-1]
    longer = f"{before.expression.flat}, {listed}"
    if longer.startswith(_DELETE) and before.mode is mode and len(longer) <= _LONGEST:
        statements.pop()
    else:
        longer = _DELETE + listed
    statements.append(Statement("", name(longer), mode, op.module))


NO_OTHERS: Mapping[int, int] = MappingProxyType({})

SMALL = 1000
"""One part in this many of a peak is not worth a line."""


@dataclass(frozen=True, slots=True)
class _Need:
    """What a part takes beside its inputs.

    Attributes:
        peak: bytes, at most, with what it makes.
        kept: bytes that autograd keeps after it, of no value that others see.
        saved: the storages that autograd keeps.
    """

    peak: int = 0
    kept: int = 0
    saved: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Curve:
    """What a method holds beside its arguments, where all memory ends with its last use.

    Attributes:
        before: bytes before each part.
        needs: of each part.
        ending: for each part the storages that end with it, and their bytes.
        after: bytes in the end.
    """

    before: list[int]
    needs: list[_Need]
    ending: list[list[tuple[int, int]]]
    after: int

    @property
    def peak(self) -> int:
        pairs = zip(self.before, self.needs, strict=True)
        return max((now + need.peak for now, need in pairs), default=0)


@dataclass
class Peaks:
    """Finds what the methods of one stage have to let go of.

    Attributes:
        segments: by name, what runs again in the backward.
        worth: the storages found, as the first call of each block numbers them; those of all
            stages, which have blocks in common.
    """

    graph: Graph
    runs: Mapping[str, OpRun]
    blocks: MethodBlocks
    segments: Mapping[str, BlockCall]
    worth: set[int]
    _known: dict[tuple[int, bool], _Need] = field(default_factory=dict)

    @cached_property
    def _bytes(self) -> Mapping[int, int]:
        """Bytes of every storage that an op makes, by number."""
        found: dict[int, int] = {}
        for op in self.graph.ops:
            run = self.runs.get(op.name)
            for value, size in zip(op.outputs, run.sizes if run else (), strict=False):
                found.setdefault(self._storage(value), size)
        return found

    def _storage(self, value: str) -> int:
        known = self.graph.values.get(value)
        return -1 if known is None else known.storage

    def _storages(self, values: Iterable[str]) -> frozenset[int]:
        return frozenset(map(self._storage, values)) - {-1}

    def method(self, content: BlockCall, first: Mapping[int, int] = NO_OTHERS) -> None:
        """Takes note of what a method and the blocks in it have to let go of.

        Args:
            first: as in `_fill`.
        """
        peak = self._curve(content, saves=True).peak
        self._fill(content, peak + peak // SMALL, first, saves=True)

    def _fill(
        self, content: BlockCall, limit: int, first: Mapping[int, int], *, saves: bool
    ) -> None:
        """Fills the room below a limit; what does not fit is worth letting go of.

        Args:
            first: the storages of the content as the first call of its block numbers them.
        """
        curve = self._curve(content, saves=saves)
        tiny = limit // SMALL // max(len(content.parts), 1)  # bytes: all of them are no more
        longer = [0] * (len(content.parts) + 1)  # bytes, by the part after which they still live
        room = math.inf
        for place in reversed(range(len(content.parts))):
            for storage, size in sorted(curve.ending[place], key=lambda item: item[1]):
                if size <= room:
                    room -= size
                    longer[place + 1] += size
                elif size > tiny:
                    self.worth.add(first.get(storage, storage))
            room = min(room, limit - curve.before[place] - curve.needs[place].peak)
        held = 0
        for place, part in enumerate(content.parts):
            held += longer[place]
            self._fill_part(part, limit - curve.before[place] - held, saves=saves)

    def _fill_part(self, part: Part, limit: int, *, saves: bool) -> None:
        first: Mapping[int, int] = NO_OTHERS
        if isinstance(part, BlockCall):
            block = self.blocks.of_path[part.path].first
            pairs = zip(_outputs(part), _outputs(block), strict=True)
            first = {self._storage(one): self._storage(other) for one, other in pairs}
        again = self._again(part)
        if again is not None:
            self._fill(again, limit, first, saves=False)
            self.method(again, first)
        elif isinstance(part, BlockCall):
            self._fill(part, limit, first, saves=saves)

    def _again(self, part: Part) -> BlockCall | None:
        """What runs again in the backward, of a call that does."""
        if isinstance(part, BlockCall):
            return part if part.again else None
        # An op inside may have the name of its segment.
        return self.segments.get(part.name) if runs_again(part.call) else None

    def _need(self, part: Part, *, saves: bool) -> _Need:
        key = id(part), saves
        if key not in self._known:
            self._known[key] = self._found(part, saves=saves)
        return self._known[key]

    def _found(self, part: Part, *, saves: bool) -> _Need:
        again = self._again(part)
        if again is not None:
            peak = self._curve(again, saves=False).peak
            return _Need(peak, 0, self._storages(part.inputs))
        if isinstance(part, BlockCall):
            made = self._storages(part.outputs) - self._storages(part.inputs)
            curve = self._curve(part, saves=saves)
            saved = (self._need(inner, saves=saves).saved for inner in part.parts)
            kept = curve.after - sum(self._bytes.get(storage, 0) for storage in made)
            return _Need(curve.peak, kept, frozenset().union(*saved))
        run = self.runs.get(part.name)
        if run is None:
            return _Need()
        if not saves:
            return _Need(run.peak)
        return _Need(run.peak, run.kept, self._storages(run.saved))

    def _curve(self, content: BlockCall, *, saves: bool) -> _Curve:
        needs = [self._need(part, saves=saves) for part in content.parts]
        last: dict[int, int] = {}
        for place, part in enumerate(content.parts):
            last.update(dict.fromkeys(self._storages((*part.inputs, *part.outputs)), place))
        staying = self._storages((*content.inputs, *content.outputs))
        staying = staying.union(*(need.saved for need in needs))
        seen = set(self._storages(content.inputs))
        before: list[int] = []
        ending: list[list[tuple[int, int]]] = [[] for _ in needs]
        now = 0
        for place, (part, need) in enumerate(zip(content.parts, needs, strict=True)):
            before.append(now)
            now += need.kept
            for storage in self._storages(part.outputs) - seen:
                size = self._bytes.get(storage, 0)
                seen.add(storage)
                now += size
                if size and storage not in staying:
                    ending[last[storage]].append((storage, size))
            now -= sum(size for _, size in ending[place])
        return _Curve(before, needs, ending, now)


def _outputs(call: BlockCall) -> tuple[str, ...]:
    return tuple(value for part in call.parts for value in part.outputs)
