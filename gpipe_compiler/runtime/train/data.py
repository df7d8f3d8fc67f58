"""The data of a command for which the user gives none: the example, or a safetensors file."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..core.inputs import bind_call
from ..core.weights import load_file
from ..core.wiring import inputs_for, most_work
from ..errors import UsageError
from ..sizes import Sizes, shape_at
from ..spec import Input, PipelineSpec

EXAMPLE = Path("weights", "example.safetensors")


@dataclass(frozen=True, slots=True)
class InputChoice:
    """What the model is run on, where the user's own data is not.

    Attributes:
        file: named tensors; None for the example.
        samples: of the example; None for as many as it was compiled with.
        sizes: of the example, by name; others are those that it was compiled with.
    """

    file: Path | None = None
    samples: int | None = None
    sizes: Sizes = field(default_factory=dict)


def call_on(spec: PipelineSpec, directory: Path, choice: InputChoice) -> tuple[object, object]:
    """Inputs and target of what was chosen; raises as `named_input` or `example_call`."""
    if choice.file is not None:
        return named_input(spec, choice.file)
    return example_call(spec, directory, choice)


def example_call(spec: PipelineSpec, directory: Path, choice: InputChoice) -> tuple[object, object]:
    """Inputs and target of the example that the package was compiled with.

    Args:
        choice: the samples and sizes that the example is repeated or cut to.

    Raises:
        UsageError: when the package has no example.
    """
    path = directory / EXAMPLE
    if not path.is_file():
        raise UsageError(
            f"this package has no example batch ({path} is missing)",
            hint="offer train_data() in the model's file and compile again, or pass --input",
        )
    tensors = load_file(path)
    sizes = {size.name: size.example for size in spec.sizes} | {**choice.sizes}
    shapes = {
        source.name: _shape_at(source, tensors[source.name], choice.samples, sizes)
        for source in spec.inputs
        if source.name in tensors
    }
    _refuse_too_large(tensors, shapes)
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            tensors[name] = resized(tensors[name], dim, size)
    return call_of(spec, tensors)


def _shape_at(
    source: Input, tensor: torch.Tensor, samples: int | None, sizes: Sizes
) -> tuple[int, ...]:
    """The shape of an input with this number of samples at these sizes."""
    shape = [*(tensor.shape if source.shape is None else shape_at(source.shape, sizes))]
    if source.batch_dim is not None:
        shape[source.batch_dim] = tensor.shape[source.batch_dim] if samples is None else samples
    return tuple(shape)


def _refuse_too_large(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise UsageError for more than this machine could hold."""
    size = sum(math.prod(shape) * tensors[name].itemsize for name, shape in shapes.items())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise UsageError(f"a batch of {size:,} bytes is larger than the memory of this machine")


def samples_of(spec: PipelineSpec, microbatches: int, inputs: object, target: object) -> int:
    """The samples in a mini-batch; where nothing is batched, micro-batches are as planned."""
    needed = inputs_for(spec, most_work(spec))
    return sum(bind_call(inputs, target, spec, needed, microbatches).samples)


def call_of(spec: PipelineSpec, tensors: Mapping[str, torch.Tensor]) -> tuple[object, object]:
    """Named tensors as the inputs and the target of a call."""
    call: dict[object, object] = {"args": {}, "kwargs": {}}
    for source in spec.inputs:
        if source.name in tensors:
            _place(call, source, tensors[source.name])
    positional = call["args"]
    assert isinstance(positional, dict)
    count = max((key for key in positional if isinstance(key, int)), default=-1) + 1
    args = tuple(positional.get(index) for index in range(count))
    return (args, call["kwargs"]), call.get("target")


def named_input(spec: PipelineSpec, path: Path) -> tuple[object, object]:
    """The call that a safetensors file holds: tensors by input name; one tensor needs no name.

    Raises:
        UsageError: when the file holds something else.
    """
    tensors = load_file(path)
    wanted = [source.name for source in spec.inputs if source.path[0] != "target"]
    if len(tensors) == 1 and len(wanted) == 1:
        tensors = {wanted[0]: next(iter(tensors.values()))}
    unknown = sorted(tensors.keys() - {source.name for source in spec.inputs})
    if unknown:
        raise UsageError(
            f"{path} holds {', '.join(unknown)}, which {spec.name} does not take",
            hint=f"its inputs are {', '.join(wanted)}",
        )
    return call_of(spec, tensors)


def _place(call: dict[object, object], source: Input, tensor: torch.Tensor) -> None:
    """Put a tensor where its path leads; nested containers become dicts by key or index."""
    *way, last = source.path
    inner: dict[object, object] = call
    for key in way:
        following = inner.setdefault(key, {})
        assert isinstance(following, dict)
        inner = following
    inner[last] = tensor


def resized(tensor: torch.Tensor, dim: int | None, samples: int) -> torch.Tensor:
    """A tensor cut or repeated to a number of samples; itself where it has no batch dimension."""
    if dim is None or tensor.shape[dim] == samples:
        return tensor
    return tensor.index_select(dim, torch.arange(samples) % tensor.shape[dim])
