"""Stores the weights of stage models: in the models, or in files of their own beside them."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper
from onnx.external_data_helper import uses_external_data

from gpipe_compiler.errors import EmitError
from gpipe_compiler.onnx.frontend.reading import OnnxModel, tensors_of

INLINE = 64 * 2**20
"""Bytes of weights up to which a model is one file. Protocol buffers end at 2 GiB."""

_ALIGNED = 4096
"""Weights begin at multiples of this, so that ONNX Runtime can map them into memory."""

_PIECE = 16 * 2**20
_SMALL = 1024


def weight_bytes(model: OnnxModel) -> int:
    total = 0
    for tensor in model.proto.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        length = place.get("length") if uses_external_data(tensor) else None
        total += int(length) if length else math.prod(tensor.dims) * _item_bytes(tensor)
    return total


def _item_bytes(tensor: TensorProto) -> int:
    try:
        return int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError:
        return 1


def write_weights(graph: GraphProto, folder: Path, file: Path) -> None:
    """Moves the weights of a graph into one file beside its model, without loading them.

    Args:
        graph: changed: its tensors point to the file.
        folder: where the files that they point to now are.
        file: what is written; nothing where there is nothing to move.
    """
    own = len(graph.initializer)
    moved = [
        tensor
        for place, tensor in enumerate(tensors_of(graph))
        if uses_external_data(tensor) or (place < own and _is_large(tensor))
    ]
    if moved:
        with file.open("wb") as target:
            for tensor in moved:
                _move(tensor, folder, file, target)


def take_in(graph: GraphProto, folder: Path) -> None:
    """Has a graph hold all of its weights itself.

    ONNX's own function for this refuses files that are links, as model hubs lay them out.

    Args:
        folder: where the files that its tensors point to are.
    """
    for tensor in tensors_of(graph):
        if uses_external_data(tensor):
            target = io.BytesIO()
            _copy(tensor, folder, target)
            tensor.raw_data = target.getvalue()
            del tensor.external_data[:]
            tensor.data_location = TensorProto.DEFAULT


def _move(tensor: TensorProto, folder: Path, file: Path, target: BinaryIO) -> None:
    target.write(b"\0" * (-target.tell() % _ALIGNED))
    offset = target.tell()
    if uses_external_data(tensor):
        _copy(tensor, folder, target)
    else:
        target.write(_raw(tensor))
    for field in _NUMBERS:
        tensor.ClearField(field)
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    place = {"location": file.name, "offset": offset, "length": target.tell() - offset}
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))


def _is_large(tensor: TensorProto) -> bool:
    return math.prod(tensor.dims) > _SMALL and tensor.data_type != TensorProto.STRING


def _copy(tensor: TensorProto, folder: Path, target: BinaryIO) -> None:
    place = {entry.key: entry.value for entry in tensor.external_data}
    source = folder / place["location"]
    with source.open("rb") as file:
        file.seek(int(place.get("offset", 0)))
        left = int(place["length"]) if place.get("length") else source.stat().st_size - file.tell()
        while left:
            piece = file.read(min(_PIECE, left))
            if not piece:
                break
            target.write(piece)
            left -= len(piece)


def _raw(tensor: TensorProto) -> bytes:
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    return bytes(numpy_helper.to_array(tensor).tobytes())


_NUMBERS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "raw_data")


def save(proto: ModelProto, path: Path, what: str) -> None:
    """Writes a model as it is, its external weights untouched.

    Args:
        what: the model is called in an error.

    Raises:
        EmitError: when onnx.checker refuses it.
    """
    path.write_bytes(proto.SerializeToString())
    try:
        onnx.checker.check_model(path)
    except onnx.checker.ValidationError as error:
        raise EmitError(f"onnx.checker refuses {what}: {error}") from error
