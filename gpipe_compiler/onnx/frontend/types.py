"""Element types of ONNX, as numpy and torch have them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from onnx import TensorProto

_TORCH: Mapping[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.INT8: torch.int8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.BOOL: torch.bool,
    TensorProto.COMPLEX64: torch.complex64,
    TensorProto.COMPLEX128: torch.complex128,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
}


def torch_dtype(element: int) -> torch.dtype | None:
    """The dtype of an element type; None where torch has none (strings, types of 4 bits)."""
    return _TORCH.get(element)


def element_name(element: int) -> str:
    """The name of an element type, such as `FLOAT`."""
    return TensorProto.DataType.Name(element) if element in TensorProto.DataType.values() else "?"


def element_of(dtype: torch.dtype) -> int:
    return next(element for element, known in _TORCH.items() if known is dtype)
