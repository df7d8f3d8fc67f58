"""The weights of a model, as the command reads and writes them."""

from __future__ import annotations

from pathlib import Path

import torch

from .. import checkpoint
from ..core.pipeline import Pipeline
from ..core.weights import INDEX, Weights, load_file, save_file, save_weights
from .console import say


def load_weights(pipe: Pipeline, path: Path) -> None:
    """Take over weights: one safetensors file, a folder of them with an index, or a checkpoint.

    Of a folder of checkpoints the newest is taken. Every rank calls it.

    Raises:
        WeightsError, CheckpointError: when there are none that can be read.
        UsageError: when they are those of another model.
    """
    if not path.is_dir():
        pipe.load_state_dict(load_file(path))
    elif (path / INDEX).is_file():
        weights = Weights.open(path)
        pipe.load_state_dict(weights.load(weights.files, torch.device("cpu")))
    else:
        seed, step = pipe.seed, pipe.step_number
        checkpoint.load_checkpoint(pipe, None, checkpoint.latest(path) or path)
        pipe.seed, pipe.step_number = seed, step


def save(pipe: Pipeline, path: Path) -> None:
    """Write the weights under the model's names: one file, or a folder with an index."""
    state = pipe.gather_state_dict()
    if pipe.rank != 0:
        return
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        save_weights(state, path)
    say(f"weights saved to {path}")
