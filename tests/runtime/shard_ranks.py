"""What every rank of the tests of divided weights runs; each case leaves its findings in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from checkpoint_runs import Run
from torch.distributed.tensor import DTensor


def whole(state):
    """With all rows of what replicas divide among them. Every rank calls it."""
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in sorted(state.items())
    }


def write(directory):
    """Divided replicas train and write; then on, for the truth, and back again."""
    for kind in ("groups", "momentum"):
        run = Run("tied", kind, data_parallel=2, sharding="optimizer")
        run.train(3)
        path = run.save(directory / kind)
        torch.save(whole(run.state()), directory / f"saved-{kind}-{run.pipe.rank}.pt")
        run.train(6)
        truth = whole(run.state())
        torch.save(truth, directory / f"truth-{kind}-{run.pipe.rank}.pt")
        run.load(path)
        run.train(6)
        torch.save(whole(run.state()), directory / f"again-{kind}-{run.pipe.rank}.pt")
        run.close()


def read(directory):
    """Divided replicas go on from what others have written."""
    run = Run("tied", "groups", seed=4, data_parallel=2, sharding="optimizer")
    run.load(directory / "given")
    torch.save(whole(run.state()), directory / f"loaded-{run.pipe.rank}.pt")
    run.train(6)
    torch.save(whole(run.state()), directory / f"trained-{run.pipe.rank}.pt")
    run.close()


def meanwhile(directory):
    """Divided replicas write at once, and while everything changes."""
    run = Run("tied", "groups", data_parallel=2, sharding="optimizer")
    run.train(3)
    run.save(directory / "at_once")
    run.save_meanwhile(directory / "later")
    run.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"write": write, "read": read, "meanwhile": meanwhile}[sys.argv[1]](Path(sys.argv[2]))
