"""Arrays: converted to values of ONNX Runtime and back, read and written, and drawn at random.

Types that numpy does not have come and go as the integers of the same bits: bfloat16 as uint16.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime import OrtValue

from ...runtime.errors import StageError, UsageError
from .spec import OnnxPipelineSpec

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


STRINGS = "str"
"""The name of the type of strings: arrays of them are of objects, or of numpy's own strings."""


def foreign(name: str) -> bool:
    """Whether numpy does not have the type of this name."""
    return name in _FOREIGN


def array_dtype(name: str) -> np.dtype:
    """The type of the arrays that stand for a type of ONNX, by its name in `Input.dtype`."""
    if name == STRINGS:
        return np.dtype(object)
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


def value_of(array: np.ndarray, dtype: str = "") -> Any:
    """A value that looks into an array; strings as they are, as there are no values of them.

    Args:
        dtype: the name of its type, where the array's integers stand for one of another.
    """
    if array.dtype.kind in "OU":
        return array.astype(object)
    if dtype not in _FOREIGN:
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array, _FOREIGN[dtype][0])


def array_of(value: OrtValue | object) -> Any:
    """The numbers of a value, in the memory of the processor; what is no tensor as it is.

    Raises:
        StageError: for types that arrays cannot stand for.
    """
    if not isinstance(value, OrtValue):
        return value
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


def leaves(things: Mapping[str, object]) -> dict[str, np.ndarray]:
    """Arrays that stand for outputs of any kind: of sequences and maps, one for each thing in them.

    They are called `scores[0][1]`. Strings are numpy's own.
    """
    found: dict[str, np.ndarray] = {}
    for name, thing in things.items():
        if isinstance(thing, dict):
            found |= leaves({f"{name}[{key}]": part for key, part in thing.items()})
        elif isinstance(thing, list):
            found |= leaves({f"{name}[{at}]": part for at, part in enumerate(thing)})
        elif thing is not None:
            array = np.asarray(thing)
            found[name] = array.astype(str) if array.dtype == object else array
    return found


def arrays_of(names: Sequence[str], path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name; that of an .npy file is the only one of these names.

    Raises:
        UsageError: when it cannot be read, or has no name and there are several.
    """
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.ndarray):
                return {name: found[name] for name in found.files}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{path} cannot be read as .npz: {error}") from error
    if len(names) != 1:
        raise UsageError(f"{path} holds one array, not {', '.join(names)}: give an .npz")
    return {names[0]: found}


def write_arrays(path: Path, things: Mapping[str, object]) -> None:
    """Writes arrays as .npz, by name; a single one as .npy where the file is called so.

    Other things are written as `leaves` has them.
    """
    arrays = leaves(things)
    if path.suffix == ".npy" and len(arrays) == 1:
        with path.open("wb") as file:
            np.lib.format.write_array(file, next(iter(arrays.values())), allow_pickle=False)
        return
    # A zip archive is not written from start to end, as a device or a pipe is.
    target = path if path.is_file() or not path.exists() else io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    if isinstance(target, io.BytesIO):
        path.write_bytes(target.getvalue())


def random_arrays(spec: OnnxPipelineSpec, samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random arrays of the planned shapes, for a number of samples.

    Raises:
        UsageError: for more than this machine could hold.
    """
    generator = np.random.default_rng(seed)
    arrays = {}
    for known in spec.inputs:
        shape = [samples if size is None else size for size in known.shape]
        if known.batch_dim is not None:
            shape[known.batch_dim] = samples
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 8 * math.prod(shape) > memory:  # they are drawn in 64 bits
            raise UsageError(f"a batch of {samples:,} samples is larger than this machine's memory")
        arrays[known.name] = random_array(
            generator, shape, known.dtype, known.integers, known.words
        )
    return arrays


def random_array(
    generator: np.random.Generator,
    shape: Sequence[int],
    kind: str,
    integers: tuple[int, int] = (0, 2),
    words: Sequence[str] = (),
) -> np.ndarray:
    """Normal numbers, integers between two, booleans, words; other types as `array_dtype` says."""
    dtype = array_dtype(kind)
    if kind == STRINGS:
        return np.array([*words, "word"], object)[generator.integers(0, len(words) + 1, shape)]
    if kind == "bfloat16":
        drawn = generator.standard_normal(shape).astype(np.float32)
        return (drawn.view(np.uint32) >> 16).astype(dtype)
    if np.issubdtype(dtype, np.inexact):
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(*((0, 2) if kind == "bool" else integers), shape).astype(dtype)
