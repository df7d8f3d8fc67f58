"""Arrays as values of ONNX Runtime and back, also of types that numpy does not have.

Those come and go as the integers that have the same bits: bfloat16 as uint16.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping

import numpy as np
from onnxruntime import OrtValue

from .errors import StageError

_FOREIGN: Mapping[str, tuple[int, str]] = {
    "bfloat16": (16, "uint16"),
    "float8_e4m3fn": (17, "uint8"),
    "float8_e4m3fnuz": (18, "uint8"),
    "float8_e5m2": (19, "uint8"),
    "float8_e5m2fnuz": (20, "uint8"),
}
"""By name: the number that ONNX has for the type, and the integers of the same bits."""

_NAME = {f"tensor({name.replace('_', '')})": name for name in _FOREIGN}
"""By ONNX Runtime's name of the type."""


def foreign(name: str) -> bool:
    """Whether numpy does not have the type of this name."""
    return name in _FOREIGN


def array_dtype(name: str) -> np.dtype:
    """The type of the arrays that stand for a type of ONNX, by its name in `Input.dtype`."""
    return np.dtype(_FOREIGN[name][1] if foreign(name) else name)


def name_of(kind: str) -> str:
    """The name of a type of ONNX Runtime's where numpy does not have it; "" where it does."""
    return _NAME.get(kind, "")


def foreign_name(value: OrtValue) -> str:
    """The name of a value's type where numpy does not have it; "" where it does."""
    return name_of(value.data_type())


def numbers(array: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in an array that stands for bfloat16, as float32; other arrays as they are."""
    if dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def value_of(array: np.ndarray, dtype: str = "") -> OrtValue:
    """A value that looks into an array.

    Args:
        dtype: the name of its type, where the array's integers stand for one of another.
    """
    if dtype not in _FOREIGN:
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array, _FOREIGN[dtype][0])


def array_of(value: OrtValue) -> np.ndarray:
    """The numbers of a value, in the memory of the processor.

    Raises:
        StageError: for types that arrays cannot stand for.
    """
    name = foreign_name(value)
    if not name:
        try:
            return np.asarray(value.numpy())
        except RuntimeError as error:
            raise StageError(f"a {value.data_type()} cannot leave its process: {error}") from error
    if value.device_name() != "cpu":
        raise StageError(
            f"a {value.data_type()} on {value.device_name()} cannot be read: let the stage that "
            "makes it run on the processor (--devices)"
        )
    dtype = array_dtype(name)
    shape = tuple(value.shape())
    data = ctypes.string_at(value.data_ptr(), math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
