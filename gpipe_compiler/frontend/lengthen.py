"""From the graph of a shortened model to that of the whole one.

The shortened graph holds a first repetition of each run, two in the middle and a last one. The two
in the middle have to be the same ops, the second reading from the first what the first reads from
the one before; the missing repetitions are then more of them. Whether that is the whole model is
for `kernels` to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpipe_compiler.frontend.rename import rename
from gpipe_compiler.frontend.shorten import KEPT, Run, Shortened
from gpipe_compiler.frontend.state import state_table
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import (
    Argument,
    Call,
    Graph,
    ModuleCall,
    ModuleSpec,
    Op,
    Ref,
    RegionCall,
    Result,
    StateRef,
)
from gpipe_compiler.ir.arguments import leaves, map_argument
from gpipe_compiler.ir.legality import check
from gpipe_compiler.ir.ops import FunctionCall, MethodCall

ToName = Callable[[str], str]


def lengthen(graph: Graph, short: Shortened, whole: Subject) -> Graph | None:
    """The graph of the whole model.

    Args:
        graph: of the shortened subject.
        whole: the subject that was shortened.

    Returns:
        None where the repetitions in the graph are not alike.
    """
    pieces = [_piece(graph, run) for run in short.runs]
    if not all(piece is not None and _repeats(graph, piece) for piece in pieces):
        return None
    writer = _Writer(graph, [piece for piece in pieces if piece is not None])
    ops = tuple(writer.ops())
    table = state_table(whole.model, whole.initial)
    own = state_table(short.subject.model).states
    further = {
        writer.in_full(name): dataclasses.replace(state, name=writer.in_full(name))
        for name, state in graph.state.items()
        if name not in own
    }
    if not further.keys().isdisjoint(table.states):
        return None
    tensors = {writer.in_full(n): t for n, t in graph.tensors.items() if n not in own}
    longer = graph.replace(
        ops=ops,
        state={**table.states, **further},
        modules=writer.modules,
        tensors={**table.tensors, **tensors},
    )
    return check(rename(longer), after="lengthening")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a run stands in the ops of the shortened graph.

    Attributes:
        middle, second, last: where its second, third and last repetition begin.
    """

    run: Run
    middle: int
    second: int
    last: int


def _piece(graph: Graph, run: Run) -> _Piece | None:
    starts: list[int | None] = [None] * KEPT
    for index, op in enumerate(graph.ops):
        for path in _paths(graph, op):
            place = run.place(path)
            number = None if place is None else run.repetition(place)
            if number is not None and starts[number] is None:
                starts[number] = index
    found = [start for start in starts if start is not None]
    if len(found) < KEPT or found != sorted(found):
        return None
    return _Piece(run, *found[1:])


def _paths(graph: Graph, op: Op) -> Iterator[str]:
    """Whose forward makes the call, what it calls, and the state it reads."""
    yield op.module
    if isinstance(op.call, ModuleCall):
        yield op.call.module
    yield from op.states(graph.modules)


def _repeats(graph: Graph, piece: _Piece) -> bool:
    """Whether the two repetitions in the middle are alike, and nothing else reads the first."""
    first, second = graph.ops[piece.middle : piece.second], graph.ops[piece.second : piece.last]
    if len(first) != len(second):
        return False
    likeness = _Likeness(graph, piece.run, frozenset(n for op in first for n in op.outputs))
    if not all(map(likeness.ops, first, second)):
        return False
    rest = (*graph.ops[: piece.middle], *graph.ops[piece.last :])
    read = {name for op in rest for name in op.inputs}
    read.update(graph.output_values, () if graph.loss is None else (graph.loss.value,))
    return likeness.made.isdisjoint(read)


@dataclass
class _Likeness:
    """Holds two repetitions against each other, op by op.

    Attributes:
        made: the values of the first.
        twins: values of the first to those of the second, as far as compared.
    """

    graph: Graph
    run: Run
    made: frozenset[str]
    twins: dict[str, str] = field(default_factory=dict)

    def ops(self, one: Op, other: Op) -> bool:
        """Whether two ops are alike."""
        return (
            one.mode is other.mode
            and self._path(one.module, other.module)
            and self._calls(one.call, other.call)
            and self._results(one.result, other.result)
        )

    def _path(self, one: str, other: str) -> bool:
        return self.run.moved(one, self.run.period) == other

    def _calls(self, one: Call, other: Call) -> bool:
        if not self._arguments((one.args, dict(one.kwargs)), (other.args, dict(other.kwargs))):
            return False
        match one, other:
            case FunctionCall(), FunctionCall():
                return one.function is other.function
            case MethodCall(), MethodCall():
                return one.method == other.method
            case ModuleCall(), ModuleCall():
                return self._modules(one.module, other.module)
            case RegionCall(), RegionCall():
                return self._regions(one, other)
            case _:
                return False

    def _modules(self, one: str, other: str) -> bool:
        ours, theirs = self.graph.modules[one], self.graph.modules[other]
        return (
            self._path(one, other)
            and ours.cls is theirs.cls
            and self._arguments((ours.args, dict(ours.kwargs)), (theirs.args, dict(theirs.kwargs)))
            and ours.state.keys() == theirs.state.keys()
            and all(self._path(name, theirs.state[local]) for local, name in ours.state.items())
        )

    def _regions(self, one: RegionCall, other: RegionCall) -> bool:
        ours, theirs = one.body, other.body
        if one.context != other.context or len(ours.ops) != len(theirs.ops):
            return False
        names = frozenset((*ours.inputs, *(name for op in ours.ops for name in op.outputs)))
        pairs = dict(zip(ours.inputs, theirs.inputs, strict=True))
        inside = _Likeness(self.graph, self.run, names, pairs)
        return all(map(inside.ops, ours.ops, theirs.ops)) and inside._arguments(
            ours.outputs, theirs.outputs
        )

    def _results(self, one: Result, other: Result) -> bool:
        if isinstance(one, str) and isinstance(other, str):
            self.twins[one] = other
            return True
        if isinstance(one, tuple) and isinstance(other, tuple):
            return len(one) == len(other) and all(map(self._results, one, other))
        return one is None and other is None

    def _arguments(self, one: Argument, other: Argument) -> bool:
        """Whether arguments have one structure, and leaf by leaf mean the like."""
        ours, theirs = list(leaves(one)), list(leaves(other))
        structures = [repr(map_argument(_blank, argument)) for argument in (one, other)]
        return structures[0] == structures[1] and all(map(self._leaves, ours, theirs))

    def _leaves(self, one: Any, other: Any) -> bool:
        match one, other:
            case Ref(name=ours), Ref(name=theirs):
                if ours in self.made:
                    return self.twins.get(ours) == theirs
                # What comes from before is the same, or what the first one made.
                return ours == theirs or theirs in self.made
            case StateRef(name=ours), StateRef(name=theirs):
                return self._path(ours, theirs)
            case _:
                return type(one) is type(other) and repr(one) == repr(other)


@dataclass
class _Writer:
    """Writes the ops of the whole model down.

    Attributes:
        modules: those that the ops call.
    """

    graph: Graph
    pieces: Sequence[_Piece]
    modules: dict[str, ModuleSpec] = field(default_factory=dict)

    def ops(self) -> Iterator[Op]:
        """All ops, names not yet those to be read."""
        before = {piece.second: piece for piece in self.pieces}
        renamed: dict[str, str] = {}
        for index, op in enumerate(self.graph.ops):
            piece = before.get(index)
            if piece is not None:
                yield from self._missing(piece, renamed)
            yield self._op(op, self.in_full, lambda name: renamed.get(name, name))

    def in_full(self, path: str) -> str:
        """A path of the shortened model as the whole model calls it."""
        for piece in self.pieces:
            path = piece.run.in_full(path)
        return path

    def _missing(self, piece: _Piece, renamed: dict[str, str]) -> Iterator[Op]:
        """The repetitions that the shortened graph lacks: copies of the second in the middle.

        What that one read of the first, it is to read of the last of these: `renamed` says so
        afterwards.
        """
        run, ops = piece.run, self.graph.ops
        first, second = ops[piece.middle : piece.second], ops[piece.second : piece.last]
        made = [[name for op in part for name in op.outputs] for part in (first, second)]
        twins = dict(zip(*made, strict=True))
        last: dict[str, str] = {}  # what the repetition before made, by the names of the second
        for number in range(run.count - KEPT):
            own = {name: f"{name}%{number}" for name in made[1]}
            known = own | {a: last[b] for a, b in twins.items() if b in last}

            def path(old: str, places: int = number * run.period) -> str:
                other = [piece.run for piece in self.pieces if piece.run is not run]
                old = run.moved(old, places) if run.place(old) is not None else old
                for one in other:
                    old = one.in_full(old)
                return old

            def value(old: str, known: Mapping[str, str] = known) -> str:
                return known.get(old, old)

            for op in second:
                copy = self._op(op, path, value)
                yield dataclasses.replace(copy, name=f"{op.name}%{number}")
            last = own
        renamed.update({a: last[b] for a, b in twins.items()})

    def _op(self, op: Op, path: ToName, value: ToName) -> Op:
        """An op with its paths and values under other names."""

        def leaf(item: Any) -> Argument:
            if isinstance(item, Ref):
                return Ref(value(item.name))
            return StateRef(path(item.name)) if isinstance(item, StateRef) else item

        call = op.call
        args = map_argument(leaf, call.args)
        if isinstance(call, RegionCall):
            body = dataclasses.replace(
                call.body, ops=tuple(self._op(inner, path, str) for inner in call.body.ops)
            )
            new: Call = dataclasses.replace(call, args=args, body=body)
        else:
            new = dataclasses.replace(call, args=args, kwargs=map_argument(leaf, dict(call.kwargs)))
        if isinstance(new, ModuleCall):
            spec = self.graph.modules[new.module]
            state = {local: path(name) for local, name in spec.state.items()}
            new = dataclasses.replace(new, module=path(new.module))
            self.modules[new.module] = dataclasses.replace(spec, path=new.module, state=state)
        return dataclasses.replace(
            op, call=new, result=_result(op.result, value), module=path(op.module)
        )


def _blank(_: object) -> None:
    """What stands for every leaf where only the structure counts."""


def _result(result: Result, value: ToName) -> Result:
    if isinstance(result, str):
        return value(result)
    return tuple(_result(item, value) for item in result) if isinstance(result, tuple) else None
