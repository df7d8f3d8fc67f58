"""The example call as a flat list of named tensors, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.naming import Names, identifier
from gpipe_compiler.frontend.structure import replace_tensors
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Input
from gpipe_compiler.runtime.nest import Path, tensors_of


@dataclass(frozen=True)
class Signature:
    """How a flat list of tensors becomes the arguments of the model and the target.

    Attributes:
        examples: the example tensors, in the order of `inputs`.
        batch_size: samples in them.
    """

    inputs: tuple[Input, ...]
    examples: tuple[torch.Tensor, ...]
    tree: tuple[tuple[object, ...], Mapping[str, object], object]
    batch_size: int

    def rebuild(self, tensors: Sequence[object]) -> tuple[Any, Any, Any]:
        """Positional arguments, keyword arguments and target."""
        by_path = {source.path: tensor for source, tensor in zip(self.inputs, tensors, strict=True)}
        args, kwargs, target = self.tree

        def at(root: str) -> Callable[[Path], object]:
            return lambda path: by_path[(root, *path)]

        return (
            replace_tensors(args, at("args")),
            replace_tensors(kwargs, at("kwargs")),
            replace_tensors(target, at("target")),
        )

    def samples(self, count: int) -> list[torch.Tensor]:
        """The example inputs cut or repeated to so many samples; copies."""
        return [
            _resize(tensor, source.batch_dim, count)
            for source, tensor in zip(self.inputs, self.examples, strict=True)
        ]


def read_signature(subject: Subject, *, on_meta: bool) -> Signature:
    """The tensors of the example call, their names, and which of them have a batch dimension."""
    target = subject.target if subject.training and subject.loss_fn is not None else None
    tree = (tuple(subject.args), dict(subject.kwargs), target)
    found = [
        ((root, *path), tensor)
        for root, part in zip(("args", "kwargs", "target"), tree, strict=True)
        for path, tensor in tensors_of(part)
    ]
    if not found:
        raise ModelError(
            "the example inputs hold no tensor",
            hint="example_inputs() returns a tensor, a tuple, a dict, or the pair (args, kwargs)",
        )
    batch_size = _batch_size([tensor for _, tensor in found])
    names = Names()
    parameters = _parameter_names(subject)
    inputs = tuple(
        Input(
            names.unique(_input_name(path, parameters)),
            path,
            batch_dim=0 if tensor.ndim > 0 and tensor.shape[0] == batch_size else None,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
        )
        for path, tensor in found
    )
    examples = tuple(tensor.to("meta") if on_meta else tensor.detach() for _, tensor in found)
    return Signature(inputs, examples, tree, batch_size)


def _batch_size(tensors: Sequence[torch.Tensor]) -> int:
    """The size of dimension 0 that most tensors share; of the first tensor in case of a tie."""
    sizes = [tensor.shape[0] for tensor in tensors if tensor.ndim > 0]
    return max(sizes, key=sizes.count) if sizes else 1


def _parameter_names(subject: Subject) -> list[str]:
    """What forward calls each positional argument of the example call."""
    count = len(subject.args)
    try:
        parameters = inspect.signature(subject.model.forward).parameters.values()
    except (TypeError, ValueError):
        return [f"input_{index}" for index in range(count)]
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "input")
    names.extend(f"{rest}_{index}" for index in range(max(0, count - len(names))))
    return names[:count]


def _input_name(path: Path, parameters: Sequence[str]) -> str:
    root, *way = path
    if root == "args":
        way[0] = parameters[int(way[0])]
    if root == "target":
        way.insert(0, "target")
    return identifier("_".join(map(str, way)), digit_prefix="input")


def _resize(tensor: torch.Tensor, dim: int | None, count: int) -> torch.Tensor:
    tensor = tensor.detach()
    if dim is None:
        return tensor.clone()
    repeats = -(-count // tensor.shape[dim])
    return torch.cat([tensor] * repeats, dim).narrow(dim, 0, count).clone()
