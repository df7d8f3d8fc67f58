"""Types and shapes of all values of an ONNX model, for inputs of given sizes.

Found by ONNX's own shape inference, with the sizes of the inputs filled in and the shapes that the
model declares; what it does not know is recorded while ONNX Runtime runs the model. Where a shape
follows from the numbers in the inputs, no run shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, TypeProto, ValueInfoProto
from onnxruntime import OrtValue

from gpipe_compiler.onnx.frontend.number_shapes import number_shapes
from gpipe_compiler.onnx.frontend.reading import OnnxModel, session_of, without_weights
from gpipe_compiler.onnx.frontend.types import torch_dtype
from gpipe_compiler.onnx.runtime.stage import run_values

_SMALL = 1024
"""Elements up to which a weight may hold a shape, so that its numbers are looked at."""


@dataclass(frozen=True, slots=True)
class Described:
    """The type of a value.

    Attributes:
        element: the type of its elements (`TensorProto.DataType`); 0 for anything but tensors.
        shape: None where it is not known.
        numeric: whether the shape may be another for inputs of the same shapes.
        other: the type of a sequence or an optional of tensors.
    """

    element: int
    shape: tuple[int, ...] | None
    numeric: bool = False
    other: TypeProto | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is one that arrays can hold, of a shape that was seen."""
        held = self.element == TensorProto.STRING or torch_dtype(self.element) is not None
        return self.shape is not None and held

    @property
    def crosses(self) -> bool:
        """Whether micro-batches of the value can be handed from one stage to another."""
        return self.other is not None or (self.is_tensor and not self.numeric)

    @property
    def type(self) -> TypeProto | None:
        """Its type where torch has no dtype for it; None for any other."""
        if self.element != TensorProto.STRING or self.shape is None:
            return self.other
        return onnx.helper.make_tensor_type_proto(TensorProto.STRING, [None] * len(self.shape))


def describe(model: OnnxModel, inputs: Mapping[str, np.ndarray]) -> Mapping[str, Described]:
    """Every value of the main graph, for inputs of these shapes; unknown ones are left out."""
    sizes = {name: array.shape for name, array in inputs.items()}
    light = without_weights(model.proto, _SMALL, sizes)
    found = _inferred(light)
    unknown = _unknown(light, found)
    if unknown:
        found |= _further(model, inputs, unknown)
        declared = [v for v in _declared(model.proto, sizes) if v.name in _unknown(light, found)]
        if declared:
            light.graph.value_info.extend(declared)
            found = {**_inferred(light), **{n: k for n, k in found.items() if k.shape is not None}}
    for tensor in model.proto.graph.initializer:
        found[tensor.name] = Described(tensor.data_type, tuple(tensor.dims))
    for sparse in model.proto.graph.sparse_initializer:
        found[sparse.values.name] = Described(sparse.values.data_type, tuple(sparse.dims))
    return found


def _inferred(light: ModelProto) -> dict[str, Described]:
    inferred = onnx.shape_inference.infer_shapes(light, check_type=False, data_prop=True)
    return dict(_described(inferred.graph))


def _unknown(light: ModelProto, found: Mapping[str, Described]) -> frozenset[str]:
    nothing = Described(0, None)
    made = {n: found.get(n, nothing) for node in light.graph.node for n in node.output if n}
    return frozenset(n for n, known in made.items() if known.shape is None and known.other is None)


def _further(
    model: OnnxModel, inputs: Mapping[str, np.ndarray], names: Collection[str]
) -> dict[str, Described]:
    """What a run shows of values. One whose shape follows from numbers is declared, or numeric."""
    numeric = number_shapes(model.proto)
    sizes = {name: array.shape for name, array in inputs.items()}
    promised = {value.name: _of(value.type) for value in _declared(model.proto, sizes)}
    return {
        name: Described(known.element, known.shape, name in numeric and promised.get(name) != known)
        for name, known in _recorded(model, inputs, names)
    }


def _recorded(
    model: OnnxModel, inputs: Mapping[str, np.ndarray], names: Collection[str]
) -> Iterator[tuple[str, Described]]:
    """What ONNX Runtime makes of these values; nothing where it cannot run the model."""
    asked = ModelProto()
    asked.CopyFrom(model.proto)
    del asked.graph.output[:]
    asked.graph.output.extend(ValueInfoProto(name=name) for name in sorted(names))
    try:
        found = run_values(session_of(model, asked), inputs, sorted(names))
    except Exception:  # noqa: BLE001  # onnxruntime's errors have no common class; reported elsewhere
        return
    yield from zip(sorted(names), map(_seen, found), strict=True)


def _seen(value: object) -> Described:
    if isinstance(value, np.ndarray):  # of strings, where there are some
        return Described(onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
    if not isinstance(value, OrtValue) or not value.has_value() or not value.is_tensor():
        return Described(0, None)
    return Described(value.element_type(), tuple(value.shape()))


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
        held = kind.optional_type if kind.HasField("optional_type") else kind.sequence_type
        tensors = held.elem_type.HasField("tensor_type")
        return Described(0, None, other=kind if tensors else None)
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return Described(tensor.elem_type, None)
    dims = tensor.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        return Described(tensor.elem_type, None)
    return Described(tensor.elem_type, tuple(dim.dim_value for dim in dims))
