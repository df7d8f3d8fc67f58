"""Sizes of the inputs of an ONNX model: which dimension is the batch, how large the others are.

The batch is dimension 0: of every input where it is symbolic. Where it is a number in all of them,
it is that of the first input, and of those that agree with it; micro-batches are of just that size.
Other symbolic dimensions, such as the length of a sequence, have to be given, each symbol once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from onnx import ValueInfoProto

from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.onnx.frontend.types import element_name, torch_dtype

DEFAULT_BATCH = 8
"""Samples of a mini-batch where nobody says how many."""

Dims: TypeAlias = "tuple[int | str, ...] | None"
"""Sizes, and names of those that are open; None where the model leaves out the shape."""

_NAMELESS = "?"
"""An open size without a name."""

_SPEC = re.compile(r"(?:(?P<name>.+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?", re.DOTALL)
"""What `--input` takes. Names of ONNX may hold anything, also `:` and `=`."""


@dataclass(frozen=True)
class InputSizes:
    """The shapes of all inputs for one batch.

    Attributes:
        batch: samples.
        shapes: by name; for `batch` samples.
        batched: the inputs whose dimension 0 is the batch.
        free: by name, the dimensions that may be of another size in every call, without the batch.
        fixed: whether the model takes batches of no other size.
        dtypes: by name.
    """

    batch: int
    shapes: Mapping[str, tuple[int, ...]]
    batched: frozenset[str]
    free: Mapping[str, tuple[int, ...]]
    fixed: bool
    dtypes: Mapping[str, torch.dtype]

    def at(self, samples: int) -> dict[str, tuple[int, ...]]:
        """The shapes for a number of samples."""
        return {
            name: (samples, *shape[1:]) if name in self.batched else shape
            for name, shape in self.shapes.items()
        }


def input_sizes(model: OnnxModel, specs: Sequence[str] = ()) -> InputSizes:
    """The sizes that a model declares, completed by what the user gives.

    Args:
        specs: `[NAME=]8x128:int64` each, as `--input` takes them.

    Raises:
        UsageError: for specs that name no input, or contradict the model, and where dimensions
            other than the batch are left open.
        ModelError: for an input that is no tensor, or of a type that no stage can be handed.
    """
    sources = _sources(model)
    given = _given(model, sources, specs)
    declared = {name: _declared(source) for name, source in sources.items()}
    for name, shape in given.items():
        _agree(model, name, declared[name], shape)
    symbols = _symbols(declared, given)
    fixed = _fixed_batch(model, declared)
    batched = _batched(declared, given, fixed)
    samples = fixed or _samples(given, batched)
    shapes: dict[str, tuple[int, ...]] = {}
    missing = []
    for name, dims in declared.items():
        known = given.get(name) or _filled(dims, symbols, samples if name in batched else None)
        open_dims = [dim for dim in known or () if isinstance(dim, str)]
        if known is None or open_dims:
            missing.append(f"{name} ({', '.join(open_dims) or 'its whole shape'})")
        shapes[name] = tuple(dim for dim in known or () if isinstance(dim, int))
    if missing:
        raise UsageError(
            f"{model.path.name} leaves sizes open: {'; '.join(missing)}",
            hint="give them: --input NAME=8x128, once for every such size",
        )
    return InputSizes(
        samples,
        shapes,
        batched,
        {name: _free(declared[name], shape, name in batched) for name, shape in shapes.items()},
        fixed is not None,
        {name: _dtype(model, source) for name, source in sources.items()},
    )


def _sources(model: OnnxModel) -> dict[str, ValueInfoProto]:
    """The inputs of the graph that are no weights.

    Raises:
        ModelError: for one that is no tensor.
    """
    graph = model.proto.graph
    weights = {tensor.name for tensor in graph.initializer}
    weights.update(tensor.values.name for tensor in graph.sparse_initializer)
    sources = {source.name: source for source in graph.input if source.name not in weights}
    for name, source in sources.items():
        if not source.type.HasField("tensor_type"):
            kind = str(source.type.WhichOneof("value")).removesuffix("_type")
            raise ModelError(
                f"the input {name} of {model.path} is no tensor ({kind}): it cannot be split into "
                "micro-batches",
                hint="give the model inputs that are tensors",
            )
    if not sources:
        held = ", ".join(source.name for source in graph.input)
        but = f" but those that have a value in the file ({held})" if held else ""
        raise ModelError(
            f"{model.path} has no inputs{but}, so there is nothing to stream through it"
        )
    return sources


def _dtype(model: OnnxModel, source: ValueInfoProto) -> torch.dtype:
    element = source.type.tensor_type.elem_type
    dtype = torch_dtype(element)
    if dtype is None:
        raise ModelError(
            f"the input {source.name} of {model.path} holds {element_name(element)}, which cannot "
            "be split into micro-batches",
            hint="do what it is needed for outside of the model",
        )
    return dtype


def _declared(source: ValueInfoProto) -> Dims:
    """The shape of an input; sizes below 0, which some exporters write, are open."""
    if not source.type.tensor_type.HasField("shape"):
        return None
    return tuple(
        dim.dim_value
        if dim.HasField("dim_value") and dim.dim_value >= 0
        else dim.dim_param or _NAMELESS
        for dim in source.type.tensor_type.shape.dim
    )


def _fixed_batch(model: OnnxModel, declared: Mapping[str, Dims]) -> int | None:
    """The batch size of a model that takes no other, where all sizes are numbers: the first.

    Raises:
        ModelError: for a batch of no samples.
    """
    if any(dims is None for dims in declared.values()):
        return None
    first = [dims[0] for dims in declared.values() if dims]
    if not first or not all(isinstance(size, int) for size in first):
        return None
    size = int(first[0])
    if not size:
        raise ModelError(
            f"{model.path} takes batches of no samples",
            hint="export it with a free first size (dynamic_shapes)",
        )
    return size


def _batched(
    declared: Mapping[str, Dims], given: Mapping[str, tuple[int, ...]], fixed: int | None
) -> frozenset[str]:
    """The inputs whose dimension 0 is the batch.

    Not where its symbol is that of another dimension too, as of [batch, length] and [length, 4].
    """
    first = {name: dims[0] for name, dims in declared.items() if dims}
    first |= {
        name: _NAMELESS for name, dims in declared.items() if dims is None and given.get(name)
    }
    if fixed is not None:
        return frozenset(name for name, size in first.items() if size == fixed)
    later = {dim for dims in declared.values() for dim in (dims or ())[1:]} - {_NAMELESS}
    free = {name for name, dim in first.items() if isinstance(dim, str)}
    return frozenset({name for name in free if first[name] not in later} or free)


def _filled(
    dims: Dims, symbols: Mapping[str, int], samples: int | None
) -> tuple[int | str, ...] | None:
    """A shape with all that is known of its open sizes."""
    if dims is None:
        return None
    known = [symbols.get(dim, dim) if isinstance(dim, str) else dim for dim in dims]
    if samples is not None:
        known[0] = samples
    return tuple(known)


def _free(dims: Dims, shape: tuple[int, ...], batched: bool) -> tuple[int, ...]:
    return tuple(
        at for at in range(int(batched), len(shape)) if dims is None or isinstance(dims[at], str)
    )


def _given(
    model: OnnxModel, sources: Mapping[str, ValueInfoProto], specs: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """The shapes in the specs, by input.

    Raises:
        UsageError: for specs that cannot be read or name no input.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    unnamed = iter(sources)
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise UsageError(
                f"--input {spec!r} gives no shape", hint="write sizes: 32x3x224x224, or mask=32x128"
            )
        name = match["name"] or next(unnamed, "")
        if name not in sources:
            what = f"no input {name}" if name else f"{len(sources)} inputs"
            raise UsageError(
                f"--input does not fit {model.path.name}: it has {what}",
                hint=f"its inputs are {', '.join(sources)}",
            )
        if name in shapes:
            raise UsageError(f"--input names {name!r} twice")
        wanted = torch_dtype(sources[name].type.tensor_type.elem_type)
        if match["dtype"] and wanted is not getattr(torch, match["dtype"], None):
            raise UsageError(
                f"--input gives {name} as {match['dtype']}, but {model.path.name} takes "
                f"{str(wanted).removeprefix('torch.')}",
                hint="leave the dtype out",
            )
        shapes[name] = tuple(int(size) for size in match["sizes"].split("x"))
        if not shapes[name][0]:
            raise UsageError(f"--input {spec!r} is an empty batch")
    return shapes


def _symbols(
    declared: Mapping[str, Dims], given: Mapping[str, tuple[int, ...]]
) -> Mapping[str, int]:
    """The sizes that symbols stand for.

    Raises:
        UsageError: for one that is given twice, as different sizes.
    """
    found: dict[str, int] = {}
    for name, shape in given.items():
        for dim, size in zip(declared[name] or (), shape, strict=False):
            if not isinstance(dim, str) or dim == _NAMELESS:
                continue
            if found.setdefault(dim, size) != size:
                raise UsageError(f"--input gives {dim} as {found[dim]} and, in {name}, as {size}")
    return found


def _samples(given: Mapping[str, tuple[int, ...]], batched: frozenset[str]) -> int:
    """The samples of a batch.

    Raises:
        UsageError: where inputs are given with different numbers of them.
    """
    sizes = {given[name][0] for name in batched if name in given}
    if len(sizes) > 1:
        raise UsageError(
            f"--input gives batches of {' and '.join(map(str, sorted(sizes)))} samples"
        )
    return sizes.pop() if sizes else DEFAULT_BATCH


def _agree(model: OnnxModel, name: str, dims: Dims, shape: tuple[int, ...]) -> None:
    """Raises UsageError where a shape is not what the model takes."""
    if dims is None:
        return
    if len(dims) != len(shape) or any(
        isinstance(dim, int) and dim != size for dim, size in zip(dims, shape, strict=True)
    ):
        raise UsageError(
            f"--input gives {name} as {'x'.join(map(str, shape))}, but {model.path.name} takes "
            f"{'x'.join(map(str, dims)) or 'a number'}",
            hint="a size in letters is free, the others are not",
        )
