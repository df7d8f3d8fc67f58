"""Which tensor of a Hugging Face folder each of a model is, told from the headers of its files; and
adapters of peft's, as LoRA, around a model on meta."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from gpipe_compiler.errors import ModelError, Notice, UsageError, summary
from gpipe_compiler.frontend.stored_layouts import Conversions
from gpipe_compiler.frontend.subject import Pretrained, StoredTensor
from gpipe_compiler.runtime.core.assembly import Assembly
from gpipe_compiler.runtime.core.stored_weights import (
    ADAPTER_FILE,
    HUGGING_FACE_INDEX,
    PICKLED,
    Weights,
)
from gpipe_compiler.runtime.core.weights import ONE_FILE, load_file, shapes_in
from gpipe_compiler.runtime.errors import WeightsError
from gpipe_compiler.runtime.wording import counted, listed

_NOT_BESIDE = re.compile(
    r"config\.json|.*\.(safetensors|bin|pt|pth|h5|msgpack|gguf|ot|onnx|index\.json|py)"
)
"""Files of a folder that are not copied: weights, code, and what is written anew."""

_LARGEST_COPIED = 64 << 20
"""Bytes of a file beside the weights that is copied, such as a tokenizer."""

_SHOWN = 5
_ORIGINAL, _TRAINED = ".original_module.", ".modules_to_save.default."
"""What peft calls a module of the model, and the copy of it that it trains."""

_Shape = tuple[int, ...]
_Read = TypeVar("_Read")


@dataclass(frozen=True, eq=False, slots=True)
class FolderNames:
    """The tensors of a model, and where a folder has them.

    Attributes:
        of: the name of every tensor, by its identity.
        stored, anew, exported: as in `Pretrained`, for the model without adapters.
    """

    folder: Path
    of: Mapping[int, str]
    stored: Mapping[str, StoredTensor]
    anew: frozenset[str]
    exported: Mapping[str, Assembly]

    @classmethod
    def read(cls, model: nn.Module, folder: Path, *, own: bool) -> FolderNames:
        """Where a folder has the tensors of a model; the headers of its files are read.

        Args:
            model: on meta.
            own: whether it is of the class that the folder was written from, so that the folder
                holds all of it.

        Raises:
            ModelError: when weights are missing, of other shapes, or stored in another way than
                this compiler reads.
        """
        tensors = [*model.named_parameters(), *model.named_buffers()]
        names = {id(tensor): name for name, tensor in tensors}
        there = _there(folder)
        kept = {names.get(id(t), n): t for n, t in _state(model).items()}
        conversions = Conversions(model)
        stored = _stored(conversions, model, kept, there) if there else {}
        missing = [name for name in kept if name not in stored] if there else []
        if missing:
            _tell_missing(model, missing, folder, own=own)
        exported = _exported(conversions, model, names)
        return cls(folder, names, stored, frozenset(missing), exported)

    def pretrained(self, adapter: Adapter | None, config: str) -> Pretrained:
        """What a package is told of the folder.

        Args:
            config: the text of the model's configuration.
        """
        beside = sorted(
            file
            for file in self.folder.resolve().iterdir()
            if file.is_file()
            and not _NOT_BESIDE.fullmatch(file.name)
            and not file.name.startswith(".")
            and file.stat().st_size <= _LARGEST_COPIED
        )
        if adapter is None:
            return Pretrained(
                *(self.folder, self.stored, self.anew, self.exported, False),
                {"config.json": config},
                tuple(beside),
            )
        stored: dict[str, StoredTensor] = {}
        anew = set()
        shapes = {} if adapter.file is None else _shapes_in(adapter.file)
        for name, tensor in _state(adapter.model).items():
            if adapter.file is not None and adapter.keys.get(name) in shapes:
                key = adapter.keys[name]
                _check_shape(name, shapes[key], tensor, adapter.file)
                stored[name] = StoredTensor(Assembly((key,), ()), (adapter.file,))
                continue
            copied = _original(adapter.model, name)
            own = self.of.get(id(tensor)) or self.of.get(id(copied), "")
            if own in self.stored:
                stored[name] = self.stored[own]
            elif name in adapter.keys or own in self.anew:
                anew.add(name)
        exported = {key: Assembly((name,), ()) for name, key in adapter.keys.items()}
        texts = {ADAPTER_CONFIG: adapter.config}
        return Pretrained(self.folder, stored, frozenset(anew), exported, True, texts, ())


def _original(model: nn.Module, name: str) -> torch.Tensor | None:
    """The tensor of the model that one of peft's is a copy of."""
    known = dict(model.named_parameters(remove_duplicate=False))
    return known.get(name.replace(_TRAINED, _ORIGINAL)) if _TRAINED in name else None


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a checkpoint of a model holds: the tensors themselves, under all of their names."""
    return model.state_dict(keep_vars=True)


# --- the files ------------------------------------------------------------------------------------


def _there(folder: Path) -> dict[str, tuple[Path, _Shape]]:
    """By the keys of a folder's files, where each tensor is, and its shape.

    Raises:
        ModelError: when a file is missing or broken, or the weights are pickled.
    """
    kinds = (HUGGING_FACE_INDEX, ONE_FILE, *PICKLED)
    if not any((folder / kind).exists() for kind in kinds):
        text = f"{folder} holds no weights, so the package begins as a new model does"
        warnings.warn(Notice(text), stacklevel=2)
        return {}
    folder = folder.resolve()  # but not its files, which may be links to others of no such name
    index = _of_files(lambda: Weights.open(folder))
    shapes: dict[str, dict[str, _Shape]] = {}
    found = {}
    for key, file in index.files.items():
        path = folder / file
        if file not in shapes:
            if not path.is_file():
                raise ModelError(
                    f"{path} is missing, which {HUGGING_FACE_INDEX} says holds {key}",
                    hint="bring all files of the folder",
                )
            shapes[file] = _shapes_in(path)
        if key not in shapes[file]:
            raise ModelError(f"{path} does not hold {key}, which {HUGGING_FACE_INDEX} says it does")
        found[key] = path, shapes[file][key]
    return found


def _shapes_in(path: Path) -> dict[str, _Shape]:
    return _of_files(lambda: shapes_in(path))


def _of_files(read: Callable[[], _Read]) -> _Read:
    try:
        return read()
    except WeightsError as error:
        raise ModelError(error.problem, hint=error.hint) from error


# --- what is what ---------------------------------------------------------------------------------


def _stored(
    conversions: Conversions,
    model: Any,
    kept: Mapping[str, torch.Tensor],
    there: Mapping[str, tuple[Path, _Shape]],
) -> dict[str, StoredTensor]:
    """Where the folder has the tensors of a model, as from_pretrained finds them."""
    state = _state(model)
    found: dict[str, list[Assembly]] = {}
    names = {id(tensor): name for name, tensor in kept.items()}
    shapes = {key: shape for key, (_, shape) in there.items()}
    for name, how in conversions.loaded(shapes, state):
        found.setdefault(names.get(id(state[name]), name), []).append(how)
    stored = {}
    for name, ways in found.items():
        for how in ways:
            pieces = [torch.empty(shapes[key], device="meta") for key in how.of]
            shape = tuple(how.of_tensors(pieces).shape)
            _check_shape(name, shape, kept[name], there[how.of[0]][0])
        _refuse_untied(ways, there)
        stored[name] = StoredTensor(ways[0], tuple(there[key][0] for key in ways[0].of))
    return stored


def _check_shape(name: str, shape: _Shape, tensor: torch.Tensor, file: Path) -> None:
    if shape != tuple(tensor.shape):
        raise ModelError(
            f"{name} has shape {shape} in {file}, and {tuple(tensor.shape)} in the model that "
            "its configuration describes",
            hint="are the configuration and the weights of one model, and --task the head that "
            "the weights have?",
        )


def _refuse_untied(ways: Iterable[Assembly], there: Mapping[str, tuple[Path, _Shape]]) -> None:
    """Refuses one tensor of the model that the folder holds twice, with other numbers."""
    first, *others = ways
    for other in others:
        one, two = (
            how.of_tensors([load_file(there[key][0], [key])[key] for key in how.of])
            for how in (first, other)
        )
        if not torch.equal(one, two):
            raise ModelError(
                f"{first.of[0]} and {other.of[0]} are one tensor of the model, and differ in its "
                "files",
                hint='"tie_word_embeddings": false in config.json makes two of them',
            )


def _tell_missing(model: nn.Module, missing: list[str], folder: Path, *, own: bool) -> None:
    """Says that tensors begin anew, where the model has another head than the folder's.

    Raises:
        ModelError: where it has not.
    """
    more = f" and {counted(len(missing) - _SHOWN, 'tensor')} more" if len(missing) > _SHOWN else ""
    names = f"{listed(missing) if not more else ', '.join(missing[:_SHOWN])}{more}"
    if own:
        raise ModelError(
            f"{folder} does not hold {names} of {type(model).__name__}",
            hint="bring all files of the folder, or name the model that it is of: --task",
        )
    text = f"{folder} does not hold {names} of {type(model).__name__}: that begins as new"
    warnings.warn(Notice(text), stacklevel=2)


def _exported(
    conversions: Conversions, model: Any, names: Mapping[int, str]
) -> dict[str, Assembly]:
    """By the keys that save_pretrained writes, how each is made of tensors, by their names."""
    ignored = {*(model._keys_to_ignore_on_save or ()), *model.all_tied_weights_keys}
    state = {n: t for n, t in _state(model).items() if n not in ignored and id(t) in names}
    return {
        key: dataclasses.replace(how, of=tuple(names[id(state[name])] for name in how.of))
        for key, how in conversions.saved(state).items()
    }


# --- adapters -------------------------------------------------------------------------------------

ADAPTER_CONFIG = "adapter_config.json"

_OF_WEIGHTS = "begins with what is computed from the weights, which a compile does not read"


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """A model with adapters.

    Attributes:
        model: peft's, around the model itself.
        keys: by the names of tensors, what files of peft's call them.
        file: their numbers; None where they begin anew.
        config: the text of the configuration that is written beside them.
    """

    model: nn.Module
    keys: Mapping[str, str]
    file: Path | None
    config: str


def adapted(base: nn.Module, peft: Any, file: Path, *, training: bool) -> Adapter:
    """A model with the adapters that an `adapter_config.json` describes.

    Those of a folder that has their numbers too go on from these.

    Args:
        base: on meta; its modules become those of the result.

    Raises:
        UsageError, ModelError: when the file is no such configuration, or fits another model.
    """
    place = file / ADAPTER_CONFIG if file.is_dir() else file
    if not place.is_file():
        raise UsageError(f"--peft {file}: there is no file {place}")
    weights = place.parent.resolve() / ADAPTER_FILE
    known = weights.is_file() and place.name == ADAPTER_CONFIG
    try:
        config = peft.PeftConfig.from_peft_type(**peft.PeftConfig.from_json_file(str(place)))
    except Exception as error:  # whatever the library raises
        raise ModelError(f"{place} is no configuration of adapters: {summary(error)}") from error
    _refuse_computed(config, place, known=known)
    config.inference_mode, said = not training, config.base_model_name_or_path
    try:
        with torch.device("meta"):
            model = peft.get_peft_model(base, config)
    except Exception as error:  # whatever the library raises
        raise ModelError(
            f"{place} is no configuration of adapters for {type(base).__name__}: {summary(error)}"
        ) from error
    state = model.state_dict()
    stored = peft.get_peft_model_state_dict(model, state, save_embedding_layers=False)
    names = {id(tensor): name for name, tensor in state.items()}
    keys = {names[id(tensor)]: key for key, tensor in stored.items() if id(tensor) in names}
    if len(keys) != len(stored):
        raise ModelError(f"{place}: {config.peft_type} stores other tensors than it trains")
    text = {key: sorted(x) if isinstance(x, set) else x for key, x in config.to_dict().items()}
    text |= {"inference_mode": True, "base_model_name_or_path": said}
    return Adapter(model, keys, weights if known else None, json.dumps(text, indent=2) + "\n")


def _refuse_computed(config: Any, place: Path, *, known: bool) -> None:
    """Refuses adapters that begin with what is computed from the weights, unless they are known."""
    begins = getattr(config, "init_lora_weights", True)
    plain = isinstance(begins, bool) or begins == "gaussian"
    if not plain or (getattr(config, "use_dora", False) and not known):
        what = "use_dora" if plain else f"init_lora_weights={begins!r}"
        raise ModelError(f"{place}: with {what} an adapter {_OF_WEIGHTS}", hint="leave it out")
