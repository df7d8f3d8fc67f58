"""Arrays in files, and random ones where there are none."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
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
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read as .npz: {error}") from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as .npz, by name, whatever the file is called."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def arrays_for(spec: PipelineSpec, path: Path) -> dict[str, np.ndarray]:
    """The inputs of a pipeline from a file; a single array is its only input.

    Raises:
        UsageError: when it cannot be read, or has no name and there are several inputs.
    """
    found = read_arrays(path)
    if "" in found:
        if len(spec.inputs) != 1:
            names = ", ".join(item.name for item in spec.inputs)
            raise UsageError(f"{path} holds one array; the inputs are {names}: give an .npz")
        return {spec.inputs[0].name: found[""]}
    return found


def random_arrays(spec: PipelineSpec, samples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays that fit: normal numbers, and integers that are 0 or 1; sizes left open are 1."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for known in spec.inputs:
        shape = [1 if size is None else size for size in known.shape]
        if known.batched:
            shape[0] = samples
        dtype = array_dtype(known.dtype)
        if known.dtype == "bfloat16":
            numbers = generator.standard_normal(shape).astype(np.float32)
            arrays[known.name] = (numbers.view(np.uint32) >> 16).astype(dtype)
        elif np.issubdtype(dtype, np.inexact):
            arrays[known.name] = generator.standard_normal(shape).astype(dtype)
        else:
            arrays[known.name] = generator.integers(0, 2, shape).astype(dtype)
    return arrays
