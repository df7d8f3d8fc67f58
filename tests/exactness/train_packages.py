"""Trains every package of a folder in every manner, in this process or under torchrun.

    torchrun --nproc-per-node 4 train_packages.py FOLDER RESULT gpipe,1f1b

The packages `FOLDER/<number of the case>` are those of the cases, all of as many stages; there is a
rank for every device. RESULT gets what was found, by case, schedule and remat.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from training_cases import CASES, FIRST_SCALE, SEED, Case, Trained, optimizer_of

REMATS = ("none", "full", "segments")


def train_all(
    folder: Path, transport: str, schedules: Sequence[str], devices: int = 1
) -> dict[tuple[str, str, str], Trained]:
    """What every case comes to, in every manner.

    Args:
        devices: so many threads, where this process is the only one.
    """
    found = {}
    for number, case in enumerate(CASES):
        for schedule, remat in itertools.product(schedules, REMATS):
            package = folder / f"case_{number}"
            key = case.name, schedule, remat
            found[key] = train(case, package, schedule, remat, transport, devices)
    return found


def train(
    case: Case, package: Path, schedule: str, remat: str, transport: str, devices: int
) -> Trained:
    """The loop of `train_plain`, with a pipeline for the model."""
    module = _imported(package)
    with module.Pipeline(
        schedule=schedule,
        remat=remat,
        precision="fp16" if case.half else "fp32",
        transport=transport,
        devices="cpu" if transport == "distributed" else ["cpu"] * devices,
        seed=SEED,
    ) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        losses, skipped = [], 0
        if case.half:
            pipe.scaler.update(FIRST_SCALE)
        for inputs, target in case.batches():
            optimizer.zero_grad()
            mine = (inputs, target) if pipe.rank == 0 else (None, None)
            losses.append(float(pipe.step(*mine)))
            pipe.scaler.unscale_(optimizer)
            if case.clip is not None:
                pipe.clip_grad_norm_(case.clip)
            pipe.scaler.step(optimizer)
            before = pipe.scaler.get_scale()
            pipe.scaler.update()
            skipped += pipe.scaler.get_scale() < before
        state = {name: tensor.clone() for name, tensor in pipe.gather_state_dict().items()}
    return Trained(losses, state, skipped)


def _imported(package: Path) -> object:
    """The package, under a name of its own: each brings its own runtime."""
    name = f"{package.parent.name}_{package.name}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """What torchrun starts."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    folder, result = map(Path, sys.argv[1:3])
    found = train_all(folder, "distributed", sys.argv[3].split(","))
    if torch.distributed.get_rank() == 0:
        torch.save(found, result)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
