"""Types and shapes of all values of an ONNX model, for inputs of given sizes.

Found by ONNX's own shape inference, with the sizes of the inputs filled in; for operators that it
does not know (those of ONNX Runtime, `com.microsoft`) or gives up on (Loop), by ONNX Runtime's;
else taken from what the model declares. Inputs of the same shape replace the weights, so a model of
any size takes no memory.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime
from onnx import GraphProto, ModelProto, TensorProto, TypeProto, ValueInfoProto
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

from gpipe_compiler.onnx.frontend.reading import OnnxModel, without_weights
from gpipe_compiler.onnx.frontend.types import torch_dtype
from gpipe_compiler.onnx.runtime.stage import SessionChoice

_SMALL = 1024
"""Elements up to which a weight may hold a shape, so that its numbers are looked at."""


@dataclass(frozen=True, slots=True)
class Described:
    """The type of a value.

    Attributes:
        element: the type of its elements (`TensorProto.DataType`); 0 for anything but tensors.
        shape: None where it follows from the numbers in other tensors, or is not known.
    """

    element: int
    shape: tuple[int, ...] | None

    @property
    def crosses(self) -> bool:
        """Whether the value can be handed from one stage to another."""
        return self.shape is not None and torch_dtype(self.element) is not None


def describe(model: OnnxModel, sizes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Described]:
    """Every value of the main graph, for inputs of these shapes; unknown ones are left out."""
    light = without_weights(model.proto, _SMALL, sizes)
    found = _inferred(light, model.custom_ops)
    missing = _unknown(light, found)
    declared = [value for value in _declared(model.proto, sizes) if value.name in missing]
    if declared:
        light.graph.value_info.extend(declared)
        found = _inferred(light, model.custom_ops)
    for tensor in model.proto.graph.initializer:
        found[tensor.name] = Described(tensor.data_type, tuple(tensor.dims))
    for sparse in model.proto.graph.sparse_initializer:
        found[sparse.values.name] = Described(sparse.values.data_type, tuple(sparse.dims))
    return found


def _inferred(light: ModelProto, custom_ops: Sequence[Path]) -> dict[str, Described]:
    """What the three ways of inference know, one after another."""
    inferred = onnx.shape_inference.infer_shapes(light, check_type=False, data_prop=True)
    found = dict(_described(inferred.graph))
    for further in (_by_runtime, _by_symbols):
        if not _unknown(light, found):
            break
        for name, known in further(light, custom_ops):
            if known.shape is not None or name not in found:
                found[name] = known
    return found


def _unknown(light: ModelProto, found: Mapping[str, Described]) -> frozenset[str]:
    made = (name for node in light.graph.node for name in node.output if name)
    return frozenset(name for name in made if name not in found or found[name].shape is None)


def _declared(proto: ModelProto, sizes: Mapping[str, tuple[int, ...]]) -> Iterator[ValueInfoProto]:
    """The shapes that the model itself declares, as far as they follow from those of the inputs."""
    symbols = {
        dim.dim_param: size
        for source in proto.graph.input
        for dim, size in zip(
            source.type.tensor_type.shape.dim, sizes.get(source.name, ()), strict=False
        )
        if dim.dim_param
    }
    for value in (*proto.graph.value_info, *proto.graph.output):
        tensor = value.type.tensor_type
        shape = [
            dim.dim_value if dim.HasField("dim_value") else symbols.get(dim.dim_param)
            for dim in tensor.shape.dim
        ]
        if tensor.HasField("shape") and None not in shape:
            yield onnx.helper.make_tensor_value_info(value.name, tensor.elem_type, shape)


def _described(graph: GraphProto) -> Iterator[tuple[str, Described]]:
    inputs = {value.name for value in graph.input}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.name not in inputs or value.type.tensor_type.HasField("shape"):
            yield value.name, _of(value.type)


def _of(kind: TypeProto) -> Described:
    if not kind.HasField("tensor_type"):
        return Described(0, None)
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return Described(tensor.elem_type, None)
    dims = tensor.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        return Described(tensor.elem_type, None)
    return Described(tensor.elem_type, tuple(dim.dim_value for dim in dims))


def _by_symbols(light: ModelProto, _: Sequence[Path]) -> Iterator[tuple[str, Described]]:
    """What ONNX Runtime's inference over symbols makes of it, as of Loops; nothing if it gives up.

    It leaves files behind in the working directory when it does.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-shapes-") as scratch, contextlib.chdir(scratch):
        try:
            inferred = SymbolicShapeInference.infer_shapes(light, auto_merge=True)
        except Exception:  # noqa: BLE001  # it raises whatever it trips over; what it knows is extra
            return
    if inferred is not None:
        yield from _described(inferred.graph)


def _by_runtime(light: ModelProto, custom_ops: Sequence[Path]) -> Iterator[tuple[str, Described]]:
    """What ONNX Runtime knows of a model when it loads it: of its own operators too."""
    asked = ModelProto()
    asked.CopyFrom(light)
    del asked.graph.output[:]
    asked.graph.output.extend(
        ValueInfoProto(name=name) for node in asked.graph.node for name in node.output if name
    )
    try:
        options = SessionChoice(custom_ops=tuple(custom_ops)).options()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(
            asked.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except Exception:  # noqa: BLE001  # onnxruntime's errors have no common class; reported elsewhere
        return
    for output in session.get_outputs():
        element = _ELEMENTS.get(output.type)
        # It gives an unknown rank as that of a number, so numbers are not believed.
        known = bool(output.shape) and all(isinstance(size, int) for size in output.shape)
        if element is not None and known:
            yield output.name, Described(element, tuple(output.shape))


_ELEMENTS: Mapping[str, int] = {
    f"tensor({name.lower()})": element for name, element in TensorProto.DataType.items()
}
"""Types as ONNX Runtime names them."""
