"""Mini-batches into micro-batches, and outputs of these put together again."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import numpy as np

from ...runtime.errors import UsageError
from .arrays import STRINGS, array_dtype, value_of
from .spec import ArrayInput, OnnxPipelineSpec
from .stage import Values

Arrays = Mapping[str, np.ndarray]


def batch_size(
    spec: OnnxPipelineSpec, arrays: Mapping[str, object], held: Container[str] = ()
) -> int:
    """The samples in a call, whose arrays are checked.

    Args:
        held: inputs that come from elsewhere.

    Raises:
        UsageError: with all that does not fit: arrays that are missing or unknown, of another type
            or shape, or of different numbers of samples.
    """
    faults = [f"there is no input {name}" for name in arrays.keys() - {i.name for i in spec.inputs}]
    sizes: dict[str, int] = {}
    for known in spec.inputs:
        array = arrays.get(known.name)
        if known.name in held and array is None:
            continue
        if array is None:
            faults.append(f"the input {known.name} is missing")
        elif not isinstance(array, np.ndarray):
            faults.append(f"the input {known.name} is a {type(array).__name__}, no numpy array")
        elif fault := _fault(known, array):
            faults.append(fault)
        elif known.batch_dim is not None:
            sizes[known.name] = array.shape[known.batch_dim]
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name} {size}" for name, size in sizes.items())
        faults.append(f"inputs hold different numbers of samples: {listing}")
    if faults:
        raise UsageError("; ".join(faults))
    return next(iter(sizes.values()), spec.microbatch_size)


def _fault(known: ArrayInput, array: np.ndarray) -> str:
    sizes = ["any" if dim in known.free else str(size) for dim, size in enumerate(known.shape)]
    if known.batch_dim is not None:
        sizes[known.batch_dim] = "B"
    fits = len(array.shape) == len(sizes) and all(
        size in ("any", "B", str(given)) for size, given in zip(sizes, array.shape, strict=True)
    )
    if not fits:
        return f"the input {known.name} is {'x'.join(map(str, array.shape))}, not {'x'.join(sizes)}"
    strings = known.dtype == STRINGS and array.dtype.kind == "U"
    if not strings and array.dtype != array_dtype(known.dtype):
        return f"the input {known.name} is {array.dtype}, not {array_dtype(known.dtype)}"
    if known.batch_dim is not None and not array.shape[known.batch_dim]:
        return f"the input {known.name} is an empty batch"
    return ""


def sizes_of(spec: OnnxPipelineSpec, samples: int, microbatches: int | None) -> tuple[int, ...]:
    """The samples of each micro-batch: as equal as can be.

    Args:
        microbatches: None for micro-batches of the planned size, of which the last may be smaller.

    Raises:
        UsageError: for none, or where the model takes only micro-batches of one size, or the batch
            in one piece.
    """
    size = spec.microbatch_size
    if spec.whole_batch:
        parts = samples // size if spec.fixed else 1
        if parts > 1 or microbatches not in (None, 1):
            raise UsageError(
                f"{spec.name} takes a mini-batch in one piece, not in {microbatches or parts}: "
                f"{spec.whole_batch}; leave the number of micro-batches out"
                + (f", and give it {size} samples" if spec.fixed else "")
            )
        microbatches = 1
    if spec.fixed:
        if samples % size or microbatches not in (None, samples // size):
            raise UsageError(
                f"the model takes {size} samples at a time: a batch of {samples} cannot be "
                f"{'split so' if microbatches else 'split'}"
            )
        return (size,) * (samples // size)
    if microbatches is None:
        microbatches = -(-samples // size)
        if spec.alone:
            microbatches = max(1, min(microbatches, samples // 2))
    if not 1 <= microbatches <= samples:
        raise UsageError(f"a batch of {samples} does not split into {microbatches} micro-batches")
    least, more = divmod(samples, microbatches)
    return tuple(least + (number < more) for number in range(microbatches))


def split(spec: OnnxPipelineSpec, arrays: Arrays, sizes: Sequence[int]) -> list[Values]:
    """The inputs of each micro-batch; they look into the caller's arrays."""
    found: list[Values] = [{} for _ in sizes]
    for known in spec.inputs:
        array, dim, start = arrays[known.name], known.batch_dim, 0
        for values, size in zip(found, sizes, strict=True):
            part = array if dim is None else rows(array, dim, start, size)
            # ascontiguousarray gives numbers a size
            values[known.name] = value_of(np.asarray(part, order="C"), known.dtype)
            start += size
    return found


def rows(array: np.ndarray, dim: int, start: int, size: int) -> np.ndarray:
    """Samples of an array that lie along a dimension; what is given looks into it."""
    return array[(slice(None),) * dim + (slice(start, start + size),)]


def join(dims: Mapping[str, int | None], results: Sequence[Arrays]) -> dict[str, np.ndarray]:
    """The outputs of the mini-batch, from those of its micro-batches.

    Args:
        dims: of each output the batch dimension; None where all micro-batches give the same.
    """
    joined = {}
    for name, dim in dims.items():
        parts = [values[name] for values in results]
        whole = dim is None or len(parts) == 1
        joined[name] = parts[0] if whole else np.concatenate(parts, axis=dim)
    return joined
