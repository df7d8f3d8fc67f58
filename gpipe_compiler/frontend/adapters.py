"""Adapters of peft's, as LoRA, around a model on meta."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpipe_compiler.errors import ModelError, UsageError, summary
from gpipe_compiler.runtime.core.stored_weights import ADAPTER_FILE

CONFIG = "adapter_config.json"

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
    place = file / CONFIG if file.is_dir() else file
    if not place.is_file():
        raise UsageError(f"--peft {file}: there is no file {place}")
    weights = place.parent.resolve() / ADAPTER_FILE
    known = weights.is_file() and place.name == CONFIG
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
