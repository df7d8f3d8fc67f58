"""Whether the largest network that is said to fit does, and the next one does not.

    python benchmarks/fitting_measured.py [NAME ...] [--stages 1 2]

As `memory_tables.py` looks for what fits 8 GB, here for small networks and devices, in 1F1B with
`--remat auto` and momentum. Then the packages of the largest network and of the next one train for
three steps, and `live_memory.py` tells what their devices truly held. Fails where that contradicts
what was said.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fitting_memory import SHARE, Fit, Sized, largest
from memory import measure
from tables import machine, markdown

from gpipe_compiler.cluster import Cluster, local_cluster
from gpipe_compiler.compile import trace_subject
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import Policy, RematChoice
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.spec import OptimizerKind, ScheduleKind
from gpipe_compiler.targets.torch_stages import emit

MICROBATCHES = 8


@dataclass(frozen=True)
class Family:
    """Networks of growing size, and the devices that they are to fit.

    Attributes:
        made: the network of a size, without numbers.
        memory: bytes of a device.
        sizes: that are looked at.
    """

    made: Callable[[int], Sized]
    memory: int
    sizes: Sequence[int]


def transformer(layers: int) -> Sized:
    """Transformer-L, narrow, for sequences of 128 words."""
    example = importlib.import_module("transformer_l")
    shape = {"vocabulary": 512, "dim": 256, "feed_forward": 1024, "heads": 4}
    model = example.build_model(**shape, layers=layers)
    words = torch.zeros(MICROBATCHES, 128, dtype=torch.int64)
    return Sized(f"Transformer-{layers}", model, words, words, example.loss_fn)


def amoebanet(filters: int) -> Sized:
    """AmoebaNet-D (3, filters) for images of 64 x 64."""
    example = importlib.import_module("amoebanet")
    model = example.build_model(3, filters, 10)
    images = torch.rand(MICROBATCHES, 3, 64, 64)
    target = torch.arange(MICROBATCHES) % 10
    return Sized(f"AmoebaNet-D (3, {filters})", model, images, target, example.loss_fn)


FAMILIES = {
    "transformer": Family(transformer, 100 * 10**6, range(1, 25)),
    "amoebanet": Family(amoebanet, 50 * 10**6, range(16, 257, 16)),
}
"""The sizes reach well beyond what the devices hold."""


@dataclass(frozen=True)
class Row:
    """One network.

    Attributes:
        said: bytes of every device by its plan.
        measured: the same, of its package at work.
    """

    name: str
    stages: int
    memory: int
    said: tuple[int, ...]
    measured: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether no device held more than it has."""
        return max(self.measured) <= self.memory

    @property
    def right(self) -> bool:
        """Whether that is what was said."""
        return self.fits == (max(self.said) <= self.memory)


def rows_of(family: Family, stages: int, folder: Path) -> list[Row]:
    """The largest network that is said to fit, and the next one."""
    plans: dict[str, tuple[Sized, Plan]] = {}

    def fit(size: int) -> Fit:
        sized = family.made(size)
        plan = planned(sized, stages, family.memory)
        plans[sized.name] = sized, plan
        taken = plan.prediction.device_bytes
        return Fit(sized.name, sized.parameters, taken, family.memory)

    both = [found for found in largest(family.sizes, fit) if found is not None]
    cases = []
    for number, found in enumerate(both):
        sized, plan = plans[found.name]
        package = folder / f"{plan.name}_{stages}_{number}"
        emit(plan, package)
        batch = ((sized.inputs,), {}), sized.target
        optimizer = OptimizerKind.MOMENTUM.value
        cases.append({"package": str(package), "batch": batch, "optimizer": optimizer})
    measured = measure(cases, stages, folder)
    return [
        Row(found.name, stages, found.memory, found.bytes, tuple(m[number][0] for m in measured))
        for number, found in enumerate(both)
    ]


def planned(sized: Sized, stages: int, memory: int) -> Plan:
    """As it is compiled for devices of so much memory, but with less work for cuts."""
    here = local_cluster()
    cluster = Cluster.of(
        dataclasses.replace(here.devices[0], memory=memory, kept_free=0), here.link
    )
    subject = Subject(
        "fitting", sized.model, (sized.inputs,), target=sized.target, loss_fn=sized.loss_fn
    )
    policy = Policy(
        schedule=ScheduleKind.ONE_F_ONE_B,
        remat=RematChoice.AUTO,
        optimizer=OptimizerKind.MOMENTUM,
        cut_inside=0.0,
    )
    planner = Planner(trace_subject(subject), cluster)
    choice = planner.choose(stages, MICROBATCHES, policy)
    return planner.plan(choice, policy, WORK // SHARE, exact_memory=True)


def table(rows: Sequence[Row]) -> str:
    """A line for each network."""
    header = ("", "stages", "device, MB", "fullest, said, MB", "fullest, measured, MB", "fits")
    lines = [
        (
            row.name,
            str(row.stages),
            f"{row.memory / 1e6:.0f}",
            f"{max(row.said) / 1e6:.2f}",
            f"{max(row.measured) / 1e6:.2f}",
            ("as said" if row.right else "NOT as said") + (": yes" if row.fits else ": no"),
        )
        for row in rows
    ]
    return markdown(header, lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = list(FAMILIES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.names or names:
        for stages in arguments.stages:
            with tempfile.TemporaryDirectory() as folder:
                rows += rows_of(FAMILIES[name], stages, Path(folder))
    print(f"{MICROBATCHES} micro-batches; {machine()}\n")
    print(table(rows))
    if not all(row.right for row in rows):
        sys.exit("not everything fits as said")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
