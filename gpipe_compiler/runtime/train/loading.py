"""`--weights` and `--load`: weights from where else they are stored, and `--save`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from .. import checkpoint
from ..core.address import Address, Place
from ..core.pipeline import Pipeline
from ..core.stored_weights import (
    ADAPTER_FILE,
    HUGGING_FACE_INDEX,
    PICKLED,
    Weights,
)
from ..core.weights import INDEX, ONE_FILE, save_file, save_weights
from ..errors import UsageError, WeightsError
from ..spec import PipelineSpec
from ..wording import said, some
from .process import say

ANEW = "none"
"""As `--weights`: none are read, and the stages begin as a new model."""

_PICKLES = (".pt", ".pth", ".bin")


def open_weights(own: Path | None, asked: str | None) -> Weights | None:
    """Where a package reads its weights; None where its stages begin as a new model.

    Args:
        own: the folder of the package's weights, None where it has none.
        asked: what `--weights` says, None where it is not given.

    Raises:
        WeightsError: when there are none.
    """
    if asked == ANEW:
        return None
    known = None if own is None else Weights.open(own)
    if asked is None:
        return known
    return Weights.open(Path(asked)) if known is None else known.moved(Path(asked))


def load_weights(pipe: Pipeline, path: Place, home: Weights | None = None) -> None:
    """Take over weights: one safetensors file, a folder of them, a pickled `state_dict` (`.pt`), or
    a checkpoint; of a folder of checkpoints the newest. At an address there are checkpoints alone.

    Every rank calls it, and reads what it holds. Files of peft hold adapters alone; the rest stays.

    Args:
        home: where the package reads its weights, which knows what files of Hugging Face's call
            them.

    Raises:
        WeightsError, CheckpointError: when there are none that can be read.
        UsageError: when they are those of another model.
    """
    if isinstance(path, Address):
        _load_checkpoint(pipe, path)
        return
    if path.is_dir():
        kinds = (INDEX, HUGGING_FACE_INDEX, ONE_FILE, ADAPTER_FILE, *PICKLED)
        if not any((path / kind).exists() for kind in kinds):
            _load_checkpoint(pipe, path)
            return
        stored = Weights.open(path)
    elif path.suffix in _PICKLES:
        _load_pickled(pipe, path, home)
        return
    else:
        stored = Weights.of_file(path)
    adapter = {Path(file).name for file in stored.files.values()} == {ADAPTER_FILE}
    keys = _keys(pipe.spec, stored.files, home, partly=adapter)
    found = Weights(stored.directory, {n: stored.files[key] for n, key in keys.items()}, keys)
    states = _states(pipe.spec)
    try:
        found.check({name: states[name] for name in keys})
    except WeightsError as error:
        raise UsageError(f"{path} does not fit {pipe.spec.name}: {error.problem}") from error
    held = {name: tensor for name, tensor in pipe.state_dict().items() if name in keys}
    held |= {name: tensor for name, tensor in states.items() if name in _counted(pipe.spec)}
    for name, tensor in found.loading(held, torch.device("cpu")):
        pipe.load_state_dict({name: tensor}, strict=False)


def _load_checkpoint(pipe: Pipeline, path: Place) -> None:
    seed, step = pipe.seed, pipe.step_number
    checkpoint.load_checkpoint(pipe, None, checkpoint.latest(path) or path)
    pipe.seed, pipe.step_number = seed, step


def _load_pickled(pipe: Pipeline, path: Path, home: Weights | None) -> None:
    """Take over a `state_dict` that torch.save has written, which may lie in a dict as `model`."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds, for a file that is anything
        raise WeightsError(
            f"cannot read {path}: {said(error)}",
            hint="a file of torch.save(model.state_dict(), FILE) is read with weights_only=True, "
            "so it may hold tensors, numbers and names alone",
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in content.values()
    ):
        raise UsageError(
            f"{path} holds no state_dict: a dict of tensors by name is needed",
            hint="torch.save(model.state_dict(), FILE) writes one",
        )
    keys = _keys(pipe.spec, content, home, partly=False)
    pipe.load_state_dict({name: content[key] for name, key in keys.items()}, strict=False)


def _keys(
    spec: PipelineSpec, there: Iterable[str], home: Weights | None, *, partly: bool
) -> dict[str, str]:
    """What every tensor of a pipeline is called among the keys of a file.

    Args:
        partly: whether some of the tensors are enough.

    Raises:
        UsageError: naming what is missing or unknown.
    """
    given = dict.fromkeys(there)
    others = {} if home is None else home.keys
    further: dict[str, list[str]] = {}
    for alias, name in spec.aliases.items():
        further.setdefault(name, []).append(alias)
    found = {}
    for name in _states(spec):
        likely = (name, *further.get(name, ()), others.get(name, name))
        key = next((key for key in likely if key in given), None)
        if key is not None:
            found[name] = key
    unused = () if home is None else (*home.files, *home.keys.values(), *home.anew)
    known = {*found.values(), *_states(spec), *spec.aliases, *unused}
    problems = [f"{name} is missing" for name in _states(spec) if name not in found]
    problems = ([] if partly and found else problems) + [
        f"{key} is unknown" for key in given if key not in known
    ]
    if problems:
        raise UsageError(f"these weights do not fit {spec.name}: {some(problems, '; ')}")
    return found


def _states(spec: PipelineSpec) -> dict[str, torch.Tensor]:
    """The state of all stages, without memory, under the model's own names."""
    weight = () if spec.loss is None or spec.loss.weight is None else (spec.loss.weight,)
    found: dict[str, torch.Tensor] = {}
    for stage in (*spec.stages, *weight):
        with torch.device("meta"):
            state = stage.module().state_dict()
        found.update({stage.named(own): tensor for own, tensor in state.items()})
    return found


def _counted(spec: PipelineSpec) -> frozenset[str]:
    """The names of what the terms of the loss are counted with, as weights of classes."""
    if spec.loss is None or spec.loss.weight is None:
        return frozenset()
    return frozenset(spec.loss.weight.state.values())


def save_model(pipe: Pipeline, path: Path) -> None:
    """Write the weights under the model's names: one file, or a folder with an index."""
    state = pipe.gather_state_dict()
    if pipe.rank != 0:
        return
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        save_weights(state, path)
    say(f"weights saved to {path}")
