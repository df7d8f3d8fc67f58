"""The largest differences between training in a pipeline and in the plain loop, as a table.

python tests/exactness/table.py
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import forked
import torch
from segmenting import in_segments
from train_packages import REMATS, train_all
from training_cases import BATCH, CASES, MICROBATCHES, Case, Trained, train_plain

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.plan import Plan
from gpipe_compiler.targets.torch_stages import emit

STAGES = (1, 2, 4)


@dataclass(frozen=True)
class Layout:
    """Packages of so many stages on so many devices, under some schedules."""

    stages: int
    devices: int
    schedules: tuple[str, ...]

    def __str__(self) -> str:
        where = "" if self.stages == self.devices else f" on {self.devices}"
        return f"{self.stages}{where}: {', '.join(self.schedules)}"


ONE_EACH = tuple(Layout(count, count, ("gpipe", "1f1b")) for count in STAGES)
LAYOUTS = (*ONE_EACH, Layout(4, 2, ("zbv",)))
MORE_LAYOUTS = (
    Layout(1, 1, ("zb-h1",)),
    Layout(2, 1, ("interleaved", "zbv")),
    Layout(2, 2, ("zb-h1",)),
    Layout(4, 2, ("gpipe", "1f1b", "zb-h1", "interleaved")),
    Layout(4, 4, ("zb-h1",)),
)
"""Those that take too long to train every time."""

FREE_LINKS = Cluster.of(Device("flat", 1e9, 1e12, 1 << 34, 0.0), Link(1e18, 0.0))
"""Where nothing but arithmetic takes time, so that four equal blocks make four stages."""


def write_package(case: Case, stages: int, folder: Path) -> Plan:
    """The package of a case, its weights being the first ones of the plain loop."""
    model = case.build()
    inputs, target = case.batches()[0]
    assert len(inputs) == BATCH
    graph = trace(model, (inputs,), target=target, loss_fn=case.loss)
    made = plan(graph, stages=stages, microbatches=MICROBATCHES, cluster=FREE_LINKS)
    made = in_segments(made, 2)
    emit(made, folder)
    return made


def write_packages(folder: Path, stages: int) -> list[Plan]:
    """The packages of all cases: `folder/x4/case_0` is the first one in four stages."""
    return [
        write_package(case, stages, folder / f"x{stages}" / f"case_{number}")
        for number, case in enumerate(CASES)
    ]


def train_layout(
    folder: Path, layout: Layout, transport: str
) -> dict[tuple[str, str, str], Trained]:
    """What every case comes to with a thread, or under torchrun a process, per device."""
    packages = folder / f"x{layout.stages}"
    if transport == "local":
        return train_all(packages, "local", layout.schedules, layout.devices)
    result = folder / "torchrun.pt"
    script = Path(__file__).with_name("train_packages.py")
    schedules = ",".join(layout.schedules)
    forked.run([script, packages, result, schedules], ranks=layout.devices).check_returncode()
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
    transports = ("local", "torchrun")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for stages in STAGES:
            write_packages(folder, stages)
        plain = {case.name: train_plain(case) for case in CASES}
        print(f"| case | stages | schedule | remat | {' | '.join(transports)} |")
        print("|" + "---|" * (len(transports) + 4))
        for layout in (*LAYOUTS, *MORE_LAYOUTS):
            found = [train_layout(folder, layout, transport) for transport in transports]
            where = f"{layout.stages} on {layout.devices}"
            for case, schedule, remat in itertools.product(CASES, layout.schedules, REMATS):
                differences = [
                    largest_difference(plain[case.name], column[case.name, schedule, remat])
                    for column in found
                ]
                numbers = " | ".join(f"{difference:.1e}" for difference in differences)
                print(f"| {case.name} | {where} | {schedule} | {remat} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
