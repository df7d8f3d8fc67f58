"""A checkpoint without a pipeline: for the plain model, and as one file of weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from torch import nn

from ..core.storing import place
from ..errors import CheckpointError
from .files import Stored
from .folder import sync
from .optimizer import (
    Groups,
    Naming,
    States,
    check_kind,
    state_for,
    stored_groups,
    stored_states,
)
from .progress import Progress, progress_from


@dataclass(frozen=True)
class PlainCheckpoint:
    """A whole checkpoint, on the CPU.

    Attributes:
        model: what `model.load_state_dict` of the original model takes, tied names included.
        groups, states: the optimizer's, by the names of parameters.
        kind: the class of the optimizer, where known.
        scheduler, scaler: what their `load_state_dict` takes; None where there were none.
    """

    model: dict[str, torch.Tensor]
    groups: Groups
    states: States
    kind: str | None
    progress: Progress
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None

    def optimizer_for(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
    ) -> dict[str, Any]:
        """What `optimizer.load_state_dict` takes.

        Args:
            parameters: the model, or its parameters by name.

        Raises:
            CheckpointError: when it is of another kind, or has other parameters.
        """
        named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
        check_kind(optimizer, self.groups, self.kind)
        return state_for(optimizer, Naming(named), self.groups, self.states)


def read_checkpoint(path: Path) -> PlainCheckpoint:
    """Read all of a checkpoint.

        saved = read_checkpoint(path)
        model.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.optimizer_for(optimizer, model))

    Raises:
        CheckpointError: when it is damaged.
    """
    stored = Stored.open(Path(path))
    index = stored.index
    aliases, trainer = index.aliases, stored.trainer()
    names = _names(stored)
    tensors = stored.read(f"model.{name}" for name in names if name not in aliases)
    groups = stored_groups(stored, aliases)
    trained = {name for group in groups for name in group["params"]}
    return PlainCheckpoint(
        model={name: tensors[f"model.{aliases.get(name, name)}"] for name in names},
        groups=groups,
        states=stored_states(stored, aliases, trained),
        kind=index.kinds.get("optimizer"),
        progress=progress_from(index.counts, trainer),
        scheduler=trainer.get("scheduler"),
        scaler=trainer.get("scaler"),
    )


def export(path: Path, file: Path) -> None:
    """Write the model's weights into one safetensors file, one tensor at a time.

    Tied tensors are written under each of their names: the format knows no sharing.

    Raises:
        CheckpointError: when the checkpoint is damaged, or the file cannot be written.
    """
    stored = Stored.open(Path(path))
    names = _names(stored)
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        facts = stored.tensor_facts(f"model.{name}")
        if facts is None:
            raise CheckpointError(f"model.{name} of {path} is no tensor")
        size = torch.Size(facts[0]).numel() * facts[1].itemsize
        header[name] = {
            "dtype": _type_name(name, facts[1]),
            "shape": list(facts[0]),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns what follows to 8 bytes

    def write(partial: Path) -> None:
        with partial.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                _write(stream, stored.read([f"model.{name}"])[f"model.{name}"])
            sync(stream)

    try:
        place(Path(file), write)
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror}") from error


def _names(stored: Stored) -> list[str]:
    names = stored.keys("model.")
    if not names:
        raise CheckpointError(
            f"{stored.folder} holds no weights under model.<name>",
            hint="store the model as {'model': model.state_dict()}",
        )
    return names


def _type_name(name: str, dtype: torch.dtype) -> str:
    """What safetensors calls a type."""
    try:
        packed = safetensors.torch.save({"it": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"safetensors has no type for {name}, {dtype}") from error
    return str(_parts(packed)[0]["it"]["dtype"])


def _write(stream: IO[bytes], tensor: torch.Tensor) -> None:
    stream.write(_parts(safetensors.torch.save({"it": tensor.contiguous()}))[1])


def _parts(packed: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and data of a safetensors file in memory."""
    length = int.from_bytes(packed[:8], "little")
    return json.loads(packed[8 : 8 + length]), memoryview(packed)[8 + length :]
