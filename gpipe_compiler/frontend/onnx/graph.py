"""Makes the graph that the passes see from an ONNX model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
from onnx import NodeProto, TensorProto

from gpipe_compiler.errors import ModelError, SourceLocation
from gpipe_compiler.frontend.onnx.nodes import OnnxNode, captured
from gpipe_compiler.frontend.onnx.reading import OnnxModel
from gpipe_compiler.frontend.onnx.shapes import Described, describe
from gpipe_compiler.frontend.onnx.sizes import InputSizes
from gpipe_compiler.frontend.onnx.types import torch_dtype
from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    Input,
    Op,
    Ref,
    State,
    StateKind,
    StateRef,
    Value,
    ValueKind,
)
from gpipe_compiler.ir.arguments import Argument
from gpipe_compiler.ir.legality import check

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"
"""What torch.onnx notes of a node: the modules it is in, and the lines it comes from."""


def graph_of(model: OnnxModel, sizes: InputSizes, samples: int) -> Graph:
    """The graph of a model for inference, with every value described for so many samples.

    Values whose shape is not known, or that are no tensors, are of `ValueKind.OTHER`: they stay
    within a stage.

    Raises:
        ModelError: for outputs of the model of which no shape is known, naming the nodes.
    """
    proto = model.proto
    once = describe(model, sizes.at(samples))
    twice = once if sizes.fixed else describe(model, sizes.at(2 * samples))
    states = {tensor.name: _state(tensor) for tensor in proto.graph.initializer}
    ops = _ops(proto.graph.node, states)
    values = {}
    for name in (*sizes.shapes, *(value for op in ops for value in op.outputs)):
        values[name] = _value(name, once.get(name), twice.get(name), samples, fixed=sizes.fixed)
    graph = Graph(
        name=model.name,
        inputs=tuple(
            Input(name, ("inputs", name), name in sizes.batched, shape, sizes.dtypes[name])
            for name, shape in sizes.at(samples).items()
        ),
        ops=ops,
        outputs={result.name: Ref(result.name) for result in proto.graph.output},
        state=states,
        modules={},
        batch_size=samples,
        values=values,
        example={
            name: torch.empty(shape, dtype=sizes.dtypes[name], device="meta")
            for name, shape in sizes.at(samples).items()
        },
    )
    _check_outputs(model, graph)
    return check(graph, after="the ONNX frontend")


def _ops(nodes: Iterable[NodeProto], states: Mapping[str, State]) -> tuple[Op, ...]:
    taken: set[str] = set()
    made: set[str] = set()
    ops = []
    for node in nodes:

        def argument(name: str) -> Argument:
            if name in states and name not in made:
                return StateRef(name)
            return Ref(name) if name else None

        args = tuple(argument(name) for name in (*node.input, *captured(node)))
        outputs = tuple(name or None for name in node.output)
        made.update(name for name in outputs if name)
        ops.append(
            Op(
                _fresh(node, taken),
                FunctionCall(OnnxNode(node), args),
                outputs[0] if len(outputs) == 1 else outputs,
                _source(node),
                _module(node),
            )
        )
    return tuple(ops)


def _fresh(node: NodeProto, taken: set[str]) -> str:
    """A name of its own: that of the node where it has one, else of what it makes."""
    base = node.name or next((name for name in node.output if name), node.op_type)
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def _state(tensor: TensorProto) -> State:
    shape, dtype = tuple(tensor.dims), torch_dtype(tensor.data_type)
    if dtype is None:  # strings, and types of 4 bits: two in a byte
        shape, dtype = ((math.prod(shape) + 1) // 2,), torch.uint8
    return State(tensor.name, StateKind.PARAMETER, shape, dtype)


def _value(
    name: str, once: Described | None, twice: Described | None, samples: int, *, fixed: bool
) -> Value:
    if once is None or not once.crosses or twice is None or not twice.crosses:
        return Value(name, ValueKind.OTHER)
    assert once.shape is not None
    assert twice.shape is not None
    shape, dtype = once.shape, torch_dtype(once.element)
    if fixed:
        batch_dim = 0 if shape and shape[0] == samples else None
        return Value(name, ValueKind.TENSOR, shape, dtype, batch_dim)
    changed = [dim for dim, (a, b) in enumerate(zip(shape, twice.shape, strict=False)) if a != b]
    fits = len(shape) == len(twice.shape) and len(changed) <= 1
    fits = fits and all(twice.shape[dim] == 2 * shape[dim] for dim in changed)
    return Value(
        name,
        ValueKind.TENSOR,
        shape,
        dtype,
        batch_dim=changed[0] if changed and fits else None,
        splittable=fits,
    )


def _check_outputs(model: OnnxModel, graph: Graph) -> None:
    """Raises ModelError where nothing is known of the outputs of the model."""
    unknown = [
        name
        for name in graph.output_values
        if name not in graph.values or graph.values[name].kind is not ValueKind.TENSOR
    ]
    if unknown:
        nodes = "".join(f"\n  - {node}" for node in unshaped(graph))
        raise ModelError(
            f"the shape of {', '.join(unknown)} is not known, so the outputs of {model.path} "
            f"cannot be put together from micro-batches; it is lost at{nodes}",
            hint="an operator whose result has as many rows as its numbers say (NonZero, "
            "NonMaxSuppression) has to stay outside of the pipeline, and so has one that ONNX "
            "Runtime does not know",
        )


def _source(node: NodeProto) -> SourceLocation | None:
    """The line of the model's author that a node comes from, as torch.onnx has noted it."""
    noted = next((item.value for item in node.metadata_props if item.key == _STACK), "")
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)', noted)
    own = [frame for frame in frames if "/site-packages/" not in frame[0]]
    if not frames:
        return None
    file, line, function, code = (own or frames)[-1]
    return SourceLocation(file, int(line), function, code.strip())


def _module(node: NodeProto) -> str:
    """The path of the module that a node is in: as noted by torch.onnx, or as its name says."""
    noted = next((item.value for item in node.metadata_props if item.key == _SCOPES), "")
    scopes = re.findall(r"'([^']*)'", noted)
    if len(scopes) > 1:
        return str(scopes[-2])
    return ".".join(part for part in node.name.split("/")[:-1] if part)


def unshaped(graph: Graph) -> tuple[str, ...]:
    """The nodes at which shapes are lost, in words: all they read is known, what they make not."""
    known = {name for name, value in graph.values.items() if value.kind is ValueKind.TENSOR}
    return tuple(
        str(op.call.function)
        for op in graph.ops
        if isinstance(op.call, FunctionCall)
        and known.issuperset(op.inputs)
        and not known.issuperset(op.outputs)
    )
