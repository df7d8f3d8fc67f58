"""The largest differences between training in a pipeline and in the plain loop, as a table.

python tests/exactness/table.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from train_packages import REMATS, SCHEDULES, train_all
from training_cases import BATCH, CASES, MICROBATCHES, Case, Trained, train_plain

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.codegen.package import emit
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.plan import Plan

STAGES = (1, 2, 4)

FREE_LINKS = Cluster.of(Device("flat", 1e9, 1e12, 1 << 34, 0.0), Link(1e18, 0.0))
"""Where nothing but arithmetic takes time, so that four equal blocks make four stages."""


def write_package(case: Case, stages: int, folder: Path) -> Plan:
    """The package of a case, its weights being the first ones of the plain loop."""
    model = case.build()
    inputs, target = case.batches()[0]
    assert len(inputs) == BATCH
    graph = trace(model, (inputs,), target=target, loss_fn=case.loss)
    made = plan(graph, stages=stages, microbatches=MICROBATCHES, cluster=FREE_LINKS)
    emit(made, folder)
    return made


def write_packages(folder: Path) -> dict[int, list[Plan]]:
    """The packages of all cases: `folder/x4/case_0` is the first one in four stages."""
    return {
        stages: [
            write_package(case, stages, folder / f"x{stages}" / f"case_{number}")
            for number, case in enumerate(CASES)
        ]
        for stages in STAGES
    }


def train_under_torchrun(folder: Path, stages: int) -> dict[tuple[str, str, str], Trained]:
    """What every case comes to with a process per stage."""
    result = folder / f"torchrun_{stages}.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={stages}", str(Path(__file__).with_name("train_packages.py"))]
    subprocess.run(
        [*command, str(folder / f"x{stages}"), str(result)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return torch.load(result, weights_only=False)


def largest_difference(expected: Trained, found: Trained) -> float:
    """Over all losses and tensors of the final state."""
    differences = [abs(a - b) for a, b in zip(expected.losses, found.losses, strict=True) if a != b]
    for name, tensor in expected.state.items():
        differences.append(float((found.state[name].double() - tensor.double()).abs().max()))
    return max(differences)


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_packages(folder)
        plain = {case.name: train_plain(case) for case in CASES}
        found = {(stages, "local"): train_all(folder / f"x{stages}", "local") for stages in STAGES}
        found |= {(stages, "torchrun"): train_under_torchrun(folder, stages) for stages in STAGES}
    columns = [(stages, transport) for transport in ("local", "torchrun") for stages in STAGES]
    heads = " | ".join(f"{transport} K={stages}" for stages, transport in columns)
    print(f"| case | schedule | remat | {heads} |")
    print("|" + "---|" * (len(columns) + 3))
    for case in CASES:
        for schedule in SCHEDULES:
            for remat in REMATS:
                cells = [
                    largest_difference(plain[case.name], found[column][case.name, schedule, remat])
                    for column in columns
                ]
                numbers = " | ".join(f"{cell:.1e}" for cell in cells)
                print(f"| {case.name} | {schedule} | {remat} | {numbers} |")


if __name__ == "__main__":
    main()
