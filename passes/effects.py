"""What each op writes in place, and which values share memory.

Data edges order an op after the ops whose results it reads. A write in place orders more: whoever
read the old content comes before, whoever reads it afterwards comes after. This table is what the
passes that need those orders ask (`atoms`, `duplicate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.nn.modules.dropout import _DropoutNd

from gpipe_compiler.disjoint import DisjointSets
from gpipe_compiler.ir import Graph, ModuleCall, Op, RegionCall
from gpipe_compiler.ir.arguments import choices
from gpipe_compiler.passes.blocks import NameKind
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
        """The states that any op writes."""
        return _NOTHING.union(*self.state_writes.values())

    @property
    def written_values(self) -> frozenset[str]:
        """The values that an op other than their maker writes."""
        return _NOTHING.union(*self.writes.values())

    def alias_set(self, value: str) -> frozenset[str]:
        """The values that share memory with this one, itself included."""
        return self.aliases.get(value, frozenset((value,)))

    def states_of(self, graph: Graph, op: Op) -> frozenset[str]:
        """The states an op touches: named in its arguments, or through a value that views one."""
        viewed = (self.state_aliases.get(name, _NOTHING) for name in (*op.inputs, *op.outputs))
        return frozenset(op.states(graph.modules)).union(*viewed)


def effects(graph: Graph) -> Effects:
    """The effects of every op in its mode, found by watching a run on fake tensors.

    Raises:
        ModelError: naming the op that cannot run.
    """
    return graph.once("effects", lambda: _effects(graph))


def _effects(graph: Graph) -> Effects:
    found = _Collected()
    for run in in_all_modes(graph):
        found.add(graph, run)
    if (
        found.writes
        and False not in modes(graph)
        and any(_may_share_by_mode(graph, op) for op in graph.ops)
    ):
        found.add(graph, observed(graph, training=False))
        _close(found.aliases)
    return Effects(
        {name: frozenset(values) for name, values in found.writes.items()},
        {name: frozenset(states) for name, states in found.state_writes.items()},
        {name: frozenset(values) for name, values in found.aliases.items() if len(values) > 1},
        {name: frozenset(states) for name, states in found.state_aliases.items()},
    )


def _may_share_by_mode(graph: Graph, op: Op) -> bool:
    """Whether a result may be the argument itself in one mode and not in the other."""
    match op.call:
        case ModuleCall(module=path):
            return issubclass(graph.modules[path].cls, _DropoutNd)
        case RegionCall():
            return True
    return any(True for _ in choices(op.arguments))


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
        """Adds what one mode of the graph shows."""
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
