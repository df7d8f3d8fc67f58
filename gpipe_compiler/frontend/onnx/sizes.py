"""Sizes of the inputs of an ONNX model: which dimension is the batch, how large the others are.

The batch is dimension 0: of every input where it is symbolic, of all where it is a number and the
same in all of them (then micro-batches are of just that size). Other symbolic dimensions, such as
the length of a sequence, have to be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from onnx import ValueInfoProto

from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend.examples import parse_inputs
from gpipe_compiler.frontend.onnx.reading import OnnxModel
from gpipe_compiler.frontend.onnx.types import element_name, torch_dtype

DEFAULT_BATCH = 8
"""Samples of a mini-batch where nobody says how many."""


@dataclass(frozen=True)
class InputSizes:
    """The shapes of all inputs for one batch.

    Attributes:
        batch: samples.
        shapes: by name; for `batch` samples.
        batched: the inputs whose dimension 0 is the batch.
        fixed: whether the model takes batches of no other size.
        dtypes: by name.
    """

    batch: int
    shapes: Mapping[str, tuple[int, ...]]
    batched: frozenset[str]
    fixed: bool
    dtypes: Mapping[str, torch.dtype]

    def at(self, samples: int) -> dict[str, tuple[int, ...]]:
        """The shapes for so many samples."""
        return {
            name: (samples * shape[0] // self.batch, *shape[1:]) if name in self.batched else shape
            for name, shape in self.shapes.items()
        }


def input_sizes(
    model: OnnxModel, specs: Sequence[str] = (), batch: int | None = None
) -> InputSizes:
    """The sizes that a model declares, completed by what the user gives.

    Args:
        specs: `[NAME=]8x128:int64` each, as `--input` takes them.
        batch: samples, where `specs` do not say; the default is 8.

    Raises:
        UsageError: for specs that name no input, or contradict the model, and where dimensions
            other than the batch are left open.
        ModelError: for an input that is no tensor, or of a type that no stage can be handed.
    """
    sources = _sources(model)
    given = _given(model, sources, specs)
    shapes, batched, open_dims = {}, set(), []
    declared = {name: _declared(source) for name, source in sources.items()}
    fixed = _fixed_batch(declared)
    samples = _samples(given, declared, fixed, batch)
    for name, dims in declared.items():
        shape = given.get(name)
        if shape is not None:
            _agree(model, name, dims, shape)
        else:
            missing = [str(dim) for dim in dims[1:] if not isinstance(dim, int)]
            if missing:
                open_dims.append(f"{name} ({', '.join(missing)})")
                continue
            first = (samples if not isinstance(dims[0], int) else dims[0],) if dims else ()
            shape = (*first, *(int(dim) for dim in dims[1:]))
        if dims and (not isinstance(dims[0], int) or fixed is not None):
            batched.add(name)
        shapes[name] = shape
    if open_dims:
        raise UsageError(
            f"{model.path.name} leaves sizes open: {'; '.join(open_dims)}",
            hint="give them: --input NAME=8x128:int64, once for every such input",
        )
    return InputSizes(
        samples,
        shapes,
        frozenset(batched),
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
    sources = {source.name: source for source in graph.input if source.name not in weights}
    for name, source in sources.items():
        if not source.type.HasField("tensor_type"):
            raise ModelError(
                f"the input {name} of {model.path} is a {source.type.WhichOneof('value')}, no "
                "tensor: it cannot be split into micro-batches",
                hint="give the model inputs that are tensors",
            )
    if not sources:
        raise ModelError(f"{model.path} has no inputs, so there is nothing to stream through it")
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


def _declared(source: ValueInfoProto) -> tuple[int | str, ...]:
    """Sizes, and names of those that are open."""
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
        for dim in source.type.tensor_type.shape.dim
    )


def _fixed_batch(declared: Mapping[str, tuple[int | str, ...]]) -> int | None:
    """The batch size of a model that takes no other."""
    first = {dims[0] for dims in declared.values() if dims}
    if len(first) == 1 and isinstance(only := first.pop(), int):
        return only
    return None


def _given(
    model: OnnxModel, sources: Mapping[str, ValueInfoProto], specs: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    if not specs:
        return {}
    args, kwargs = parse_inputs(specs)
    unknown = sorted(kwargs.keys() - sources.keys())
    if unknown or len(args) > len(sources):
        named = f"it has no input {unknown[0]}" if unknown else f"it has {len(sources)} inputs"
        raise UsageError(
            f"--input does not fit {model.path.name}: {named}",
            hint=f"its inputs are {', '.join(sources)}",
        )
    found = {**dict(zip(sources, args, strict=False)), **kwargs}
    shapes = {}
    for name, tensor in found.items():
        assert isinstance(tensor, torch.Tensor)
        wanted = torch_dtype(sources[name].type.tensor_type.elem_type)
        # Without a dtype a spec means float32: the model knows better.
        if tensor.dtype not in (wanted, torch.float32):
            raise UsageError(
                f"--input gives {name} as {tensor.dtype}, but {model.path.name} takes {wanted}",
                hint="leave the dtype out",
            )
        shapes[name] = tuple(tensor.shape)
    return shapes


def _samples(
    given: Mapping[str, tuple[int, ...]],
    declared: Mapping[str, tuple[int | str, ...]],
    fixed: int | None,
    batch: int | None,
) -> int:
    if fixed is not None:
        return fixed
    sizes = {
        given[name][0]
        for name, dims in declared.items()
        if dims and not isinstance(dims[0], int) and given.get(name)
    }
    if len(sizes) > 1:
        raise UsageError(
            f"--input gives batches of {' and '.join(map(str, sorted(sizes)))} samples"
        )
    return sizes.pop() if sizes else batch or DEFAULT_BATCH


def _agree(
    model: OnnxModel, name: str, dims: tuple[int | str, ...], shape: tuple[int, ...]
) -> None:
    if len(dims) != len(shape) or any(
        isinstance(dim, int) and dim != size for dim, size in zip(dims, shape, strict=True)
    ):
        raise UsageError(
            f"--input gives {name} as {'x'.join(map(str, shape))}, but {model.path.name} takes "
            f"{'x'.join(map(str, dims))}",
            hint="a size in letters is free, the others are not",
        )
