"""From what the caller passes to the named tensors of every micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch

from ..errors import UsageError
from ..sizes import Dim, Expression, Size, Sizes, sizes_in, value_at
from ..spec import Input, PipelineSpec
from .nest import as_text, tensors_of, values_of
from .request import Values

Inputs: TypeAlias = object
"""A tensor, a tuple of positional arguments, a dict of keyword arguments, or (tuple, dict).

Or a list of these: the micro-batches, each of which may have sizes of its own. Where the model's
first argument is a list itself, a list is that argument.
"""

Passed: TypeAlias = tuple[Inputs, object]
"""Inputs and target, as the model itself is called."""

_MISSING = object()

NO_SIZES: Sizes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A mini-batch by the names of the pipeline's inputs.

    Attributes:
        calls: the mini-batch as it was passed, or every micro-batch.
        wholes: the tensors of each call.
        parts: the tensors of every micro-batch.
        listed: whether it was passed as a list of micro-batches.
    """

    calls: Sequence[Passed] = ()
    wholes: Sequence[Values] = ()
    parts: Sequence[Values] = ()
    samples: tuple[int, ...] = ()
    sizes: tuple[Sizes, ...] = ()
    listed: bool = False


def is_listed(spec: PipelineSpec, inputs: Inputs) -> bool:
    """Whether inputs are a list of micro-batches."""
    if not isinstance(inputs, list):
        return False
    inside = [source.path[2:] for source in spec.inputs if source.path[:2] == ("args", 0)]
    return not any(isinstance(key, int) for key, *_ in filter(None, inside))


def passed_calls(inputs: Inputs, target: object) -> Sequence[Passed]:
    """Each of the micro-batches that are passed as a list.

    Raises:
        UsageError: when the target is none or of another length.
    """
    assert isinstance(inputs, list)
    targets = [None] * len(inputs) if target is None else target
    if not isinstance(targets, list) or len(targets) != len(inputs):
        raise UsageError(
            f"the inputs are a list of {len(inputs)} micro-batches, and the target is "
            f"{_describe(target)}",
            hint="give a list with the target of each; positional arguments are given as a tuple",
        )
    return list(zip(inputs, targets, strict=True))


def bind_call(
    inputs: Inputs,
    target: object,
    spec: PipelineSpec,
    needed: frozenset[str],
    microbatches: int,
    *,
    may_be_empty: bool = False,
    known: Sizes = NO_SIZES,
) -> BoundCall:
    """The tensors of a mini-batch, micro-batch by micro-batch.

    Args:
        needed: the inputs that must be there; others may be None or absent.
        microbatches: into which a mini-batch that is passed whole is split, at most; see `split`.
        may_be_empty: whether it may have no samples, as a replica's share of a mini-batch.
        known: sizes of inputs that are not passed.

    Raises:
        UsageError: when a tensor is missing, does not fit, or is one that the pipeline knows
            nothing of; when sizes are not what the model demands; when there are no samples.
    """
    if not is_listed(spec, inputs):
        whole, sizes = bind(inputs, target, spec, needed, known)
        if may_be_empty and _batch_of(whole, spec) == 0:
            return BoundCall()
        parts, samples = split(whole, spec, microbatches)
        return BoundCall([(inputs, target)], [whole], parts, samples, (sizes,) * len(parts))
    calls = passed_calls(inputs, target)
    if not calls and may_be_empty:
        return BoundCall()
    if not calls:
        raise UsageError(f"{spec.name}: the list of micro-batches is empty")
    wholes: list[Values] = []
    counts: list[int] = []
    every: list[Sizes] = []
    for number, call in enumerate(calls):
        try:
            whole, sizes = bind(*call, spec, needed)
            _, count = split(whole, spec, 1)
        except UsageError as error:
            problem = f"micro-batch {number}: {error.problem}"
            raise UsageError(problem, hint=error.hint) from error
        wholes.append(whole)
        counts += count
        every.append(sizes)
    return BoundCall(calls, wholes, wholes, tuple(counts), tuple(every), listed=True)


def bind(
    inputs: Inputs,
    target: object,
    spec: PipelineSpec,
    needed: frozenset[str],
    known_sizes: Sizes = NO_SIZES,
) -> tuple[Values, Sizes]:
    """The tensors of a call by the names of the pipeline's inputs, and its sizes.

    Raises:
        UsageError: when one is missing, is no tensor, has another dtype or shape, when a tensor is
            passed that the pipeline knows nothing of, or when sizes are not what the model demands.
    """
    call = nest_of(inputs, target)
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
    passed = {key: item for key, item in call.items() if key != "target"}
    for path, _ in tensors_of(passed):
        if path not in known:
            raise UsageError(
                f"{spec.name} takes no {describe_path(path)}",
                hint=f"the pipeline takes {_expected(spec)}",
            )
    _check_values(call, spec)
    sizes = {**known_sizes, **_sizes_of(bound, spec)}
    for source in spec.inputs:
        if source.name in bound:
            _check_shape(source, bound[source.name], sizes, spec)
    _check_required(sizes, spec)
    return bound, sizes


def _check_values(call: Mapping[str, object], spec: PipelineSpec) -> None:
    """Raises UsageError for a value of Python's that the stages do not hold."""
    held = {given.path: given.text for given in spec.given}
    for path, item in values_of(call):
        if path[0] == "target" and path not in held:
            continue
        try:
            text = as_text(item)
        except TypeError as error:
            text = f"an object that nothing can be compared with ({error})"
        compiled = held.get(path, "None")
        if text == compiled:
            continue
        raise UsageError(
            f"{spec.name}: {describe_path(path)} is {text}, and the model was compiled "
            f"{f'for {compiled}' if path in held else 'without it'}: a package holds the values of "
            "Python's that the example call gives",
            hint="leave it out, or compile the model with this value; of a tensor each batch has "
            "its own",
        )


def passed_to(spec: PipelineSpec, inputs: Inputs, target: object) -> Values:
    """The tensors that a caller passes, by the names of the pipeline's inputs; as they are."""
    call = nest_of(inputs, target)
    items = ((source.name, look_up(call, source.path)) for source in spec.inputs)
    return {name: item for name, item in items if isinstance(item, torch.Tensor)}


def nest_of(inputs: Inputs, target: object) -> dict[str, object]:
    """What is passed, as the paths of the pipeline's inputs lead through it."""
    match inputs:
        case (tuple() as args, Mapping() as kwargs):
            pass
        case tuple():
            args, kwargs = inputs, {}
        case Mapping():
            args, kwargs = (), inputs
        case _:
            args, kwargs = (inputs,), {}
    return {"args": args, "kwargs": kwargs, "target": target}


def _batch_of(bound: Values, spec: PipelineSpec) -> int | None:
    """The samples in a call, None where nothing is batched."""
    for source in spec.inputs:
        if source.batched and source.name in bound:
            return source.samples(bound[source.name])
    return None


def even_sizes(samples: int, parts: int, group: int = 1) -> tuple[int, ...]:
    """The samples of each part, the larger ones first; sizes differ by a group at most.

    Args:
        group: samples that stay together; of what is no whole one the last part has the rest.
    """
    size, larger = divmod(samples // group, parts)
    sizes = [group * (size + (part < larger)) for part in range(parts)]
    return (*sizes[:-1], sizes[-1] + samples % group)


def microbatch_count(spec: PipelineSpec, samples: int, most: int) -> int:
    """How many micro-batches a number of samples makes: fewer than `most` for a small batch.

    Each has a sample, or a group of them, at least; two, where a stage normalises over them or
    computes something else of one, unless one was planned.
    """
    several = spec.several or any(stage.mixes for stage in spec.stages)
    least = 2 if several and spec.microbatch_size > 1 else 1
    return max(1, min(most, samples // max(least, spec.group.samples)))


def split(
    bound: Values, spec: PipelineSpec, microbatches: int
) -> tuple[list[Values], tuple[int, ...]]:
    """The inputs of every micro-batch, and the samples in each.

    A batch too small for the micro-batches makes fewer; see `microbatch_count`.

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
    count = microbatch_count(spec, batch, microbatches)
    parts = even_sizes(batch, count, spec.group.samples)
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
            case Mapping() if key in item:
                item = item[key]
            case tuple() | list() if isinstance(key, int) and key < len(item):
                item = item[key]
            case _ if isinstance(key, str) and key.isidentifier() and hasattr(item, key):
                item = getattr(item, key)
            case _:
                return _MISSING
    return item


def _check(source: Input, tensor: torch.Tensor) -> None:
    dim = source.batch_dim
    if dim is not None and tensor.dim() <= dim:
        raise UsageError(
            f"{describe_path(source.path)} has shape {_as_text(tensor.shape)}: no dimension {dim} "
            "to split into micro-batches"
        )
    if source.dtype is not None and tensor.dtype != source.dtype:
        raise UsageError(
            f"{describe_path(source.path)} is of {tensor.dtype}, the model was compiled for "
            f"{source.dtype}",
            hint=f"convert it: .to({source.dtype})",
        )


def _sizes_of(bound: Values, spec: PipelineSpec) -> dict[str, int]:
    """The sizes of a call: from the input that they are of, or else another that has them."""
    found: dict[str, int] = {}
    for source in spec.inputs:
        shape = bound[source.name].shape if source.name in bound else ()
        for place, (dim, number) in enumerate(zip(source.shape or (), shape, strict=False)):
            if isinstance(dim, Size) and (dim.of == (source.name, place) or dim.name not in found):
                found[dim.name] = number
    return found


def _check_shape(source: Input, tensor: torch.Tensor, sizes: Sizes, spec: PipelineSpec) -> None:
    if source.shape is None:
        return

    def fits(place: int, dim: Dim, number: int) -> bool:
        if place == source.batch_dim or any(size.name not in sizes for size in sizes_in((dim,))):
            return True
        return value_at(dim, sizes) == number

    pairs = list(zip(source.shape, tensor.shape, strict=False))
    if tensor.dim() == len(source.shape) and all(fits(d, *pair) for d, pair in enumerate(pairs)):
        return
    fixed = [d for d, pair in enumerate(pairs) if isinstance(pair[0], int) and not fits(d, *pair)]
    wanted = ["batch" if d == source.batch_dim else dim for d, dim in enumerate(source.shape)]
    free = dict.fromkeys(size for size in sizes_in(source.shape) if size.name in sizes)
    raise UsageError(
        f"{describe_path(source.path)} has shape {_as_text(tensor.shape)}, the model was compiled "
        f"for {_as_text(wanted)}{_where(free, sizes, spec)}",
        hint=f"pad or cut it; a compile with --free {source.name}.{fixed[0]} names the line of the "
        "model that fixes this size"
        if fixed and tensor.dim() == len(source.shape)
        else "pass a tensor of such a shape",
    )


def _check_required(sizes: Sizes, spec: PipelineSpec) -> None:
    for requirement in spec.requires:
        free = dict.fromkeys(sizes_in((requirement.left, requirement.right)))
        if all(size.name in sizes for size in free) and not requirement.holds(sizes):
            raise UsageError(
                f"{spec.name} demands {requirement}{_where(free, sizes, spec)}: "
                f"{requirement.where}",
                hint="pad or cut the inputs to sizes for which that holds",
            )


def _where(free: Iterable[Size], sizes: Sizes, spec: PipelineSpec) -> str:
    paths = {source.name: describe_path(source.path) for source in spec.inputs}
    told = (
        f"{size} is {sizes[size.name]} (dimension {size.of[1]} of {paths[size.of[0]]})"
        for size in free
    )
    text = " and ".join(told)
    return f", and {text}" if text else ""


def _expected(spec: PipelineSpec) -> str:
    return ", ".join(describe_path(source.path) for source in spec.inputs) or "nothing"


def _describe(item: object) -> str:
    match item:
        case torch.Tensor():
            return f"a tensor {_as_text(item.shape)}"
        case Mapping():
            return "{" + ", ".join(f"{key!r}: {_describe(v)}" for key, v in item.items()) + "}"
        case tuple() | list():
            return f"{type(item).__name__}({', '.join(map(_describe, item))})"
        case None:
            return "None"
        case _:
            return type(item).__name__


def _as_text(shape: Sequence[object]) -> str:
    free = any(isinstance(dim, Expression) for dim in shape)
    return (" x " if free else "x").join(map(str, shape)) or "()"
