"""What may not be cut apart, and in what order ops must run beyond what data flow says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.ir import Graph, Mode, Op, ValueKind
from gpipe_compiler.ir.left_out import may_leave_out, with_all_layers
from gpipe_compiler.passes.disjoint import DisjointSets
from gpipe_compiler.passes.effects import Effects, Pair, around_writes, written_memory
from gpipe_compiler.passes.observe import observed
from gpipe_compiler.runtime.spec import Precision


@dataclass(frozen=True, slots=True)
class Tie:
    """Ops that must share a stage, the one of them to name, and why, in words."""

    ops: frozenset[str]
    op: str
    why: str


@dataclass(frozen=True)
class Atoms:
    """The groups of a graph. Duplicable ops belong to no group: every stage has its own.

    Attributes:
        leader: op -> the first op of its group, in the order of the graph; an op that is free is
            its own leader.
        precedence: pairs (before, after) of ops that no data orders: after a write in place come
            the later readers and writers, before it the earlier ones. Together with data flow
            they say which orders are legal; they may repeat what data flow says.
        last_stage: the ops pinned to the last stage: those that serve only the loss, whatever
            cannot be cut off from them, and what comes after.
    """

    leader: Mapping[str, str]
    precedence: tuple[Pair, ...]
    last_stage: frozenset[str]
    ties: tuple[Tie, ...] = ()

    @cached_property
    def groups(self) -> tuple[frozenset[str], ...]:
        """The groups of two ops or more, in the order of the graph."""
        members: dict[str, set[str]] = {}
        for op, leader in self.leader.items():
            members.setdefault(leader, set()).add(op)
        return tuple(frozenset(group) for group in members.values() if len(group) > 1)


def atoms(
    graph: Graph,
    effects: Effects,
    duplicable: Collection[str] = frozenset(),
    further: Iterable[Tie] = (),
) -> Atoms:
    """The atoms of an annotated graph.

    In one group are

    - a write in place with all makers, earlier readers and earlier writers of the memory, since
      a stage that received the value would write a copy: those who read it before would read it
      too late, those who share the memory would never see it (an input of the graph is never
      written: `passes.shapes`);
    - all ops that touch a parameter or buffer that some op writes;
    - an op with the readers of a value that cannot cross a boundary: no tensor, or a tensor that
      does not split into micro-batches, or is of another type where layers are left out;
    - the ops of a layer that may be left out at random: no stage is to wait for what another one
      does not make, nor to give a gradient to what is not run;
    - an op of one mode with the readers of its values, as a boundary is the same in both modes;
    - the ops that serve only the loss.

    Groups that the data flow enters and leaves are closed over what lies between, so contracting
    them leaves the graph free of cycles.

    Args:
        duplicable: the ops that are computed wherever they are needed (`passes.duplicate`).
        further: what the target does not let be cut apart.
    """
    kept = [op for op in graph.ops if op.name not in duplicable]
    order = {op.name: index for index, op in enumerate(kept)}
    groups = DisjointSets(order)
    precedence: list[Pair] = []
    ties = list(further)
    for memory in written_memory(graph, effects, kept):
        last = max(memory.writers, key=order.__getitem__)
        ties.append(Tie(frozenset(memory.bound), last, "it writes in place what they touch"))
        precedence.extend(around_writes(memory))
    open_types = types_left_open(graph, graph.precision)
    for op in kept:
        stays = next((n for n in op.outputs if n in open_types or _stays(graph, n)), None)
        if op.mode is not Mode.ALWAYS or stays is not None:
            readers = {
                reader.name for name in op.outputs for reader in graph.consumers.get(name, ())
            }
            why = f"its result {stays} cannot be sent" if stays else "it runs in one mode alone"
            ties.append(Tie(frozenset({op.name, *readers - set(duplicable)}), op.name, why))
    layers: dict[str, list[str]] = {}
    for op in kept:
        layers.setdefault(op.layer, []).append(op.name)
    for label in filter(None, layers):
        names = layers[label]
        ties.append(Tie(frozenset(names), names[-1], "they are a layer that may be left out"))
    loss_only = [name for name in order if name in graph.loss_only]
    if loss_only:
        ties.append(Tie(frozenset(loss_only), loss_only[-1], "they serve only the loss"))
    for tie in ties:
        groups.join(tie.ops)
    edges = (*_data_edges(graph, kept), *precedence)
    groups.close(edges)
    leader = {name: groups.leader(name) for name in order}
    pinned = _followers(leader, edges, {leader[name] for name in loss_only})
    return Atoms(
        leader,
        tuple(dict.fromkeys(precedence)),
        frozenset(name for name in leader if leader[name] in pinned),
        tuple(ties),
    )


def _stays(graph: Graph, value: str) -> bool:
    """Whether a value can never cross a boundary."""
    described = graph.values[value]
    return described.kind is not ValueKind.TENSOR or not described.splittable


def _data_edges(graph: Graph, kept: list[Op]) -> Iterator[Pair]:
    names = {op.name for op in kept}
    for op in kept:
        for value in op.inputs:
            maker = graph.producer.get(value)
            if maker is not None and maker.name in names:
                yield maker.name, op.name


def _followers(leader: Mapping[str, str], edges: Iterable[Pair], first: Iterable[str]) -> set[str]:
    """These groups, by leader, and all that come after them."""
    after: dict[str, set[str]] = {}
    for before, behind in edges:
        after.setdefault(leader[before], set()).add(leader[behind])
    pending = list(first)
    found = set(pending)
    while pending:
        fresh = after.get(pending.pop(), set()) - found
        found |= fresh
        pending.extend(fresh)
    return found


# --- types that go with what is left out ----------------------------------------------------------


def types_left_open(graph: Graph, precision: Precision) -> frozenset[str]:
    """The values of a graph whose type is another, in a precision, where layers are left out.

    Under autocast a layer may make 16 bits of the 32 that are passed on where it is left out. Such
    a value cannot be sent: a stage that waits for it would have to know what was drawn.
    """
    if not any(may_leave_out(op.call) for op in graph.ops):
        return frozenset()
    return graph.once(("left_out_types", precision), lambda: _types_left_open(graph, precision))


def _types_left_open(graph: Graph, precision: Precision) -> frozenset[str]:
    graph = graph.replace(precision=precision)
    ways = [observed(with_all_layers(graph, left_out=way)).values for way in (False, True)]
    forms = {name: [way[name].form for way in ways] for name in ways[0]}
    return frozenset(
        name for name, both in forms.items() if len({form and form.dtype for form in both}) > 1
    )
