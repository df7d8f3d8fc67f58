"""Arrays in files, and random ones where there are none."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .errors import UsageError
from .spec import PipelineSpec
from .values import array_dtype


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name; of an .npy file, under the name "".

    Raises:
        UsageError: when it cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return {"": found}
            return {name: found[name] for name in found.files}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{path} cannot be read as .npz: {error}") from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as .npz, by name; a single one as .npy where the file is called so."""
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


def arrays_of(names: Sequence[str], path: Path) -> dict[str, np.ndarray]:
    """The arrays in a file, by name; a single array is the only one of these names.

    Raises:
        UsageError: when it cannot be read, or has no name and there are several.
    """
    found = read_arrays(path)
    if "" not in found:
        return found
    if len(names) != 1:
        raise UsageError(f"{path} holds one array, not {', '.join(names)}: give an .npz")
    return {names[0]: found[""]}


def random_arrays(spec: PipelineSpec, samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays of the planned shapes, for so many samples.

    Raises:
        UsageError: for more than this machine could hold.
    """
    generator = np.random.default_rng(seed)
    arrays = {}
    for known in spec.inputs:
        shape = [samples if size is None else size for size in known.shape]
        if known.batched:
            shape[0] = samples
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if 8 * math.prod(shape) > memory:  # they are drawn in 64 bits
            raise UsageError(f"a batch of {samples:,} samples is larger than this machine's memory")
        arrays[known.name] = random_array(generator, shape, known.dtype)
    return arrays


def random_array(generator: np.random.Generator, shape: Sequence[int], kind: str) -> np.ndarray:
    """Normal numbers, and integers that are 0 or 1; `values` tells what stands for other types."""
    dtype = array_dtype(kind)
    if kind == "bfloat16":
        drawn = generator.standard_normal(shape).astype(np.float32)
        return (drawn.view(np.uint32) >> 16).astype(dtype)
    if np.issubdtype(dtype, np.inexact):
        return generator.standard_normal(shape).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)
