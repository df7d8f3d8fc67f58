"""The order that writes in place demand, beyond what data flow says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.passes.effects import Effects

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that is written: who touches it (in order), who writes it, who must stay together."""

    touchers: list[str]
    writers: set[str]
    bound: set[str]


def written_memory(graph: Graph, effects: Effects, ops: Sequence[Op]) -> Iterator[Memory]:
    """All memory that some of these ops write, with those of them that touch it.

    Args:
        ops: in the order of the graph.
    """
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

    A later op, not of the loss, overwrites what they read or reads what they write. What they are
    computed from cannot wait either.
    """
    late = graph.replace(held=frozenset()).loss_only
    if not late:
        return frozenset()
    before: dict[str, set[str]] = {}
    for memory in written_memory(graph, effects, graph.ops):
        for first, second in around_writes(memory):
            before.setdefault(second, set()).add(first)
    for op in graph.ops:
        makers = (graph.producer.get(name) for name in op.inputs)
        before.setdefault(op.name, set()).update(m.name for m in makers if m is not None)
    found: set[str] = set()
    for op in reversed(graph.ops):
        if op.name not in late or op.name in found:
            found |= before[op.name] & late
    return frozenset(found)
