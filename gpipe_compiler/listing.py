"""What a plan tells people about its ops once the graph is gone: labels, types, source lines.

A package's pictures and tables are drawn from these notes and not from its stage files: nothing
of the user's need be imported or run to look at a package, and what torch.fx cannot trace again
(regions, custom ops, values on meta) shows as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, ModuleCall, Op, RegionCall
from gpipe_compiler.ir.printing import format_value, function_label


@dataclass(frozen=True, slots=True)
class OpNote:
    """One op, for people.

    Attributes:
        label: what is called: `Conv2d`, `torch.relu`, `.flatten`, `NoGrad region`.
        inputs, outputs: the values it reads and makes.
        types: for every output its type, such as `8*x64x56x56 float32`; "" where unknown.
        module: path of the module it calls, or in whose forward it stands.
        state: canonical names of the parameters and buffers it reads or writes.
        source: `file:line` of the user's program, "" where unknown.
    """

    name: str
    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[str, ...]
    module: str = ""
    state: tuple[str, ...] = ()
    source: str = ""


def list_ops(graph: Graph) -> tuple[OpNote, ...]:
    """A note on every op of a graph, in order."""
    return tuple(_note(graph, op) for op in graph.ops)


def _note(graph: Graph, op: Op) -> OpNote:
    return OpNote(
        name=op.name,
        label=_label(graph, op),
        inputs=op.inputs,
        outputs=op.outputs,
        types=tuple(
            format_value(graph.values[name]) if name in graph.values else "" for name in op.outputs
        ),
        module=op.call.module if isinstance(op.call, ModuleCall) else op.module,
        state=op.states(graph.modules),
        source=str(op.source) if op.source else "",
    )


def _label(graph: Graph, op: Op) -> str:
    match op.call:
        case ModuleCall(module=path):
            return graph.modules[path].cls.__name__
        case FunctionCall(function=function):
            return function_label(function)
        case MethodCall(method=method):
            return f".{method}"
        case RegionCall(context=context):
            return f"{type(context).__name__} region"
