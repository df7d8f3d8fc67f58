"""Makes the graph that the passes see from an ONNX model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import torch
from onnx import NodeProto, TensorProto, TypeProto

from gpipe_compiler.errors import ModelError, SourceLocation
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
from gpipe_compiler.onnx.frontend.nodes import OnnxNode, captured
from gpipe_compiler.onnx.frontend.reading import OnnxModel, whole_session
from gpipe_compiler.onnx.frontend.shapes import Described, describe
from gpipe_compiler.onnx.frontend.sizes import InputSizes
from gpipe_compiler.onnx.frontend.types import element_name, torch_dtype

_SCOPES = "pkg.torch.onnx.name_scopes"
_STACK = "pkg.torch.onnx.stack_trace"
"""What torch.onnx notes of a node: the modules it is in, and the lines it comes from."""


def graph_of(model: OnnxModel, sizes: InputSizes, samples: int) -> Graph:
    """The graph of a model for inference, with every value described for a number of samples.

    Values whose shape is not known, or that are no tensors, are of `ValueKind.OTHER`: they stay
    within a stage.

    Raises:
        ModelError: for outputs of the model that are weights, no tensors, or of a shape that is
            not known, naming the nodes.
    """
    proto = model.proto
    shapes = sizes.at(sizes.batch if sizes.requests else samples)
    once = describe(model, sizes.arrays(sizes.batch if sizes.requests else samples, 0))
    single = sizes.fixed or sizes.requests
    twice = once if single else describe(model, sizes.arrays(2 * samples, 1))
    dense = ((tensor, tensor.dims) for tensor in proto.graph.initializer)
    sparse = ((held.values, held.dims) for held in proto.graph.sparse_initializer)
    states = {tensor.name: _state(tensor, dims) for tensor, dims in (*dense, *sparse)}
    ops = _ops(proto.graph.node, states, {n: k.type for n, k in once.items() if k.type is not None})
    values = {}
    for name in (*sizes.shapes, *(value for op in ops for value in op.outputs)):
        if sizes.requests:
            values[name] = _whole(name, once.get(name))
        else:
            values[name] = _value(name, once.get(name), twice.get(name), samples, fixed=sizes.fixed)
    graph = Graph(
        name=model.name,
        inputs=tuple(
            Input(
                name,
                ("inputs", name),
                sizes.split_dims.get(name),
                shape,
                sizes.dtypes[name],
            )
            for name, shape in shapes.items()
        ),
        ops=ops,
        outputs={result.name: Ref(result.name) for result in proto.graph.output},
        state=states,
        modules={},
        batch_size=1 if sizes.requests else samples,
        whole_batch=sizes.requests,
        values=values,
        example={
            name: torch.empty(shape, dtype=sizes.dtypes[name] or _STANDS_IN, device="meta")
            for name, shape in shapes.items()
        },
    )
    _check_outputs(model, graph, once)
    return check(graph, after="the ONNX frontend")


def _ops(
    nodes: Iterable[NodeProto], states: Mapping[str, State], types: Mapping[str, TypeProto]
) -> tuple[Op, ...]:
    taken: set[str] = set()
    ops = []
    for node in nodes:
        args = tuple(_argument(name, states) for name in (*node.input, *captured(node)))
        outputs = tuple(name or None for name in node.output)
        own = {name: types[name] for name in node.output if name in types}
        ops.append(
            Op(
                _fresh(node, taken),
                FunctionCall(OnnxNode(node, own), args),
                outputs[0] if len(outputs) == 1 else outputs,
                _source(node),
                _module(node),
            )
        )
    return tuple(ops)


def _argument(name: str, states: Mapping[str, State]) -> Argument:
    if name in states:
        return StateRef(name)
    return Ref(name) if name else None


def _fresh(node: NodeProto, taken: set[str]) -> str:
    """A name of its own: that of the node where it has one, else of what it makes."""
    base = node.name or next((name for name in node.output if name), node.op_type)
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    taken.add(name)
    return name


def _state(tensor: TensorProto, dims: Iterable[int]) -> State:
    shape, dtype = tuple(dims), torch_dtype(tensor.data_type)
    if dtype is None:  # strings, and types of 4 bits: two in a byte
        shape, dtype = ((math.prod(shape) + 1) // 2,), torch.uint8
    return State(tensor.name, StateKind.PARAMETER, shape, dtype)


_STANDS_IN = torch.uint8
"""For the dtype of what torch has none for, as if each string were a byte; see `OnnxNode.types`."""


def _whole(name: str, known: Described | None) -> Value:
    """A value of a whole call, of which any tensor crosses."""
    if known is not None and known.other is not None:
        return Value(name, ValueKind.TENSOR, (), _STANDS_IN)
    if known is None or not known.is_tensor:
        return Value(name, ValueKind.OTHER, (known and known.shape) or ())
    assert known.shape is not None
    dtype = torch_dtype(known.element) or _STANDS_IN
    return Value(name, ValueKind.TENSOR, known.shape, dtype, splittable=not known.numeric)


def _value(
    name: str, once: Described | None, twice: Described | None, samples: int, *, fixed: bool
) -> Value:
    if once is None or not once.crosses or twice is None or not twice.crosses:
        return Value(name, ValueKind.OTHER)
    if once.other is not None or twice.other is not None:
        return Value(name, ValueKind.TENSOR, (), _STANDS_IN)
    assert once.shape is not None
    assert twice.shape is not None
    shape, dtype = once.shape, torch_dtype(once.element) or _STANDS_IN
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


def _check_outputs(model: OnnxModel, graph: Graph, known: Mapping[str, Described]) -> None:
    """Raises ModelError for outputs that cannot be put together from micro-batches."""
    others: set[str] = set()
    for result in model.proto.graph.output:
        if result.name in graph.state:
            raise ModelError(
                f"the output {result.name} of {model.path} is a weight, so it does not follow from "
                "the inputs",
                hint="take it out of the outputs of the model; it stands in the file",
            )
        kind = str(result.type.WhichOneof("value") or "tensor_type").removesuffix("_type")
        element = known[result.name].element if result.name in known else 0
        if kind != "tensor":
            problem = f"is no tensor ({kind})"
        elif element not in (0, TensorProto.STRING) and torch_dtype(element) is None:
            problem = f"holds {element_name(element)}"
        else:
            continue
        if graph.whole_batch and kind != "tensor":
            others.add(result.name)
            continue
        raise ModelError(
            f"the output {result.name} of {model.path} {problem}, which cannot be put together "
            "from micro-batches",
            hint="take it out of the outputs of the model, and make it outside of it",
        )
    unknown = [
        name
        for name in graph.output_values
        if name not in others
        and (name not in graph.values or graph.values[name].kind is not ValueKind.TENSOR)
    ]
    if unknown:
        whole_session(model)  # which says what is wrong, where that is why
        nodes = "".join(f"\n  - {node}" for node in unshaped(graph))
        raise ModelError(
            f"the shape of {', '.join(unknown)} is not known, so the outputs of {model.path} "
            f"cannot be put together from micro-batches; it is lost at{nodes}",
            hint="an operator whose result has as many rows as its numbers say (NonZero, "
            "NonMaxSuppression) has to stay outside of the pipeline; for any other, declare the "
            "shape in the model (graph.value_info, graph.output); where the model does not run on "
            "random numbers, give it others: --input x.npz",
        )
    if not any(name in graph.producer for name in graph.output_values):
        raise ModelError(f"no node of {model.path} makes an output of it: there is nothing to run")


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
    """Descriptions of the nodes whose inputs have known shapes, and whose outputs do not."""
    known = {name for name, value in graph.values.items() if value.kind is ValueKind.TENSOR}
    return tuple(
        str(op.call.function)
        for op in graph.ops
        if isinstance(op.call, FunctionCall)
        and known.issuperset(op.inputs)
        and not known.issuperset(op.outputs)
    )
