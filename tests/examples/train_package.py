"""Trains a package with plain SGD, in this process or under torchrun.

    torchrun --nproc-per-node 2 train_package.py PACKAGE BATCHES LEARNING_RATE RESULT

BATCHES is a list of (inputs, target) that `torch.save` wrote; RESULT gets the losses and the final
state. Nothing of the compiler is imported.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch


def train(package: Path, batches: list[tuple[object, object]], learning_rate: float) -> object:
    """Losses and final state; under torchrun on rank 0, elsewhere no state."""
    sys.path.insert(0, str(package.parent))
    try:
        pipeline_class = importlib.import_module(package.name).Pipeline
    finally:
        sys.path.remove(str(package.parent))
    with pipeline_class() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=learning_rate)
        losses = []
        for inputs, target in batches:
            optimizer.zero_grad()
            losses.append(float(pipe.step(inputs, target)))
            optimizer.step()
        state = {name: tensor.detach().clone() for name, tensor in pipe.gather_state_dict().items()}
        return losses, state, pipe.rank


def main() -> None:
    """What torchrun starts."""
    torch.set_num_threads(1)
    package, batches, learning_rate, result = sys.argv[1:]
    losses, state, rank = train(Path(package), torch.load(batches), float(learning_rate))
    if rank == 0:
        torch.save((losses, state), result)


if __name__ == "__main__":
    main()
