"""The weights of a package: one safetensors file per stage, under the model's own names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from gpipe_compiler.codegen.stage import StageSource
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import Graph
from gpipe_compiler.runtime.core.weights import INDEX, save_file

EXAMPLE = "example.safetensors"


def has_weights(graph: Graph) -> bool:
    """Whether the model has values; a model on the meta device has none."""
    return not any(tensor.is_meta for tensor in graph.tensors.values())


def write_weights(
    graph: Graph,
    stages: Sequence[StageSource],
    directory: Path,
    progress: Callable[[str], None],
    example: Mapping[str, torch.Tensor],
) -> None:
    """Writes `stage_<k>.safetensors` and the index; a tensor of several stages goes to the first.

    Nothing but the example inputs is written for a model without values.

    Raises:
        EmitError: for a tensor of a type that safetensors files do not have.
    """
    _check_types({**graph.tensors, **example})
    directory.mkdir()
    real = {name: tensor for name, tensor in example.items() if not tensor.is_meta}
    if real:
        save_file(real, directory / EXAMPLE)
    if not has_weights(graph):
        return
    placed: dict[str, str] = {}
    size = 0
    for stage in stages:
        names = [name for name in dict.fromkeys(stage.state.values()) if name not in placed]
        if not names:
            continue
        file = f"stage_{stage.index}.safetensors"
        progress(f"writing weights/{file}")
        save_file({name: graph.tensors[name] for name in names}, directory / file)
        placed.update(dict.fromkeys(names, file))
        size += sum(graph.state[name].bytes for name in names)
    index = {"metadata": {"total_size": size}, "weight_map": placed}
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _check_types(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.complex128:
            raise EmitError(
                f"{name} is of the type complex128, which safetensors files cannot hold",
                hint="use complex64, or a real tensor and torch.view_as_complex",
            )
