"""Reads a checkpoint: into a pipeline, rank by rank; for the plain model; as one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import nn

from ..core.address import Place, place_of
from ..core.pipeline import Pipeline
from ..core.ranks import described, together
from ..core.storing import place
from ..core.weights import write_file
from ..errors import CheckpointError
from ..wording import some
from .extra import KEY, States, check_taken, read_states, whole_states
from .files import Stored
from .folder import sync_path
from .optimizer import (
    Groups,
    Naming,
    Slots,
    check_kind,
    state_for,
    stored_groups,
    stored_states,
)
from .progress import Progress, Stateful, progress_from


def load_checkpoint(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    path: Place | str,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    states: States | None = None,
) -> Progress:
    """Load a checkpoint, whatever number of processes has written it. Every rank calls it.

    Each rank reads what it holds. All of it is read and checked, on every rank, before anything of
    the pipeline changes. A folder that `torch.distributed.checkpoint.save` alone has written is
    taken as well, if its keys are the same; its progress is that of a run that has not begun.

    Args:
        optimizer: None to take over the weights alone.
        path: the folder or address of one checkpoint, as `latest` gives it.
        scaler: stays as it is when none was in use.
        states: objects of the user's, by the names under which they were saved.

    Returns:
        Where the run stood. Its random state is not set back; `progress.random.restore()` does so.

    Raises:
        CheckpointError: on every rank, when the checkpoint is damaged, or is that of another model,
            optimizer or schedule.
        TransportError: when another process is gone.
    """
    kept: list[_Loaded] = []

    def read() -> _Facts:
        parts = {"scheduler": scheduler, "scaler": scaler}
        kept.append(_read(pipe, optimizer, place_of(path), parts, dict(states or {})))
        return kept[0].facts

    together(pipe.world, "the reading of the checkpoint", read, _compare)
    loaded = kept[0]
    pipe.load_state_dict(loaded.model)
    if optimizer is not None:
        optimizer.load_state_dict(loaded.optimizer)
    for part, state in loaded.others:
        try:
            part.load_state_dict(state)
        except Exception as error:  # whatever the user's code raises
            what = type(part).__name__
            raise CheckpointError(f"{what} does not take its state: {described(error)}") from error
    progress = loaded.progress
    if loaded.facts.written:
        pipe.seed, pipe.step_number = progress.seed, progress.step_number
    return progress


@dataclass(frozen=True, slots=True)
class _Facts:
    """What ranks compare after reading.

    Attributes:
        written: whether `save_checkpoint` has written it.
        trained: the names that the checkpoint's optimizer trains.
        training: those that this rank's optimizer trains; None without one.
        states: the user's objects that are loaded.
        taken: the keys of the tensors that they take over on this rank.
        keys: those of all such tensors in the checkpoint.
    """

    written: bool
    number: int
    counts: Mapping[str, int]
    trained: frozenset[str]
    training: frozenset[str] | None
    states: frozenset[str]
    taken: frozenset[str]
    keys: frozenset[str]


@dataclass(frozen=True)
class _Loaded:
    """A checkpoint's part for one rank, ready to be taken over."""

    facts: _Facts
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    others: list[tuple[Stateful, dict[str, Any]]]
    progress: Progress


def _read(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    path: Place,
    others: Mapping[str, Stateful | None],
    states: States,
) -> _Loaded:
    stored = Stored.open(path)
    index = stored.index
    names = _checked_names(pipe, stored)
    tensors = stored.read(f"model.{name}" for name in names.values())
    model = {name: tensors[f"model.{there}"] for name, there in names.items()}
    trainer = stored.trainer()
    trained: frozenset[str] = frozenset()
    training: frozenset[str] | None = None
    state: dict[str, Any] = {}
    if optimizer is not None:
        naming = Naming(pipe.named_parameters(), pipe.parameters())
        groups = stored_groups(stored, pipe.spec.aliases)
        check_kind(optimizer, groups, index.kinds.get("optimizer"))
        training = frozenset(
            name for group in optimizer.param_groups for name in naming.of_group(group)
        )
        trained = frozenset(name for group in groups for name in group["params"])
        slots = stored_states(stored, pipe.spec.aliases, training)
        state = state_for(optimizer, naming, groups, slots)
    extra, taken = read_states(stored, trainer, states)
    counts = stored.written, index.number, index.counts
    keys = frozenset(f"{KEY}.{key}" for key in stored.keys(f"{KEY}."))
    return _Loaded(
        _Facts(*counts, trained, training, frozenset(states), taken, keys),
        model,
        state,
        [*_matched(others, trainer, index.kinds), *extra],
        progress_from(index.counts, trainer),
    )


def _compare(facts: Sequence[_Facts]) -> None:
    """On rank 0: whether all ranks have read the same, and trained is what is to be trained."""
    first = facts[0]
    for rank, other in enumerate(facts):
        if (other.number, other.counts) != (first.number, first.counts):
            raise CheckpointError(
                f"rank {rank} reads another checkpoint than rank 0",
                hint="all hosts must see the same folder",
            )
    taken = frozenset().union(*(other.taken for other in facts))
    check_taken(first.keys, first.states, taken)
    if first.training is None:
        return
    training = frozenset().union(*(other.training or () for other in facts))
    if first.trained - training:
        raise CheckpointError(
            f"this optimizer does not train {some(sorted(first.trained - training))}, the "
            "checkpoint's does"
        )


def _checked_names(pipe: Pipeline, stored: Stored) -> dict[str, str]:
    """The names of this rank's tensors, with those under which they are stored."""
    aliases = pipe.spec.aliases
    there: dict[str, str] = {}
    for name in stored.keys("model."):
        there.setdefault(aliases.get(name, name), name)
    known = {name for stage in pipe.spec.stages for name in stage.state.values()}
    problems = [f"{name} is unknown" for name in there if name not in known]
    names = {}
    for name, tensor in pipe.state_dict().items():
        if name in aliases:
            continue
        if name not in there:
            problems.append(f"{name} is missing")
            continue
        names[name] = there[name]
        facts = stored.tensor_facts(f"model.{there[name]}")
        if facts is None or facts[0] != tuple(tensor.shape):
            shape = "no tensor" if facts is None else f"of shape {facts[0]}"
            problems.append(f"{name} is {shape}, not of shape {tuple(tensor.shape)}")
        elif facts[1].is_floating_point != tensor.dtype.is_floating_point:
            problems.append(f"{name} is of {facts[1]}, not of {tensor.dtype}")
    if problems:
        raise CheckpointError(
            f"{stored.folder} is not of {pipe.spec.name}: {some(problems)}",
            hint="a checkpoint is read by a pipeline of the model that it was written for",
        )
    weight = pipe.spec.loss.weight if pipe.spec.loss is not None else None
    if weight is not None:  # the weights of classes, say, which rank 0 counts with
        names.update({name: there[name] for name in weight.state.values() if name in there})
    return names


def _matched(
    parts: Mapping[str, Stateful | None], trainer: Mapping[str, Any], kinds: Mapping[str, str]
) -> list[tuple[Stateful, dict[str, Any]]]:
    """The parts of the trainer, each with the state that it is to take over."""
    found = []
    for key, part in parts.items():
        if part is None:
            continue
        live = type(part).__name__
        if kinds.get(key, live) != live:
            raise CheckpointError(f"the checkpoint's {key} is {kinds[key]}, this one is {live}")
        if trainer.get(key):
            found.append((part, trainer[key]))
        elif key != "scaler":
            raise CheckpointError(
                f"the checkpoint holds no state of a {key}",
                hint=f"load it without the {key} to let it begin anew",
            )
    return found


# --- without a pipeline ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainCheckpoint:
    """A whole checkpoint, on the CPU.

    Attributes:
        model: what `model.load_state_dict` of the original model takes, tied names included.
        groups, states: the optimizer's, by the names of parameters.
        kind: the class of the optimizer, where known.
        scheduler, scaler: what their `load_state_dict` takes; None where there were none.
        extra: the states of the user's own objects, by their names, of all ranks together.
    """

    model: dict[str, torch.Tensor]
    groups: Groups
    states: Slots
    kind: str | None
    progress: Progress
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    extra: dict[str, dict[str, Any]]

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


def read_checkpoint(path: Place | str) -> PlainCheckpoint:
    """Read all of a checkpoint.

        saved = read_checkpoint(path)
        model.load_state_dict(saved.model)
        optimizer.load_state_dict(saved.optimizer_for(optimizer, model))

    Raises:
        CheckpointError: when it is damaged.
    """
    stored = Stored.open(place_of(path))
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
        extra=whole_states(stored, trainer),
    )


def export(path: Place | str, file: Path) -> None:
    """Write the model's weights into one safetensors file, one tensor at a time.

    Tied tensors are written under each of their names: the format knows no sharing.

    Raises:
        CheckpointError: when the checkpoint is damaged, or the file cannot be written.
    """
    stored = Stored.open(place_of(path))
    kept = {name: stored.like(f"model.{name}") for name in _names(stored)}

    def write(partial: Path) -> None:
        write_file(kept, partial, read=lambda name: stored.read([key := f"model.{name}"])[key])
        sync_path(partial)

    try:
        place(Path(file), write)
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"cannot write {file}: {error}") from error


def _names(stored: Stored) -> list[str]:
    names = stored.keys("model.")
    if not names:
        raise CheckpointError(
            f"{stored.folder} holds no weights under model.<name>",
            hint="store the model as {'model': model.state_dict()}",
        )
    return names
