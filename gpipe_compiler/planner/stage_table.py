"""What every stage of a cut runs, takes, gives and holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from gpipe_compiler.errors import PlanError
from gpipe_compiler.ir import Graph, StateKind, ValueKind
from gpipe_compiler.ir.sizes import at_batch, follows
from gpipe_compiler.options import WHOLE, AnyOptimizer, Division
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem, Traffic
from gpipe_compiler.passes.duplicate import closure
from gpipe_compiler.passes.footprint import held_bytes
from gpipe_compiler.plan import Stage
from gpipe_compiler.planner.cut_problem import CutFacts
from gpipe_compiler.runtime.sizes import sizes_in
from gpipe_compiler.runtime.spec import Crossing, Remat
from gpipe_compiler.simulate.step import StageTimes


@dataclass(frozen=True)
class StageTable:
    """What every stage runs, takes and gives.

    Attributes:
        ops: per stage, in the order of the graph, those that serve only the loss last.
        duplicates: those of `ops` that are computed in every stage that needs them.
        inputs: per stage, what it reads and does not make, in order of first use.
        outputs: per stage, what it makes for others, in the order it makes them.
        crossings: in the order of the graph.
    """

    ops: tuple[tuple[str, ...], ...]
    duplicates: tuple[tuple[str, ...], ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    crossings: tuple[Crossing, ...]


def tabulate(facts: CutFacts, stage_of: Mapping[str, int], stages: int) -> StageTable:
    """The tables of an assignment.

    A value made in stage a and read in b > a crosses from a to b; so does an input of the graph
    that is read in b > 0, from stage 0. It brings a gradient back when it needs one and the loss
    depends on what some op of a target makes of it, through values that need a gradient.

    Args:
        stage_of: the stage of every op in `facts.kept`.

    Raises:
        PlanError: when an op would need a value of a later stage, or one that cannot be sent.
    """
    graph = facts.graph
    assigned = _with_duplicates(facts, stage_of, stages)
    order = {op.name: position for position, op in enumerate(graph.ops)}
    late = graph.loss_only
    ops = tuple(
        tuple(sorted(names, key=lambda name: (name in late, order[name]))) for names in assigned
    )
    made = [{value for name in names for value in graph.op_of[name].outputs} for names in ops]
    inputs = tuple(_taken(facts, names, made[stage]) for stage, names in enumerate(ops))
    crossings = tuple(_crossings(facts, stage_of, ops, inputs))
    sent = {(crossing.value, crossing.source) for crossing in crossings}
    owned = _owners(facts, assigned)
    for_loss = [_for_loss(facts, names) for names in ops]
    outputs = tuple(
        tuple(
            value
            for name in names
            for value in graph.op_of[name].outputs
            if (value, stage) in sent
            or owned.get(value) == stage
            or (name not in late and value in for_loss[stage])
        )
        for stage, names in enumerate(ops)
    )
    duplicates = tuple(tuple(n for n in names if n in facts.duplicable) for names in ops)
    return StageTable(ops, duplicates, inputs, outputs, crossings)


def _taken(facts: CutFacts, names: tuple[str, ...], made: Set[str]) -> tuple[str, ...]:
    """What the ops of a stage read and it does not make.

    An input of the graph is added where an op asks for the number of samples, or another size that
    is free, and nothing else of what the stage is given has it; of what is not the loss's, targets
    say nothing, as inference has none.
    """
    graph = facts.graph
    ops = [graph.op_of[name] for name in names]
    read = dict.fromkeys(v for op in ops for v in facts.reads(op) if v not in made)
    asking = [op for op in ops if not made >= set(op.inputs)]
    for late in (False, True):
        dims = (d for op in asking if (op.name in graph.loss_only) is late for d in facts.asks(op))
        silent = frozenset() if late else graph.targets
        for dim in dict.fromkeys(dims):
            if follows(dim, facts.tells(read.keys() - silent)):
                continue
            for size in sizes_in((dim,)):
                if size not in facts.tells(read.keys() - silent):
                    sources = (s.name for s in graph.inputs if s.name not in silent)
                    telling = (name for name in sources if size in facts.tells((name,)))
                    read.update(dict.fromkeys(itertools.islice(telling, 1)))
    return tuple(read)


def with_asked(facts: CutFacts, problem: CutProblem, table: StageTable) -> CutProblem:
    """The problem in which the ops of these stages read what only has their number of samples.

    Whether a stage is given an input of the graph for that follows from all that it is given, so
    the problem of a graph does not say.

    Returns:
        the same problem where no stage is given anything for that.
    """
    graph, node_of = facts.graph, {node.name: index for index, node in enumerate(problem.nodes)}
    traffic = {value.name: value for value in problem.values}
    for names, inputs in zip(table.ops, table.inputs, strict=True):
        here = [name for name in names if name in node_of]
        read = {value for name in names for value in facts.reads(graph.op_of[name])}
        for value in (value for value in inputs if value not in read):
            asking = [name for name in here if _asks(facts, name)] or here
            known = traffic.get(value, Traffic(value, GRAPH_INPUT, (), graph.values[value].bytes))
            readers = {*known.consumers, *(node_of[name] for name in asking)}
            traffic[value] = replace(known, consumers=tuple(sorted(readers)))
    values = tuple(traffic.values())
    return problem if values == problem.values else replace(problem, values=values)


def _asks(facts: CutFacts, op: str) -> bool:
    """Whether an op needs a size that varies from call to call, worked out where it runs."""
    needed = closure(facts.graph, facts.effects, facts.duplicable, (op,))
    return any(facts.asks(facts.graph.op_of[name]) for name in needed)


def _with_duplicates(
    facts: CutFacts, stage_of: Mapping[str, int], stages: int
) -> list[frozenset[str]]:
    """The ops of every stage; what only the caller wants of duplicable ops is on the last one."""
    graph = facts.graph
    assigned: list[set[str]] = [set() for _ in range(stages)]
    for op in facts.kept:
        assigned[stage_of[op.name]].add(op.name)
    found = [names | closure(graph, facts.effects, facts.duplicable, names) for names in assigned]
    present = frozenset().union(*found)
    wanted = graph.ends
    missing = {
        maker.name
        for value in wanted
        if (maker := graph.producer.get(value)) is not None and maker.name not in present
    }
    found[-1] |= missing | closure(graph, facts.effects, facts.duplicable, missing)
    return [frozenset(names) for names in found]


def _owners(facts: CutFacts, assigned: list[frozenset[str]]) -> dict[str, int]:
    """The stage that hands each output of the model (and a loss that is made with them) over."""
    graph = facts.graph
    wanted = list(graph.output_values)
    if graph.loss is not None:
        maker = graph.producer.get(graph.loss.value)
        if maker is None or maker.name not in graph.loss_only:
            wanted.append(graph.loss.value)
    owned: dict[str, int] = {}
    for value in wanted:
        maker = graph.producer.get(value)
        if maker is not None:
            owned[value] = next(s for s, names in enumerate(assigned) if maker.name in names)
    return owned


def _for_loss(facts: CutFacts, names: tuple[str, ...]) -> frozenset[str]:
    """The tensors that the ops of a stage which serve only the loss read."""
    graph = facts.graph
    return frozenset(
        value
        for name in names
        if name in graph.loss_only
        for value in facts.reads(graph.op_of[name])
        if graph.values[value].kind is ValueKind.TENSOR
    )


def _crossings(
    facts: CutFacts,
    stage_of: Mapping[str, int],
    ops: tuple[tuple[str, ...], ...],
    inputs: tuple[tuple[str, ...], ...],
) -> list[Crossing]:
    graph = facts.graph
    targets: dict[str, list[int]] = {}
    for stage, values in enumerate(inputs):
        for value in values:
            targets.setdefault(value, []).append(stage)
    found = []
    held = list(map(frozenset, ops))
    makers = [(source.name, None) for source in graph.inputs]
    makers.extend((value, op) for op in graph.ops for value in op.outputs)  # type: ignore[misc]  # the inputs' None and an Op
    for value, maker in makers:
        source = 0 if maker is None else stage_of.get(maker.name, -1)
        later = tuple(stage for stage in targets.get(value, ()) if stage != source)
        if not later or (maker is None and later == (0,)):
            continue
        described = graph.values[value]
        if source < 0 or min(later) < source or described.dtype is None:
            raise PlanError(
                f"the value {value} would have to go from stage {source} to stage {later[0]}",
                location=maker.source if maker is not None else None,
                hint="this is a fault of the compiler: an atom or a duplicate is missing",
            )
        readers = (op for op in graph.consumers.get(value, ()) for s in later if op.name in held[s])
        found.append(
            Crossing(
                value,
                source,
                later,
                tuple(at_batch(dim, graph.batch_size) for dim in described.dims),
                described.dtype,
                described.batch_dim,
                any(facts.returns_gradient(value, op) for op in readers),
            )
        )
    return found


def stage_of_cut(
    facts: CutFacts,
    table: StageTable,
    index: int,
    times: StageTimes,
    recompute: bool,
    optimizer: AnyOptimizer,
    division: Division = WHOLE,
) -> Stage:
    """One stage, with its times.

    Args:
        recompute: whether it runs its whole forward again for the backward.
    """
    graph = facts.graph
    ops = table.ops[index]
    names = dict.fromkeys(name for op in ops for name in facts.states[op])
    states = [graph.state[name] for name in names]
    received = [crossing for crossing in table.crossings if index in crossing.targets]
    return Stage(
        index=index,
        ops=ops,
        duplicates=table.duplicates[index],
        inputs=table.inputs[index],
        outputs=table.outputs[index],
        state=tuple(names),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        receive_bytes=_bytes(graph, received),
        gradient_bytes=_bytes(graph, [crossing for crossing in received if crossing.gradient]),
        parameter_bytes=sum(s.bytes for s in states if s.kind is StateKind.PARAMETER),
        parameter_count=sum(
            s.bytes // s.dtype.itemsize for s in states if s.kind is StateKind.PARAMETER
        ),
        saved_bytes=facts.saved.saved_bytes(ops) if graph.loss is not None else 0,
        input_bytes=sum(graph.values[name].bytes for name in table.inputs[index]),
        remat=Remat.FULL if recompute else Remat.NONE,
        written=not recompute,
        state_bytes=sum(held_bytes(graph, state, optimizer, division) for state in states),
        weight_s=times.weight_s,
        update_s=times.update_s,
        arithmetic_s=sum(
            facts.costs.ops[name].arithmetic_s
            for name in ops
            if name not in table.duplicates[index]
        ),
    )


def _bytes(graph: Graph, crossings: Sequence[Crossing]) -> int:
    return sum(graph.values[crossing.value].bytes for crossing in crossings)
