"""The problem of one stage of a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpipe_compiler.ir import Graph, Mode
from gpipe_compiler.passes.effects import Effects
from gpipe_compiler.passes.remat.problem import RematOp, RematProblem, Segment, Storages
from gpipe_compiler.passes.saved_tensors import SavedTensors

_NOTHING: Storages = frozenset()


def stage_problem(
    graph: Graph,
    effects: Effects,
    saved: SavedTensors,
    seconds: Mapping[str, float],
    ops: Sequence[str],
) -> RematProblem:
    """What can run again of a stage.

    Ops that serve only the loss come last and keep what they save. What an op writes in place is
    not handed into or out of a segment before it is written: it would not be there for the second
    run as it was for the first. Nor is what an op makes in one mode alone: in the other there would
    be nothing to hand on.

    Args:
        seconds: of every op's forward.
    """
    position = {name: index for index, name in enumerate(ops)}
    numbers: dict[int, int] = {}

    def storages(found: Storages) -> Storages:
        return frozenset(numbers.setdefault(number, len(numbers)) for number in sorted(found))

    steps = []
    for name in ops:
        op = graph.op_of[name]
        reads = []
        for value in op.inputs:
            maker = graph.producer.get(value)
            place = position.get(maker.name, -1) if maker is not None else -1
            reads.append((place, storages(saved.by_value.get(value, _NOTHING))))
        steps.append(
            RematOp(
                seconds[name],
                storages(saved.by_op.get(name, _NOTHING)),
                name in saved.early,
                tuple(reads),
            )
        )
    sizes = {mine: saved.bytes[number] for number, mine in numbers.items()}
    places = _places(graph, effects, saved, ops, position)
    free = RematProblem(
        tuple(steps), tuple(sizes[mine] for mine in range(len(sizes))), tuple(sorted(places))
    )
    spans = _written(graph, effects, ops, position)
    written = tuple(span for span in spans if free.saved(span) - free.given(span))
    inside = {place for start, stop in written for place in range(start + 1, stop)}
    places = places.union(*written) - inside
    return dataclasses.replace(free, places=tuple(sorted(places)), written=written)


def _written(
    graph: Graph, effects: Effects, ops: Sequence[str], position: Mapping[str, int]
) -> list[Segment]:
    """The segments that the model itself checkpoints, as far as the stage has them.

    One that a cut goes through is one on either side. Where it may not begin or end, it does so
    further inside. What serves only the loss is in none.
    """
    barred = _barred(graph, effects, ops, position)
    spans: dict[str, list[int]] = {}
    for place, name in enumerate(ops):
        checkpoint = graph.op_of[name].checkpoint
        if checkpoint and name not in graph.loss_only:
            spans.setdefault(checkpoint, []).append(place)
    found: list[Segment] = []
    for first, *_, last in (sorted((*span, span[-1])) for span in spans.values()):
        start = max(first, found[-1][1] if found else 0)
        ends = [place for place in range(start, last + 2) if place not in barred]
        if len(ends) > 1:
            found.append((ends[0], ends[-1]))
    return found


def _places(
    graph: Graph,
    effects: Effects,
    saved: SavedTensors,
    ops: Sequence[str],
    position: Mapping[str, int],
) -> set[int]:
    end = sum(name not in graph.loss_only for name in ops)
    barred = _barred(graph, effects, ops, position)
    places = set()
    for place in range(end + 1):
        # What writes in place makes no storage of its own either; yet before it is not as after it.
        same = (
            0 < place < end
            and ops[place - 1] not in effects.writes
            and _looks_on(graph, saved, ops[place - 1])
        )
        if place not in barred and not same:
            places.add(place)
    return places


def whole_calls(
    graph: Graph,
    effects: Effects,
    seconds: Mapping[str, float],
    ops: Sequence[str],
    calls: Iterable[tuple[str, Collection[str]]],
    duplicable: Collection[str],
) -> list[tuple[Segment, ...]]:
    """The segments of a stage that are whole calls of modules and take at most half of its forward,
    by how many others lie around them: the outermost first, and then these with those inside.

    Args:
        calls: the path of a module, and the ops of the call but for those that are duplicable.
    """
    position = {name: index for index, name in enumerate(ops)}
    end = sum(name not in graph.loss_only for name in ops)
    barred = _barred(graph, effects, ops, position)
    most = sum(seconds[name] for name in ops[:end]) / 2
    found = set()
    for path, names in calls:
        places = [position.get(name, end) for name in names]
        start, stop = min(places), max(places) + 1
        own = [f"{graph.op_of[name].module}.".startswith(f"{path}.") for name in ops]
        while start and own[start - 1] and ops[start - 1] in duplicable:
            start -= 1
        while stop < end and own[stop] and ops[stop] in duplicable:
            stop += 1
        whole = stop <= end and all(own[start:stop]) and barred.isdisjoint((start, stop))
        if whole and sum(seconds[name] for name in ops[start:stop]) <= most:
            found.add((start, stop))
    around = {
        (start, stop): sum(one <= start and stop <= other for one, other in found)
        for start, stop in found
    }
    deepest = max(around.values(), default=0)
    return [
        tuple(sorted(segment for segment, count in around.items() if count <= depth))
        for depth in range(1, deepest + 1)
    ]


def _barred(
    graph: Graph, effects: Effects, ops: Sequence[str], position: Mapping[str, int]
) -> set[int]:
    """Where no segment may begin or end."""
    end = sum(name not in graph.loss_only for name in ops)
    barred: set[int] = set()
    for name in ops:
        if graph.op_of[name].mode is not Mode.ALWAYS:
            barred.update(range(position[name] + 1, _last_reader(graph, position, name, end) + 1))
        for value in effects.writes.get(name, ()):
            maker = graph.producer.get(value)
            made = position.get(maker.name, -1) if maker is not None else -1
            barred.update(range(made + 1, position[name] + 1))
    return barred


def _last_reader(graph: Graph, position: Mapping[str, int], name: str, end: int) -> int:
    """The place of the last op that reads what an op makes; the end where it is handed on."""
    values = graph.op_of[name].outputs
    readers = [op.name for value in values for op in graph.consumers.get(value, ())]
    if not set(values).isdisjoint(graph.output_values):
        return end
    return max((position.get(reader, end) for reader in readers), default=position[name])


def _looks_on(graph: Graph, saved: SavedTensors, name: str) -> bool:
    """Whether an op makes nothing but other views of what it reads: before it is as after it."""
    op = graph.op_of[name]
    made = _NOTHING.union(*(saved.by_value.get(value, _NOTHING) for value in op.outputs))
    read = _NOTHING.union(*(saved.by_value.get(value, _NOTHING) for value in op.inputs))
    return not saved.by_op.get(name) and made <= read
