"""From what the caller passes to the named tensors of every micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from ..errors import UsageError
from ..spec import Input, PipelineSpec
from .nest import tensors_of
from .request import Values

Inputs: TypeAlias = object
"""A tensor, a tuple of positional arguments, a dict of keyword arguments, or (tuple, dict)."""

_MISSING = object()


def bind(inputs: Inputs, target: object, spec: PipelineSpec, needed: frozenset[str]) -> Values:
    """The tensors of a call by the names of the pipeline's inputs.

    Args:
        needed: the inputs that must be there; others may be None or absent.

    Raises:
        UsageError: when one is missing, is no tensor, has another dtype or shape, or when a tensor
            is passed that the pipeline knows nothing of.
    """
    args, kwargs = as_call(inputs)
    call = {"args": args, "kwargs": kwargs, "target": target}
    bound: Values = {}
    for source in spec.inputs:
        item = look_up(call, source.path)
        if isinstance(item, torch.Tensor):
            _check(source, item)
            bound[source.name] = item.detach()
        elif source.name in needed:
            found = "is missing" if item is _MISSING or item is None else f"is {_describe(item)}"
            raise UsageError(
                f"{spec.name}: {describe_path(source.path)} {found}; a tensor is needed",
                hint=f"the pipeline takes {_expected(spec)}; this call passes {_describe(inputs)}",
            )
    known = {source.path for source in spec.inputs}
    passed = {"args": args, "kwargs": kwargs}
    for path, _ in tensors_of(passed):
        if path not in known:
            raise UsageError(
                f"{spec.name} takes no {describe_path(path)}",
                hint=f"the pipeline takes {_expected(spec)}",
            )
    return bound


def passed_to(spec: PipelineSpec, inputs: Inputs, target: object) -> Values:
    """The tensors that a caller passes, by the names of the pipeline's inputs; as they are."""
    args, kwargs = as_call(inputs)
    call = {"args": args, "kwargs": kwargs, "target": target}
    items = ((source.name, look_up(call, source.path)) for source in spec.inputs)
    return {name: item for name, item in items if isinstance(item, torch.Tensor)}


def as_call(inputs: Inputs) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """Positional and keyword arguments, from any of the forms of `Inputs`."""
    match inputs:
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case tuple():
            return inputs, {}
        case dict():
            return (), inputs
        case _:
            return (inputs,), {}


def batch_of(bound: Values, spec: PipelineSpec) -> int | None:
    """The samples in a call, None where nothing is batched."""
    for source in spec.inputs:
        if source.batched and source.name in bound:
            return source.samples(bound[source.name])
    return None


def even_sizes(samples: int, parts: int) -> tuple[int, ...]:
    """So many samples in so many parts, the larger ones first; sizes differ by one at most."""
    size, larger = divmod(samples, parts)
    return tuple(size + 1 if part < larger else size for part in range(parts))


def microbatch_count(spec: PipelineSpec, samples: int, most: int) -> int:
    """How many micro-batches so many samples make: fewer than `most` for a small batch.

    Each has a sample at least; two, where a stage normalises over them, unless one was planned.
    """
    normalises = any(stage.mixes for stage in spec.stages)
    least = 2 if normalises and spec.microbatch_size > 1 else 1
    return max(1, min(most, samples // least))


def split(
    bound: Values, spec: PipelineSpec, microbatches: int
) -> tuple[list[Values], tuple[int, ...]]:
    """The inputs of every micro-batch, and the samples in each.

    A batch too small for so many micro-batches makes fewer; see `microbatch_count`.

    Raises:
        UsageError: when there are no samples, or inputs disagree on their number.
    """
    sizes = {
        source.name: source.samples(bound[source.name])
        for source in spec.inputs
        if source.batched and source.name in bound
    }
    if not sizes:
        return [dict(bound) for _ in range(microbatches)], (spec.microbatch_size,) * microbatches
    name, batch = next(iter(sizes.items()))
    for other, size in sizes.items():
        if size != batch:
            raise UsageError(f"{spec.name}: {name} has {batch} samples, {other} has {size}")
    if batch == 0:
        raise UsageError(f"{spec.name}: the batch is empty, {name} has no samples")
    parts = even_sizes(batch, microbatch_count(spec, batch, microbatches))
    if len(parts) == 1:
        return [dict(bound)], parts
    pieces = {
        source.name: torch.split(bound[source.name], list(parts), source.batch_dim)
        if source.batch_dim is not None
        else (bound[source.name],) * len(parts)
        for source in spec.inputs
        if source.name in bound
    }
    return [{name: piece[m] for name, piece in pieces.items()} for m in range(len(parts))], parts


def describe_path(path: Sequence[str | int]) -> str:
    """Where a tensor stands in the call, as its caller would write it."""
    head, *rest = path
    if head == "args" and rest:
        text = f"positional argument {rest.pop(0)}"
    elif head == "kwargs" and rest:
        text = f"keyword argument {rest.pop(0)!r}"
    else:
        text = str(head)
    return text + "".join(f"[{key!r}]" for key in rest)


def look_up(call: Mapping[str, object], path: Sequence[str | int]) -> object:
    """What stands at a path of a call; something that is no tensor where nothing does."""
    item: object = call
    for key in path:
        match item:
            case dict() if key in item:
                item = item[key]
            case tuple() | list() if isinstance(key, int) and key < len(item):
                item = item[key]
            case _ if isinstance(key, str) and key.isidentifier() and hasattr(item, key):
                item = getattr(item, key)
            case _:
                return _MISSING
    return item


def _check(source: Input, tensor: torch.Tensor) -> None:
    where = describe_path(source.path)
    dim = source.batch_dim
    if dim is not None and tensor.dim() <= dim:
        raise UsageError(
            f"{where} has shape {_sizes(tensor.shape)}: no dimension {dim} to split into "
            "micro-batches"
        )
    if source.dtype is not None and tensor.dtype != source.dtype:
        raise UsageError(
            f"{where} is of {tensor.dtype}, the model was compiled for {source.dtype}",
            hint=f"convert it: .to({source.dtype})",
        )
    if source.shape is None:
        return
    wanted = ["batch" if d == dim else size for d, size in enumerate(source.shape)]
    if len(wanted) != tensor.dim() or any(
        size not in ("batch", found) for size, found in zip(wanted, tensor.shape, strict=True)
    ):
        raise UsageError(
            f"{where} has shape {_sizes(tensor.shape)}, the model was compiled for {_sizes(wanted)}"
        )


def _expected(spec: PipelineSpec) -> str:
    return ", ".join(describe_path(source.path) for source in spec.inputs) or "nothing"


def _describe(item: object) -> str:
    match item:
        case torch.Tensor():
            return f"a tensor {_sizes(item.shape)}"
        case dict():
            return "{" + ", ".join(f"{key!r}: {_describe(v)}" for key, v in item.items()) + "}"
        case tuple() | list():
            return f"{type(item).__name__}({', '.join(map(_describe, item))})"
        case None:
            return "None"
        case _:
            return type(item).__name__


def _sizes(shape: Sequence[object]) -> str:
    return "x".join(map(str, shape)) or "()"
