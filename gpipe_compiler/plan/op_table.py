"""What a plan shows of its ops once the graph is gone: labels, types, source lines.

A package's pictures and tables are drawn from these notes and not from its stage files: nothing
of the user's need be imported or run to look at a package, and what torch.fx cannot trace again
(regions, custom ops, values on meta) shows as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    RegionCall,
    Value,
    ValueKind,
)
from gpipe_compiler.ir.printing import function_label


@dataclass(frozen=True, slots=True)
class OpNote:
    """One op, for people.

    Attributes:
        label: what is called: `Conv2d`, `F.relu`, `.flatten`, `NoGrad region`.
        inputs, outputs: the values it reads and makes.
        types: for every output its type in one micro-batch, such as `8x64x56x56 float32`; "" where
            it is unknown.
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


def list_ops(graph: Graph, samples: int) -> tuple[OpNote, ...]:
    """A note on every op of a graph, in order, with shapes for a micro-batch of `samples`."""
    return tuple(_note(graph, op, samples) for op in graph.ops)


def _note(graph: Graph, op: Op, samples: int) -> OpNote:
    return OpNote(
        name=op.name,
        label=_label(graph, op),
        inputs=op.inputs,
        outputs=op.outputs,
        types=tuple(
            _type(graph.values[name], samples, graph.batch_size) if name in graph.values else ""
            for name in op.outputs
        ),
        module=op.call.module if isinstance(op.call, ModuleCall) else op.module,
        state=op.states(graph.modules),
        source=str(op.source) if op.source else "",
    )


def _type(value: Value, samples: int, batch_size: int) -> str:
    if value.kind is not ValueKind.TENSOR:
        return str(value.kind.value)
    sizes = list(value.shape)
    if value.batch_dim is not None:
        sizes[value.batch_dim] = sizes[value.batch_dim] * samples // batch_size
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{'x'.join(map(str, sizes)) or 'scalar'} {dtype}"


def _label(graph: Graph, op: Op) -> str:
    match op.call:
        case ModuleCall(module=path):
            return graph.modules[path].cls.__name__
        case FunctionCall(function=function):
            # As nearly every PyTorch program imports it, and a third as wide.
            return function_label(function).replace("torch.nn.functional.", "F.")
        case MethodCall(method=method):
            return f".{method}"
        case RegionCall(context=context):
            return f"{type(context).__name__} region"
