"""A pipeline in a training loop of Lightning Fabric: accumulation, clipping, a schedule.

    pip install lightning-fabric
    gpipe-compile examples/mlp_digits.py --stages 2
    python examples/loop_fabric.py mlp_digits_x2 weights.pt
    torchrun --standalone --nproc-per-node 2 examples/loop_fabric.py mlp_digits_x2 weights.pt

A Fabric of one device knows one process, and sets up the optimizer; torchrun and the pipeline join
the others. So neither the pipeline nor the data is set up: with a strategy for several processes
Fabric would take each for a replica, and average the gradients of different stages.
"""

import importlib
import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import SingleDeviceStrategy
from mlp_digits import SEED, make_optimizer, train_data

PASSES = 2
ACCUMULATED = 4
"""Mini-batches for a step of the optimizer."""
LARGEST_NORM = 0.5


def main(package: Path, weights: Path) -> None:
    """Train a package of the digits example, and write its weights."""
    sys.path.insert(0, str(package.resolve().parent))
    pipe = importlib.import_module(package.name).Pipeline()  # from here on as from the package
    fabric = Fabric(strategy=SingleDeviceStrategy(next(pipe.parameters()).device))
    optimizer = make_optimizer(pipe.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer = fabric.setup_optimizers(optimizer)
    torch.manual_seed(SEED)
    batches = [batch for _ in range(PASSES) for batch in train_data()]
    for number, batch in enumerate(batches, start=1):
        loss = pipe.loss(*batch)
        fabric.backward(loss / ACCUMULATED)
        if number % ACCUMULATED == 0:
            pipe.clip_grad_norm_(LARGEST_NORM)  # over the stages of all processes
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    state = pipe.gather_state_dict()  # all of it on rank 0, under the model's own names
    if pipe.rank == 0:
        print(f"loss {loss.item():.4f}")
        torch.save(state, weights)
    pipe.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
