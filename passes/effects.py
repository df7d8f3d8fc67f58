"""What each op writes in place, which values share memory, and in which order ops must run for it.

Data edges order an op after the ops whose results it reads. A write in place orders more: whoever
read the old content comes before, whoever reads it afterwards comes after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.nn.modules.dropout import _DropoutNd

from gpipe_compiler.ir import Graph, ModuleCall, Op
from gpipe_compiler.ir.graph import found_once
from gpipe_compiler.ir.repeats import NameKind
from gpipe_compiler.passes.disjoint import DisjointSets
from gpipe_compiler.passes.dry_run import modes
from gpipe_compiler.passes.observe import ObservedRun, Storage, in_all_modes, observed

_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Effects:
    """Writes in place and shared memory, by name; ops and values without any are left out.

    An op that fills a tensor which it has just made itself (a mask inside a dropout) writes
    nothing: only what another op could see counts. `x.view(-1)` shares memory with `x`; a slice of
    a buffer shares memory with the buffer. What an op does to Python objects is not seen.

    Attributes:
        writes: op -> values, existing before the op, whose memory it writes: the one it is called
            on and all that share memory with it.
        state_writes: op -> states (canonical names) whose memory it writes, BatchNorm's running
            statistics included.
        aliases: value -> the values that share its memory, itself included. Where memory is
            written, those count too that share it in eval mode alone, as dropout's result does.
        state_aliases: value -> the states that share its memory.
    """

    writes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    state_writes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    aliases: Mapping[str, frozenset[str]] = field(default_factory=dict)
    state_aliases: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def written_states(self) -> frozenset[str]:
        return _NOTHING.union(*self.state_writes.values())

    @property
    def written_values(self) -> frozenset[str]:
        """The values that an op other than their maker writes."""
        return _NOTHING.union(*self.writes.values())

    def alias_set(self, value: str) -> frozenset[str]:
        """The values that share memory with this one, itself included."""
        return self.aliases.get(value, frozenset((value,)))

    def unwritten(self, source: str, result: str) -> bool:
        """Whether nobody writes into what an op reads or makes, so that the two can be one."""
        shared = {*self.alias_set(source), *self.alias_set(result)}
        states = self.state_aliases.get(source, _NOTHING)
        return shared.isdisjoint(self.written_values) and states.isdisjoint(self.written_states)

    def states_of(self, graph: Graph, op: Op) -> frozenset[str]:
        """The states an op touches: named in its arguments, or through a value that views one."""
        viewed = (self.state_aliases.get(name, _NOTHING) for name in (*op.inputs, *op.outputs))
        return frozenset(op.states(graph.modules)).union(*viewed)


@found_once
def effects(graph: Graph) -> Effects:
    """The effects of every op in its mode, found by watching a run on fake tensors."""
    found = _Collected()
    for run in in_all_modes(graph):
        found.add(graph, run)
    if found.writes and False not in modes(graph) and shares_by_mode(graph):
        found.add(graph, observed(graph, training=False))
        _close(found.aliases)
    return Effects(
        {name: frozenset(values) for name, values in found.writes.items()},
        {name: frozenset(states) for name, states in found.state_writes.items()},
        {name: frozenset(values) for name, values in found.aliases.items() if len(values) > 1},
        {name: frozenset(states) for name, states in found.state_aliases.items()},
    )


def shares_by_mode(graph: Graph) -> bool:
    """Whether values may share memory in one mode that they do not share in the other."""
    return any(_may_share_by_mode(graph, op) for op in graph.ops)


def _may_share_by_mode(graph: Graph, op: Op) -> bool:
    """Whether a result may be the argument itself in one mode and not in the other."""
    match op.call:
        case ModuleCall(module=path):
            return issubclass(graph.modules[path].cls, _DropoutNd)
    return op.has_choices


def _close(aliases: dict[str, set[str]]) -> None:
    """Puts together what shares memory in one mode or the other."""
    memories = DisjointSets(aliases)
    for values in aliases.values():
        memories.join(values)
    joined: dict[str, set[str]] = {}
    for name in aliases:
        joined.setdefault(memories.leader(name), set()).add(name)
    for name in aliases:
        aliases[name] = joined[memories.leader(name)]


@dataclass
class _Collected:
    writes: dict[str, set[str]] = field(default_factory=dict)
    state_writes: dict[str, set[str]] = field(default_factory=dict)
    aliases: dict[str, set[str]] = field(default_factory=dict)
    state_aliases: dict[str, set[str]] = field(default_factory=dict)

    def add(self, graph: Graph, run: ObservedRun) -> None:
        for name, _, storage in run.tensors:
            self.aliases.setdefault(name, set()).update(run.sharing[storage])
            if storage.name.kind is NameKind.STATE:
                self.state_aliases.setdefault(name, set()).add(storage.name.name)
        made: dict[Storage, set[str]] = {}
        for source in graph.inputs:
            made.setdefault(run.values[source.name].storages[0], set()).add(source.name)
        for op in graph.ops:
            seen = run.ops.get(op.name)
            if seen is None:
                continue
            for storage in seen.written:
                if storage in made:
                    self.writes.setdefault(op.name, set()).update(made[storage])
                if storage.name.kind is NameKind.STATE:
                    self.state_writes.setdefault(op.name, set()).add(storage.name.name)
            for name in op.outputs:
                value = run.values[name]
                if value.form is not None:
                    made.setdefault(value.storages[0], set()).add(name)


# --- the order that writes demand -----------------------------------------------------------------

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that is written: who touches it (in order), who writes it, who must stay together."""

    touchers: list[str]
    writers: set[str]
    bound: set[str]


def written_memory(graph: Graph, effects: Effects, ops: Sequence[Op]) -> Iterator[Memory]:
    """All memory that some of these ops write, with those of them that touch it."""
    order = {op.name: index for index, op in enumerate(ops)}
    yield from _written_values(graph, effects, order)
    yield from _written_states(graph, effects, ops)


def _written_values(graph: Graph, effects: Effects, order: Mapping[str, int]) -> Iterator[Memory]:
    """Memory of values. Bound are all up to the last write."""
    # All values of one memory have the same alias set, so one written value speaks for them.
    memories: dict[frozenset[str], set[str]] = {}
    for op in order:
        for name in effects.writes.get(op, ()):
            memories.setdefault(effects.alias_set(name), set()).add(op)
    for memory, writers in memories.items():
        names = {op.name for value in memory for op in graph.consumers.get(value, ())}
        names |= {graph.producer[value].name for value in memory if value in graph.producer}
        # A writer may know the memory by another name: of the buffer that the values view.
        touchers = sorted(names & order.keys() | writers, key=order.__getitem__)
        last = max(order[name] for name in writers)
        bound = {name for name in touchers if order[name] <= last}
        yield Memory(touchers, writers, bound)


def _written_states(graph: Graph, effects: Effects, ops: Sequence[Op]) -> Iterator[Memory]:
    """Memory of parameters and buffers. All who touch it are bound."""
    users: dict[str, list[str]] = {}
    for op in ops:
        for state in effects.states_of(graph, op) & effects.written_states:
            users.setdefault(state, []).append(op.name)
    for state, touchers in users.items():
        writers = {name for name in touchers if state in effects.state_writes.get(name, ())}
        yield Memory(touchers, writers, set(touchers))


def around_writes(memory: Memory) -> Iterator[Pair]:
    """Each write after what touched the memory before it, each toucher after the last write."""
    last_write: str | None = None
    since: list[str] = []
    for name in memory.touchers:
        if last_write is not None:
            yield last_write, name
        if name in memory.writers:
            yield from ((earlier, name) for earlier in since)
            last_write, since = name, []
        else:
            since.append(name)


def must_run_in_place(graph: Graph, effects: Effects) -> frozenset[str]:
    """The ops that serve only the loss but cannot wait until all other ops have run.

    A later op, not of the loss, overwrites what they read or reads what they write, or the model,
    which returns its loss itself, writes by them into what else it returns. What they are computed
    from cannot wait either.
    """
    late = graph.replace(held=frozenset()).loss_only
    if not late:
        return frozenset()
    before: dict[str, set[str]] = {}
    returned = graph.output_values if graph.loss and graph.loss.returned else ()
    shown = {name for value in returned for name in effects.alias_set(value)}
    found = {name for name, values in effects.writes.items() if name in late and values & shown}
    for memory in written_memory(graph, effects, graph.ops):
        for first, second in around_writes(memory):
            before.setdefault(second, set()).add(first)
    for op in graph.ops:
        makers = (graph.producer.get(name) for name in op.inputs)
        before.setdefault(op.name, set()).update(m.name for m in makers if m is not None)
    for op in reversed(graph.ops):
        if op.name not in late or op.name in found:
            found |= before[op.name] & late
    return frozenset(found)
