"""A pipeline in a training loop of Hugging Face's Accelerate: accumulation, clipping, a schedule.

    pip install accelerate
    gpipe-compile examples/mlp_digits.py --stages 2
    python examples/loop_accelerate.py mlp_digits_x2 weights.pt
    torchrun --standalone --nproc-per-node 2 examples/loop_accelerate.py mlp_digits_x2 weights.pt

What Accelerate does for a model (moving it, wrapping it) the pipeline has done, so neither it nor
the data goes through `prepare`: that would hand every process other batches, and rank 0's are the
ones that are trained on. A schedule that it has prepared would step once for every process.
"""

import importlib
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from mlp_digits import SEED, make_optimizer, train_data

PASSES = 2
ACCUMULATED = 4
"""Mini-batches for a step of the optimizer."""
LARGEST_NORM = 0.5


def main(package: Path, weights: Path) -> None:
    """Train a package of the digits example, and write its weights."""
    cpu = not torch.cuda.is_available()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED, cpu=cpu)
    sys.path.insert(0, str(package.resolve().parent))
    pipe = importlib.import_module(package.name).Pipeline()  # from here on as from the package
    optimizer = make_optimizer(pipe.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer = accelerator.prepare(optimizer)
    torch.manual_seed(SEED)
    for batch in (batch for _ in range(PASSES) for batch in train_data()):
        with accelerator.accumulate(pipe):
            loss = pipe.loss(*batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                pipe.clip_grad_norm_(LARGEST_NORM)  # over the stages of all processes
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}")
    state = pipe.gather_state_dict()  # all of it on rank 0, under the model's own names
    if accelerator.is_main_process:
        torch.save(state, weights)
    pipe.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
