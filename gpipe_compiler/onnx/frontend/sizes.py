"""Sizes of the inputs of an ONNX model, and arrays of them.

The batch is the dimension that is called so, else dimension 0, of every input where it is symbolic.
Where the first size is a number in all of them, it is that of the first input, and of those that
agree with it; micro-batches are of just that size. Other symbolic dimensions, such as the length of
a sequence, have to be given, each symbol once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from onnx import TensorProto, ValueInfoProto

from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.onnx.frontend.batch import NAMELESS, Dims, batch_dims, names_batch
from gpipe_compiler.onnx.frontend.integer_inputs import PLAIN, Range, integer_ranges, known_words
from gpipe_compiler.onnx.frontend.reading import OnnxModel
from gpipe_compiler.onnx.frontend.types import element_name, torch_dtype
from gpipe_compiler.onnx.runtime.arrays import STRINGS, array_dtype, arrays_of, random_array
from gpipe_compiler.runtime.errors import UsageError as RuntimeUsageError

DEFAULT_BATCH = 8
"""Samples of a mini-batch where nobody says how many."""

_SPEC = re.compile(r"(?:(?P<name>.+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?", re.DOTALL)
"""What `--input` takes. Names of ONNX may hold anything, also `:` and `=`."""

_FILES = (".npz", ".npy")


@dataclass(frozen=True)
class InputSizes:
    """The inputs of a model for one batch.

    Attributes:
        batch: samples.
        shapes: by name; for `batch` samples.
        batch_dims: by name, the dimension that is the batch; without inputs that all samples share.
        free: by name, the dimensions that may be of another size in every call, without the batch.
        fixed: whether the model takes batches of no other size, into which a mini-batch is split.
        dtypes: by name; None for strings.
        integers: by name, the integers that an input may hold, where that is known.
        words: strings that the model knows.
        data: by name, the numbers that the user gives for `batch` samples.
        requests: why a batch cannot be split, so that a micro-batch is a whole call of the model;
            "" where it can.
    """

    batch: int
    shapes: Mapping[str, tuple[int, ...]]
    batch_dims: Mapping[str, int]
    free: Mapping[str, tuple[int, ...]]
    fixed: bool
    dtypes: Mapping[str, torch.dtype | None]
    integers: Mapping[str, Range] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    data: Mapping[str, np.ndarray] = field(default_factory=dict)
    requests: str = ""

    @property
    def split_dims(self) -> Mapping[str, int]:
        """By input, the dimension along which a mini-batch is split."""
        return {} if self.requests else self.batch_dims

    def in_requests(self, reason: str) -> InputSizes:
        """The same, for a model whose batches are not split."""
        if self.fixed:
            return dataclasses.replace(self, requests=reason, batch_dims={}, fixed=False)
        batch = {name: (dim,) for name, dim in self.batch_dims.items()}
        free = {n: tuple(sorted((*dims, *batch.get(n, ())))) for n, dims in self.free.items()}
        return dataclasses.replace(self, requests=reason, free=free)

    def at(self, samples: int) -> dict[str, tuple[int, ...]]:
        """The shapes for a number of samples."""
        shapes = dict(self.shapes)
        for name, dim in self.batch_dims.items():
            shapes[name] = (*shapes[name][:dim], samples, *shapes[name][dim + 1 :])
        return shapes

    def arrays(self, samples: int, seed: int) -> dict[str, np.ndarray]:
        """Numbers for the inputs: the user's, else random ones."""
        generator = np.random.default_rng(seed % 2**63)
        found = {}
        for name, shape in self.at(samples).items():
            kind = array_name(self.dtypes[name])
            if name not in self.data:
                integers = self.integers.get(name, PLAIN)
                found[name] = random_array(generator, shape, kind, integers, self.words)
            elif name in self.batch_dims:
                places = np.arange(seed, seed + samples) % self.batch
                found[name] = np.take(self.data[name], places, axis=self.batch_dims[name])
            else:
                found[name] = self.data[name]
        return found


def input_sizes(
    model: OnnxModel, specs: Sequence[str] = (), asked: Mapping[str, int | None] | None = None
) -> InputSizes:
    """The sizes that a model declares, completed by what the user gives.

    Args:
        specs: `[NAME=]8x128:int64` each, as `--input` takes them, or a file of arrays (.npz).
        asked: by input, the dimension that is the batch; None for none.

    Raises:
        UsageError: for specs that name no input, or contradict the model, and where dimensions
            other than the batch are left open.
        ModelError: for an input that is no tensor, or of a type that no stage can be handed.
    """
    sources = _sources(model)
    dtypes = {name: _dtype(model, source) for name, source in sources.items()}
    data = _data(model, dtypes, [spec for spec in specs if spec.endswith(_FILES)])
    given = _given(model, sources, [spec for spec in specs if not spec.endswith(_FILES)])
    given |= {name: array.shape for name, array in data.items()}
    declared = {name: _declared(source) for name, source in sources.items()}
    for name, shape in given.items():
        _agree(model, name, declared[name], shape)
    symbols = _symbols(declared, given)
    fixed = None if names_batch(declared, asked or {}) else _fixed_batch(model, declared)
    batch = batch_dims(declared, given, fixed, asked or {})
    samples = fixed or _samples(given, batch)
    shapes: dict[str, tuple[int, ...]] = {}
    missing = []
    for name, dims in declared.items():
        known = given.get(name, _filled(dims, symbols, samples, batch.get(name)))
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
        batch,
        {name: _free(declared[name], shape, batch.get(name)) for name, shape in shapes.items()},
        fixed is not None,
        dtypes,
        integer_ranges(model.proto),
        known_words(model.proto) if None in dtypes.values() else (),
        data,
    )


def _data(
    model: OnnxModel, dtypes: Mapping[str, torch.dtype | None], files: Sequence[str]
) -> dict[str, np.ndarray]:
    """The arrays in the files that the user gives.

    Raises:
        UsageError: for files that cannot be read, and arrays that are no inputs or of another type.
    """
    found: dict[str, np.ndarray] = {}
    for file in files:
        try:
            found |= arrays_of(list(dtypes), Path(file))
        except RuntimeUsageError as error:
            raise UsageError(f"--input: {error}") from error
    for name, array in found.items():
        if name not in dtypes:
            raise UsageError(
                f"--input gives {name}, which is no input of {model.path.name}",
                hint=f"its inputs are {', '.join(dtypes)}",
            )
        wanted = array_dtype(array_name(dtypes[name]))
        if array.dtype.kind == "U" and wanted.kind == "O":
            found[name] = array.astype(object)
        elif array.dtype != wanted:
            raise UsageError(f"--input gives {name} as {array.dtype}, but it is {wanted}")
    return found


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


def array_name(dtype: torch.dtype | None) -> str:
    """The name that the runtime has for a type; None is that of strings."""
    return STRINGS if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(model: OnnxModel, source: ValueInfoProto) -> torch.dtype | None:
    element = source.type.tensor_type.elem_type
    dtype = torch_dtype(element)
    if dtype is None and element != TensorProto.STRING:
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
        else dim.dim_param or NAMELESS
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


def _filled(
    dims: Dims, symbols: Mapping[str, int], samples: int, batch: int | None
) -> tuple[int | str, ...] | None:
    """A shape with all that is known of its open sizes."""
    if dims is None:
        return None
    known = [symbols.get(dim, dim) if isinstance(dim, str) else dim for dim in dims]
    if batch is not None:
        known[batch] = samples
    return tuple(known)


def _free(dims: Dims, shape: tuple[int, ...], batch: int | None) -> tuple[int, ...]:
    return tuple(
        at
        for at in range(len(shape))
        if at != batch and (dims is None or isinstance(dims[at], str))
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
            if not isinstance(dim, str) or dim == NAMELESS:
                continue
            if found.setdefault(dim, size) != size:
                raise UsageError(f"--input gives {dim} as {found[dim]} and, in {name}, as {size}")
    return found


def _samples(given: Mapping[str, tuple[int, ...]], batch: Mapping[str, int]) -> int:
    """The samples of a batch.

    Raises:
        UsageError: where inputs are given with different numbers of them.
    """
    sizes = {given[name][dim] for name, dim in batch.items() if name in given}
    if len(sizes) > 1:
        raise UsageError(
            f"--input gives batches of {' and '.join(map(str, sorted(sizes)))} samples"
        )
    if 0 in sizes:
        raise UsageError("--input gives an empty batch", hint="give it one sample or more")
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
