"""The calls of the model's modules in a stage: its `forward` as it is written."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.checkpoint import checkpoint

from gpipe_compiler.ir import FunctionCall, ModuleCall, Op, Ref
from gpipe_compiler.ir.blocks import Body, calls_in
from gpipe_compiler.ir.classes import Methods, find_blocks
from gpipe_compiler.ir.contents import Contents, prefixes
from gpipe_compiler.passes.duplicate import shape_values
from gpipe_compiler.passes.memory_trace.part import Part


def calls_of(part: Part) -> tuple[range, ...]:
    """For every call of a module that is written as one, the positions of its ops."""
    graph = part.graph
    if not graph.module_classes:
        return ()
    here = {op.name for op in part.ops}
    absent = {p for op in graph.ops if op.name not in here for p in prefixes(op.module)}
    modules = dict.fromkeys(op.call.module for op in part.ops if isinstance(op.call, ModuleCall))
    contents = Contents(graph, tuple(modules), part.states)
    paths = [path for path in graph.module_classes if path in contents.holders]
    methods = Methods(contents, list(_bodies(part)), paths, absent.__contains__)
    (found,) = find_blocks([methods], shape_values(graph))
    place = {op.name: position for position, op in enumerate(part.ops)}
    calls = (call for parts in found.bodies for call in calls_in(parts))
    places = ([place[op.name] for op in call.ops] for call in calls)
    return tuple(range(ops[0], ops[-1] + 1) for ops in places)


def _bodies(part: Part) -> Iterator[Body]:
    """The methods of a stage: `forward`, and one for each segment, which `forward` calls."""
    forward: list[Op] = []
    for step in part.steps:
        if isinstance(step, range):
            taken, given = part.ends(step)
            method = FunctionCall(checkpoint, tuple(map(Ref, taken)))
            forward.append(Op(f"segment {step.start}", method, given))
            yield Body(part.ops[step.start : step.stop], given)
        else:
            forward.append(part.ops[step])
    yield Body(tuple(forward), part.results)
