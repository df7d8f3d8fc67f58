"""States a graph as a cut problem: all that is known of it and bears on where it is cut."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from gpipe_compiler.ir import Argument, Graph, Op, StateKind
from gpipe_compiler.ir.contents import prefixes
from gpipe_compiler.ir.sizes import asked
from gpipe_compiler.options import WHOLE, AnyOptimizer, Division
from gpipe_compiler.passes.atoms import Atoms, Tie, atoms
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.cut.inside import ModuleNodes, module_calls
from gpipe_compiler.passes.cut.problem import (
    GRAPH_INPUT,
    CutProblem,
    Node,
    Resident,
    Seconds,
    Traffic,
)
from gpipe_compiler.passes.duplicate import duplicable, shape_values
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.footprint import held_bytes, updated_bytes
from gpipe_compiler.passes.inplace import torn, undone
from gpipe_compiler.passes.memory_trace import MemoryTraces
from gpipe_compiler.passes.saved_tensors import SavedTensors, saved_tensors
from gpipe_compiler.runtime.sizes import Dim
from gpipe_compiler.runtime.spec import OptimizerKind

_MOST_OF_IT = 0.6
"""The share of the work from which on a stage has far too much, if it is twice an even one."""


@dataclass(frozen=True)
class CutFacts:
    """All that is known of an annotated graph and bears on where it is cut.

    Attributes:
        plain: the graph as it was before `passes.inplace`: what must stay together there, must.
        by_torn: of the graphs in which some ops are out of place again, by these ops.
    """

    graph: Graph
    costs: Costs
    effects: Effects
    duplicable: frozenset[str]
    atoms: Atoms
    saved: SavedTensors
    templates: Mapping[str, Argument]
    plain: Graph
    by_torn: dict[frozenset[str], CutFacts] = field(default_factory=dict, compare=False, repr=False)
    _traces: dict[bool, MemoryTraces] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, graph: Graph, costs: Costs, plain: Graph | None = None) -> CutFacts:
        """Runs the analyses.

        Raises:
            ModelError: naming an op that cannot run.
        """
        plain = plain or graph
        found = effects(graph)
        before = found if plain is graph else effects(plain)
        copied = duplicable(plain, before)
        return cls(
            graph,
            costs,
            found,
            copied,
            atoms(plain, before, copied),
            saved_tensors(graph),
            shape_values(plain),
            plain,
        )

    def in_stages(self, stages: Sequence[Collection[str]]) -> CutFacts:
        """The same, with no op in place on what another stage has made."""
        stage_of = {
            name: index
            for index, ops in enumerate(stages)
            for name in ops
            if name not in self.duplicable
        }
        wrong = torn(self.graph, self.plain, self.effects, stage_of)
        if not wrong:
            return self
        if wrong not in self.by_torn:
            graph = undone(self.graph, self.plain, wrong)
            self.by_torn[wrong] = replace(
                self, graph=graph, effects=effects(graph), saved=saved_tensors(graph), _traces={}
            )
        return self.by_torn[wrong]

    def memory_traces(self, *, on_host: bool) -> MemoryTraces:
        """Of its stages, as far as somebody has asked for them: they take seconds."""
        if on_host not in self._traces:
            self._traces[on_host] = MemoryTraces(self.graph, on_host=on_host)
        return self._traces[on_host]

    def tied(self, stages: Sequence[Collection[str]]) -> str:
        """What ties most of the work together, in words; "" where no stage has too much of it."""
        work = {op.name: sum(_seconds(self.costs, op)[:2]) for op in self.kept}
        whole = sum(work.values()) or 1.0
        shares = [sum(work.get(name, 0.0) for name in ops) / whole for ops in stages]
        stage = max(range(len(stages)), key=shares.__getitem__)
        if shares[stage] <= _MOST_OF_IT or 2 / len(stages) >= shares[stage]:
            return ""
        here = set(stages[stage])
        held = [group for group in self.atoms.groups if group <= here]
        group = max(held, key=lambda g: sum(work[name] for name in g), default=frozenset[str]())
        if 2 * sum(work[name] for name in group) < shares[stage] * whole:
            return ""
        place = {op.name: index for index, op in enumerate(self.kept)}

        def span(tie: Tie) -> float:
            ends = [place[name] for name in tie.ops]
            within = self.kept[min(ends) : max(ends) + 1]
            return sum(work[op.name] for op in within if op.name in group)

        tie = max((tie for tie in self.atoms.ties if tie.ops <= group), key=span)
        return (
            f"stage {stage} has {shares[stage]:.0%} of the work: {len(group)} of its "
            f"{len(stages[stage])} ops cannot be cut apart, mostly {said_of(tie, self.graph)}"
        )

    @cached_property
    def kept(self) -> tuple[Op, ...]:
        """The ops that run in one stage only, in order."""
        return tuple(op for op in self.graph.ops if op.name not in self.duplicable)

    @cached_property
    def states(self) -> Mapping[str, tuple[str, ...]]:
        """For every op, the names of what a stage holds for it of the model's state.

        An op needs its own and that of the duplicable ops that it needs. What no op reads belongs
        to the model all the same: the first one in `kept` has it that runs nearest to its module.
        """
        graph = self.graph
        found: dict[str, tuple[str, ...]] = {}
        writers: dict[str, list[str]] = {}
        for op in graph.ops:
            makers = (graph.producer.get(value) for value in op.inputs)
            needed = [maker.name for maker in makers if maker is not None]
            needed += [name for value in op.inputs for name in writers.get(value, ())]
            copied = [name for name in needed if name in self.duplicable]
            names = dict.fromkeys(state for name in copied for state in found[name])
            names.update(dict.fromkeys(op.states(graph.modules)))
            found[op.name] = tuple(names)
            for value in self.effects.writes.get(op.name, ()):
                writers.setdefault(value, []).append(op.name)
        read = {name for names in found.values() for name in names}
        nearest: dict[str, str] = {}
        for op in self.kept or graph.ops:
            nearest.setdefault("", op.name)
            for own in (op.module, *found[op.name]):
                for path in prefixes(own):
                    nearest.setdefault(path, op.name)
        for name, state in graph.state.items():
            if name not in read and state.kind is not StateKind.CONSTANT:
                holder = [path for path in ("", *prefixes(name)) if path in nearest][-1]
                found[nearest[holder]] = (*found[nearest[holder]], name)
        return found

    @cached_property
    def modules(self) -> tuple[ModuleNodes, ...]:
        """The calls of modules that a cut may open; their nodes are places in `kept`."""
        paths = [op.module for op in self.kept]
        return module_calls(paths, lambda node, path: self.kept[node].turn(path))

    @cached_property
    def wanted(self) -> frozenset[str]:
        """The values that the loss depends on through values that need a gradient.

        An op that writes a value in place counts as making it.
        """
        if self.graph.loss is None:
            return frozenset()
        makers: dict[str, list[Op]] = {}
        for op in self.graph.ops:
            for value in self._results(op):
                makers.setdefault(value, []).append(op)
        found = {self.graph.loss.value}
        pending = [self.graph.loss.value]
        while pending:
            for op in makers.get(pending.pop(), ()):
                for value in op.inputs:
                    if value not in found and self._trainable(value):
                        found.add(value)
                        pending.append(value)
        return frozenset(found)

    def returns_gradient(self, value: str, reader: Op) -> bool:
        """Whether a gradient comes back to a value from an op that reads it."""
        return self._trainable(value) and not self.wanted.isdisjoint(self._results(reader))

    def _results(self, op: Op) -> tuple[str, ...]:
        return (*op.outputs, *self.effects.writes.get(op.name, ()))

    def _trainable(self, value: str) -> bool:
        described = self.graph.values[value]
        dtype = described.dtype
        return (
            described.requires_grad
            and dtype is not None
            and (dtype.is_floating_point or dtype.is_complex)
        )

    def tells(self, values: Iterable[str]) -> frozenset[Dim]:
        """The sizes that vary from call to call and can be read off the shapes of values."""
        known = map(self.graph.values.__getitem__, values)
        return frozenset().union(*(value.tells for value in known if 0 not in value.shape))

    def asks(self, op: Op) -> tuple[Dim, ...]:
        """The sizes that vary from call to call of which an op asks that only asks for shapes."""
        if self.reads(op):
            return ()
        known = (self.templates[name] for name in op.outputs if name in self.templates)
        return tuple(dim for template in known for dim in asked(template))

    def reads(self, op: Op) -> tuple[str, ...]:
        """The values that an op needs where it runs; one that only asks for shapes needs none."""
        shapes_only = op.outputs and all(name in self.templates for name in op.outputs)
        return () if op.name in self.duplicable and shapes_only else op.inputs


@dataclass(frozen=True)
class MicrobatchGraph:
    """A graph at the size of one micro-batch.

    Attributes:
        costs: on each kind of device of the cluster.
        facts: with the first of the costs.
    """

    graph: Graph
    costs: tuple[Costs, ...]
    facts: CutFacts

    @classmethod
    def of(
        cls, graph: Graph, costs: Sequence[Costs], plain: Graph | None = None
    ) -> MicrobatchGraph:
        """An annotated graph, and how it was before any op wrote in place that need not."""
        return cls(graph, tuple(costs), CutFacts.of(graph, costs[0], plain))


def problem_of(
    facts: CutFacts,
    other_kinds: Sequence[Costs] = (),
    optimizer: AnyOptimizer = OptimizerKind.SGD,
    division: Division = WHOLE,
) -> CutProblem:
    """The cut problem of a graph. Its nodes are `facts.kept`, in this order.

    Args:
        other_kinds: the costs on further kinds of devices.
        optimizer: whose memory counts.
        division: of it among replicas.
    """
    graph = facts.graph
    index = {op.name: position for position, op in enumerate(facts.kept)}
    nodes = tuple(Node(op.name, *_seconds(facts.costs, op)) for op in facts.kept)
    last = {index[name] for name in facts.atoms.last_stage}
    if graph.loss is not None:
        maker = graph.producer.get(graph.loss.value)
        if maker is not None and maker.name in index:
            last.add(index[maker.name])
    return CutProblem(
        nodes,
        tuple(_traffic(facts, index)),
        tuple((index[a], index[b]) for a, b in facts.atoms.precedence if a in index and b in index),
        tuple(
            tuple(sorted(index[name] for name in group if name in index))
            for group in (*facts.atoms.groups, *_carrying(facts))
        ),
        frozenset(last),
        last_alone=any(facts.kept[node].name not in graph.loss_only for node in last),
        kept=(*_states(facts, optimizer, division), *_saved(facts)),
        other_kinds=tuple(
            tuple(Seconds(*_seconds(costs, op)) for op in facts.kept) for costs in other_kinds
        ),
    )


def run_again(problem: CutProblem, often: Mapping[str, float]) -> CutProblem:
    """The problem in which backwards run their ops' forwards again, so often by the ops' names."""
    times = [often.get(node.name, 0.0) for node in problem.nodes]
    nodes = zip(problem.nodes, times, strict=True)
    return replace(
        problem,
        nodes=tuple(replace(n, backward_s=n.backward_s + t * n.forward_s) for n, t in nodes),
        other_kinds=tuple(
            tuple(
                replace(n, backward_s=n.backward_s + t * n.forward_s)
                for n, t in zip(kind, times, strict=True)
            )
            for kind in problem.other_kinds
        ),
    )


def _seconds(costs: Costs, op: Op) -> tuple[float, float, float]:
    cost = costs.ops[op.name]
    return cost.forward_s, cost.backward_s, cost.weight_s


def _states(facts: CutFacts, optimizer: AnyOptimizer, division: Division) -> list[Resident]:
    """The parameters, buffers and constants, with the nodes that hold them."""
    graph = facts.graph
    users: dict[str, list[int]] = {}
    for position, op in enumerate(facts.kept):
        for name in facts.states[op.name]:
            users.setdefault(name, []).append(position)
    return [
        Resident(
            tuple(dict.fromkeys(nodes)),
            bytes=held_bytes(graph, graph.state[name], optimizer, division),
            updated_bytes=updated_bytes(graph, graph.state[name]),
        )
        for name, nodes in users.items()
    ]


def _saved(facts: CutFacts) -> list[Resident]:
    """What autograd keeps, with the nodes that save it."""
    users: dict[int, list[int]] = {}
    for position, op in enumerate(facts.kept):
        for number in sorted(facts.saved.by_op.get(op.name, ())):
            users.setdefault(number, []).append(position)
    return [
        Resident(tuple(nodes), microbatch_bytes=facts.saved.bytes[number])
        for number, nodes in users.items()
        if facts.saved.bytes[number]
    ]


def _carrying(facts: CutFacts) -> Iterator[set[str]]:
    """For state between calls, the ops that read it and the one that makes it."""
    graph = facts.graph
    for past, present in graph.presents.items():
        maker = graph.producer.get(present)
        readers = {op.name for op in graph.consumers.get(past, ()) if past in facts.reads(op)}
        yield readers if maker is None else {*readers, maker.name}


def _traffic(facts: CutFacts, index: Mapping[str, int]) -> list[Traffic]:
    graph = facts.graph
    found = []
    held = dict(graph.carried)  # where it is read, from an earlier call
    makers = [(s.name, GRAPH_INPUT) for s in graph.inputs if s.name not in held]
    makers.extend((name, index[op.name]) for op in facts.kept for name in op.outputs)
    for value, producer in makers:
        readers = [op for op in graph.consumers.get(value, ()) if op.name in index]
        if readers:
            size = graph.values[value].bytes
            gradient = any(facts.returns_gradient(value, op) for op in readers)
            found.append(
                Traffic(
                    value,
                    producer,
                    tuple(index[op.name] for op in readers),
                    size,
                    size if gradient else 0,
                )
            )
    return found


def said_of(tie: Tie, graph: Graph) -> str:
    """For which op some share a stage, where that is written, and why."""
    source = graph.op_of[tie.op].source
    place = f" ({Path(source.file).name}:{source.line})" if source else ""
    return f"for {tie.op}{place}: {tie.why}"
