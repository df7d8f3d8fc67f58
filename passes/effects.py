"""What each op writes in place, and which values share memory.

Data edges order an op after the ops whose results it reads. A write in place orders more: whoever
read the old content comes before, whoever reads it afterwards comes after. This table is what the
passes that need those orders ask (`atoms`, `duplicate`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from gpipe_compiler.ir import Graph, ModuleCall, Op, RegionCall
from gpipe_compiler.ir.arguments import choices
from gpipe_compiler.passes.blocks import Blocks, IrregularError, Meaning
from gpipe_compiler.passes.disjoint import DisjointSets
from gpipe_compiler.passes.dry_run import DryRun, modes, storage_key, tensors_in
from gpipe_compiler.passes.watch import DispatchWatch

_NOTHING: frozenset[str] = frozenset()

_UNDECLARED: Mapping[torch._ops.OpOverload, tuple[tuple[int, ...], int]] = {
    torch.ops.aten.native_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.cudnn_batch_norm.default: ((3, 4), 5),
    torch.ops.aten.miopen_batch_norm.default: ((3, 4), 5),
}
"""Ops that write although their schema does not say so: positions of the written arguments, and
of the flag (training) with which they do."""


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


@dataclass(frozen=True, eq=False)
class WatchedRun:
    """A graph run once in one mode on fake tensors, with what each op writes.

    Attributes:
        environment: every value by name; keeps the storages alive that `written` has the keys of.
    """

    run: DryRun
    environment: Mapping[str, Any]
    written: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, graph: Graph, batch_size: int, *, training: bool) -> WatchedRun:
        """The graph run for so many samples.

        Raises:
            ModelError: naming the op that cannot run.
        """
        run = DryRun.of(graph, training=training)
        watch = WriteWatch()
        # The tensors that written storages belong to are alive to the end of the run if another op
        # can see them, so the keys are still theirs then.
        written: dict[str, frozenset[int]] = {}

        def observer(op: Op, execute: Callable[[], Any]) -> Any:
            watch.written.clear()
            with watch:
                returned = execute()
            written[op.name] = frozenset(watch.written)
            return returned

        return cls(run, run.run(batch_size, observer), written)


def effects(graph: Graph, seen: Sequence[WatchedRun] = ()) -> Effects:
    """The effects of every op in its mode, found by watching a run on fake tensors.

    Args:
        seen: runs of the shortest graph (`passes.blocks`) at the graph's batch size, one for each
            of its `modes`, where there are any.

    Raises:
        ModelError: naming the op that cannot run.
    """
    return graph.once("effects", lambda: _all_effects(graph, seen))


def _all_effects(graph: Graph, seen: Sequence[WatchedRun]) -> Effects:
    blocks = Blocks.of(graph)
    if blocks is None:
        return _effects(graph, seen)
    with contextlib.suppress(IrregularError):
        return _by_blocks(blocks, _effects(blocks.short, seen))
    return _effects(graph, ())


def _by_blocks(blocks: Blocks, known: Effects) -> Effects:
    """The effects in a graph, from those in its short form."""
    writes, state_writes, aliases, state_aliases = (dict[str, frozenset[str]]() for _ in range(4))
    short = blocks.short

    def add_value(name: str, old: str, meaning: Meaning) -> None:
        for table, row, change in (
            (aliases, known.aliases.get(old), meaning.value),
            (state_aliases, known.state_aliases.get(old), meaning.state),
        ):
            if row is not None:
                table[name] = frozenset(map(change, row))

    for source in blocks.graph.inputs:
        add_value(source.name, source.name, blocks.outside)
    for op, told, meaning in blocks.known():
        if told in known.writes:
            writes[op.name] = frozenset(map(meaning.value, known.writes[told]))
        if told in known.state_writes:
            state_writes[op.name] = frozenset(map(meaning.state, known.state_writes[told]))
        for name, old in zip(op.outputs, short.op_of[told].outputs, strict=True):
            add_value(name, old, meaning)
    return Effects(writes, state_writes, aliases, state_aliases)


def _effects(graph: Graph, seen: Sequence[WatchedRun]) -> Effects:
    found = _Collected()
    observed = modes(graph)
    size = graph.batch_size
    for run in seen or [WatchedRun.of(graph, size, training=mode) for mode in observed]:
        _observe(graph, run, found)
    if (
        found.writes
        and False not in observed
        and any(_may_share_by_mode(graph, op) for op in graph.ops)
    ):
        _observe(graph, WatchedRun.of(graph, size, training=False), found)
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
    return any(True for _ in choices((op.call.args, dict(op.call.kwargs))))


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


class WriteWatch(DispatchWatch):
    """Collects the storages that aten ops write.

    Attributes:
        written: keys of the storages, to be cleared by the owner. They are told apart only as
            long as the tensors live, so ask right after the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Notes what the op has written."""
        if func in _UNDECLARED:
            positions, flag = _UNDECLARED[func]
            if args[flag]:
                self._add([args[position] for position in positions])
        elif func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    by_position = position < len(args) and not argument.kwarg_only
                    self._add(args[position] if by_position else kwargs.get(argument.name))

    def _add(self, written: object) -> None:
        self.written.update(map(storage_key, tensors_in(written)))


def _observe(graph: Graph, seen: WatchedRun, found: _Collected) -> None:
    """Adds what one mode of the graph shows."""
    run, environment, written = seen.run, seen.environment, seen.written
    states_at: dict[int, set[str]] = {}
    for name, tensor in run.states.items():
        states_at.setdefault(storage_key(tensor), set()).add(name)
    storages = {n: storage_key(v) for n, v in environment.items() if isinstance(v, torch.Tensor)}
    values_at: dict[int, set[str]] = {}
    for name, key in storages.items():
        values_at.setdefault(key, set()).add(name)
    for name, key in storages.items():
        found.aliases.setdefault(name, set()).update(values_at[key])
        if key in states_at:
            found.state_aliases.setdefault(name, set()).update(states_at[key])
    made: dict[int, set[str]] = {}
    for source in graph.inputs:
        made.setdefault(storages[source.name], set()).add(source.name)
    for op in filter(run.interpreter.runs, graph.ops):
        for key in written[op.name] & made.keys():
            found.writes.setdefault(op.name, set()).update(made[key])
        for key in written[op.name] & states_at.keys():
            found.state_writes.setdefault(op.name, set()).update(states_at[key])
        for name in op.outputs:
            if name in storages:
                made.setdefault(storages[name], set()).add(name)
