"""From the graph of a shortened model to that of the whole one.

The shortened graph holds a first repetition of each run, two in the middle and a last one. If the
two in the middle are the same ops, the second reading from the first what the first reads from the
one before, then the missing repetitions are more of them. Lists that a model goes through at once,
as with `zip`, repeat together. Whether that is the whole model is for `kernels` to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gpipe_compiler.frontend.naming import rename
from gpipe_compiler.frontend.shorten import EqualRun, Shortened
from gpipe_compiler.frontend.state import state_table
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Argument, Graph, ModuleCall, ModuleSpec, Op, Ref, StateRef
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.forms import OpForms
from gpipe_compiler.ir.legality import check
from gpipe_compiler.ir.ops import map_result, with_arguments
from gpipe_compiler.ir.stretches import KEPT

ToName = Callable[[str], str]


def expand_repeats(graph: Graph, short: Shortened, whole: Subject) -> Graph | None:
    """The graph of the whole model; None where the repetitions in the graph cannot be alike."""
    pieces, forms = _pieces(graph, short.runs), OpForms(graph)
    if pieces is None or not all(_match(graph, forms, piece) for piece in pieces):
        return None
    writer = _Writer(graph, short.runs, pieces)
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
    return check(rename(longer), after="expanding repeated layers")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where runs that repeat together stand in the ops of the shortened graph.

    Attributes:
        starts: where each repetition begins.
    """

    runs: tuple[EqualRun, ...]
    starts: tuple[int, ...]

    @property
    def middle(self) -> slice:
        """The ops of the second repetition."""
        return slice(self.starts[1], self.starts[2])

    @property
    def second(self) -> slice:
        """Those of the third."""
        return slice(self.starts[2], self.starts[3])

    def meets(self, other: _Piece) -> bool:
        """Whether repetitions of both alternate."""
        alike = self.runs[0].count == other.runs[0].count
        return alike and self.starts[0] < other.starts[-1] and other.starts[0] < self.starts[-1]

    def joined(self, other: _Piece) -> _Piece:
        starts = tuple(map(min, self.starts, other.starts))
        return _Piece((*self.runs, *other.runs), starts)


def _pieces(graph: Graph, runs: Sequence[EqualRun]) -> list[_Piece] | None:
    """Where the runs stand, in order; None where the repetitions of one are out of order."""
    found: list[_Piece] = []
    for run, starts in zip(runs, _starts(graph, runs), strict=True):
        if len(starts) < KEPT:
            return None
        piece = _Piece((run,), tuple(starts[number] for number in range(KEPT)))
        for other in [other for other in found if other.meets(piece)]:
            found.remove(other)
            piece = other.joined(piece)
        found.append(piece)
    return found if all(sorted(set(p.starts)) == list(p.starts) for p in found) else None


def _starts(graph: Graph, runs: Sequence[EqualRun]) -> list[dict[int, int]]:
    """For every run, by the number of a repetition, its first op."""
    found: list[dict[int, int]] = [{} for _ in runs]
    for index, op in enumerate(graph.ops):
        for path in _paths(graph, op):
            for run, starts in zip(runs, found, strict=True):
                place = run.place(path)
                number = None if place is None else run.short.stretch.block(place)
                if number is not None:
                    starts.setdefault(number, index)
    return found


def _paths(graph: Graph, op: Op) -> Iterator[str]:
    """Whose forward makes the call, what it calls, and the state it reads."""
    yield op.module
    if isinstance(op.call, ModuleCall):
        yield op.call.module
    yield from op.states(graph.modules)


def _match(graph: Graph, forms: OpForms, piece: _Piece) -> bool:
    """Whether the ops of both repetitions in the middle are the same, but for what they are given.

    Kernels show what these are given, but not in which mode they run, nor their backwards.
    """
    first, second = (
        [*zip(map(forms.key, graph.ops[part]), _checkpoints(graph, part), strict=True)]
        for part in (piece.middle, piece.second)
    )
    return first == second


def _checkpoints(graph: Graph, part: slice) -> list[int | str]:
    """For every op of a repetition, which of the repetition's own checkpoints it runs in, by
    number; the name of one that runs other ops as well."""
    ops = graph.ops[part]
    outside = (*graph.ops[: part.start], *graph.ops[part.stop :])
    around = {"", *(op.checkpoint for op in outside)}
    own = list(dict.fromkeys(op.checkpoint for op in ops if op.checkpoint not in around))
    return [own.index(op.checkpoint) if op.checkpoint in own else op.checkpoint for op in ops]


@dataclass
class _Writer:
    """Writes the ops of the whole model down."""

    graph: Graph
    runs: Sequence[EqualRun]
    pieces: Sequence[_Piece]
    modules: dict[str, ModuleSpec] = field(default_factory=dict)

    def ops(self) -> Iterator[Op]:
        """All ops, names not yet those to be read."""
        before = {piece.second.start: piece for piece in self.pieces}
        renamed: dict[str, str] = {}
        for index, op in enumerate(self.graph.ops):
            piece = before.get(index)
            if piece is not None:
                yield from self._missing(piece, renamed)
            yield self._op(op, self.in_full, lambda name: renamed.get(name, name))

    def in_full(self, path: str) -> str:
        """A path of the shortened model as the whole model calls it."""
        for run in self.runs:
            path = run.in_full(path)
        return path

    def _missing(self, piece: _Piece, renamed: dict[str, str]) -> Iterator[Op]:
        """The repetitions that the shortened graph lacks: copies of the second in the middle.

        What that one read of the first, it is to read of the last of these: `renamed` says so
        afterwards.
        """
        first, second = self.graph.ops[piece.middle], self.graph.ops[piece.second]
        checkpoints = _checkpoints(self.graph, piece.second)
        made = [[name for op in part for name in op.outputs] for part in (first, second)]
        twins = dict(zip(*made, strict=True))
        last: dict[str, str] = {}  # what the repetition before made, by the names of the second
        for number in range(piece.runs[0].count - KEPT):
            own = {name: f"{name}%{number}" for name in made[1]}
            known = own | {a: last[b] for a, b in twins.items() if b in last}

            def path(old: str, number: int = number) -> str:
                for run in self.runs:
                    own = run in piece.runs
                    old = run.moved(old, number) if own else run.in_full(old)
                return old

            def value(old: str, known: Mapping[str, str] = known) -> str:
                return known.get(old, old)

            for op, place in zip(second, checkpoints, strict=True):
                copy = self._op(op, path, value)
                checkpoint = place if isinstance(place, str) else f"{op.checkpoint}%{number}"
                yield dataclasses.replace(copy, name=f"{op.name}%{number}", checkpoint=checkpoint)
            last = own
        renamed.update({a: last[b] for a, b in twins.items()})

    def _op(self, op: Op, path: ToName, value: ToName) -> Op:
        """An op with its paths and values under other names."""

        def leaf(item: Any) -> Argument:
            if isinstance(item, Ref):
                return Ref(value(item.name))
            return StateRef(path(item.name)) if isinstance(item, StateRef) else item

        new = with_arguments(op.call, partial(map_argument, leaf))
        if isinstance(new, ModuleCall):
            spec = self.graph.modules[new.module]
            state = {local: path(name) for local, name in spec.state.items()}
            new = dataclasses.replace(new, module=path(new.module))
            self.modules[new.module] = dataclasses.replace(spec, path=new.module, state=state)
        result = map_result(value, op.result)
        turns = tuple((path(around), turn) for around, turn in op.turns)
        regions = tuple(dataclasses.replace(r, module=path(r.module)) for r in op.regions)
        return dataclasses.replace(
            op, call=new, result=result, module=path(op.module), turns=turns, regions=regions
        )
