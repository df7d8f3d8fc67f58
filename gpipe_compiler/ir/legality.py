"""What a legal graph is, in one place.

A graph is legal when
- names of ops, and of values, are unique, and a value is made before it is read;
- every module that is called and every state that is read is in the graph's tables;
- outputs and loss name values of the graph;
- a value made in one mode only is read in that mode only, at most through a `ByMode`;
- the table of values is empty, or describes every value and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpipe_compiler.errors import IllegalGraphError
from gpipe_compiler.ir.arguments import Argument, ByMode, Ref, parts
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import Mode, ModuleCall, Op


def check(graph: Graph, *, after: str) -> Graph:
    """The same graph, when it is legal.

    Args:
        after: what has just produced the graph; named in the error.
    """
    violations = list(_violations(graph))
    if violations:
        raise IllegalGraphError(after, violations)
    return graph


def _violations(graph: Graph) -> Iterator[str]:
    modes: dict[str, Mode] = {}
    for source in graph.inputs:
        if source.name in modes:
            yield f"two inputs are named {source.name}"
        modes[source.name] = Mode.ALWAYS
    seen: set[str] = set()
    for op in graph.ops:
        if op.name in seen:
            yield f"two ops are named {op.name}"
        seen.add(op.name)
        yield from _reads(graph, op, modes)
        for name in op.outputs:
            if name in modes:
                yield f"{op.name} makes the value {name} a second time"
            modes[name] = op.mode
    for name in graph.output_values:
        if name not in modes:
            yield f"the output {name} is no value of the graph"
    if graph.loss is not None and graph.loss.value not in modes:
        yield f"the loss {graph.loss.value} is no value of the graph"
    if graph.values:
        for name in modes.keys() - graph.values.keys():
            yield f"the value {name} has no description"
        for name in graph.values.keys() - modes.keys():
            yield f"a description is given of {name}, which is no value of the graph"


def _reads(graph: Graph, op: Op, modes: dict[str, Mode]) -> Iterator[str]:
    uses = _uses(op.arguments, op.mode) if op.has_choices else ((n, op.mode) for n in op.reads)
    for name, mode in uses:
        if name not in modes:
            yield f"{op.name} reads {name}, which is not made before it"
        elif modes[name] is not Mode.ALWAYS and modes[name] is not mode:
            yield f"{op.name} reads {name}, which is made in {modes[name].value} mode only"
    yield from _tables(graph, op)


def _tables(graph: Graph, op: Op) -> Iterator[str]:
    call = op.call
    if isinstance(call, ModuleCall) and call.module not in graph.modules:
        yield f"{op.name} calls the module {call.module}, which is not in the graph's table"
        return
    for name in op.states(graph.modules):
        if name not in graph.state:
            yield f"{op.name} reads the state {name}, which is not in the graph's table"


def _uses(argument: Argument, mode: Mode) -> Iterator[tuple[str, Mode]]:
    """Every value an argument reads, with the mode in which it is read."""
    match argument:
        case Ref(name=name):
            yield name, mode
        case ByMode(train=train, evaluation=evaluation):
            yield from _uses(train, Mode.TRAIN)
            yield from _uses(evaluation, Mode.EVAL)
        case _:
            for item in parts(argument) or ():
                yield from _uses(item, mode)
