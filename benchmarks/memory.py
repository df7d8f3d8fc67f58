"""Predicted peaks of memory against measured ones, device by device.

    python benchmarks/memory.py [--stages 1 2 4] [--optimizer adam | --infer] [NAME ...]

Every network is compiled for each number of stages, GPipe and 1F1B, remat none, full and auto (with
memory half way between what the other two need), and trained for three steps: in one process, or
under torchrun with a process per stage. `live_memory.py` tells what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import machine, markdown
from torch import nn
from torch.utils._pytree import tree_map

from gpipe_compiler.cluster import Cluster, local_cluster
from gpipe_compiler.compile import trace_subject
from gpipe_compiler.errors import PlanError
from gpipe_compiler.frontend.examples import normal_form
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import Policy, RematChoice
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.spec import OptimizerKind, ScheduleKind
from gpipe_compiler.targets.torch_stages import emit

EXAMPLES = Path(__file__).parents[1] / "examples"
MICROBATCHES = 4
SHARE = 8
"""Cuts may take so many times less work than usual: what is told of them is all that counts."""
ALLOWED = 0.05
"""The share by which a prediction may be off."""
SLACK = 512
"""Bytes that may be missed: single numbers (losses, their weights) are not measured."""


@dataclass(frozen=True)
class Network:
    """An example at a small size; keyword arguments of its functions."""

    example: str
    model: dict[str, int]
    inputs: dict[str, int]
    target: dict[str, int]


NETWORKS = {
    "gpt2-like": Network(
        "transformer", {"dim": 192, "heads": 6, "layers": 8, "sequence": 64, "vocabulary": 1024},
        {"batch": 8, "sequence": 64}, {"batch": 8, "sequence": 64},
    ),
    "amoebanet": Network(
        "amoebanet", {"layers": 3, "filters": 16}, {"batch": 8, "image": 32}, {"batch": 8}
    ),
    "resnet50": Network(
        "resnet50", {"classes": 10, "width": 16}, {"batch": 8, "image": 64},
        {"batch": 8, "classes": 10},
    ),
    "unet": Network(
        "unet", {"depth": 3, "width": 8}, {"batch": 8, "image": 64}, {"batch": 8, "image": 64}
    ),
    "alexnet": Network(
        "alexnet", {"classes": 10, "width": 16}, {"batch": 8, "image": 64},
        {"batch": 8, "classes": 10},
    ),
    "inception": Network("inception", {"width": 16}, {}, {}),
    "mlp_digits": Network("mlp_digits", {"hidden": 256}, {}, {}),
    "gpt2_huggingface": Network("gpt2_huggingface", {}, {}, {}),
    "inputs": Network("inputs", {"layers": 6}, {}, {}),
    "deep_chain": Network("deep_chain", {"layers": 24}, {"batch": 64}, {"batch": 64}),
    "transformer_l": Network(
        "transformer_l", {"dim": 128, "feed_forward": 512, "heads": 4, "layers": 6},
        {"batch": 8, "sequence": 64}, {"batch": 8, "sequence": 64},
    ),
}  # fmt: skip


class Vit(nn.Module):
    """A small Vision Transformer: patches, encoder layers of torch's own, a class token."""

    def __init__(self, dim: int = 128, layers: int = 6, image: int = 64, patch: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.zeros(1, 1 + (image // patch) ** 2, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, 4, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of ten classes."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(self.norm(x)[:, 0])
        return scores


def subject_of(name: str) -> Subject:
    """The network with its example call."""
    torch.manual_seed(0)
    if name == "vit":
        target = torch.arange(8) % 10
        loss = nn.functional.cross_entropy
        return Subject(name, Vit(), (torch.randn(8, 3, 64, 64),), target=target, loss_fn=loss)
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    network = NETWORKS[name]
    example = importlib.import_module(network.example)
    model = example.build_model(**network.model)
    if any(parameter.is_meta for parameter in model.parameters()):
        model = model.to_empty(device="cpu")
    args, kwargs = normal_form(example.example_inputs(**network.inputs), None)
    # Where the model makes its own loss, the example has neither of these.
    has_loss = hasattr(example, "loss_fn")
    return Subject(
        name=name,
        model=model,
        args=args,
        kwargs=kwargs,
        target=example.example_target(**network.target) if has_loss else None,
        loss_fn=example.loss_fn if has_loss else None,
    )


@dataclass(frozen=True)
class Made:
    """A package with its plan, and the words that head its rows."""

    words: tuple[str, ...]
    plan: Plan
    case: dict[str, Any]


def packages(
    name: str, stages: int, optimizer: OptimizerKind | None, folder: Path
) -> Iterator[Made]:
    """Those of one network in so many stages; without an optimizer, for inference."""
    subject = subject_of(name)
    if optimizer is None:
        subject = dataclasses.replace(subject, training=False)
    graph = trace_subject(subject)
    whole = Planner(graph, local_cluster())
    schedules = [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B]
    for schedule in schedules[: 1 if stages == 1 or optimizer is None else 2]:
        peaks: dict[RematChoice, int] = {}
        for remat in RematChoice if optimizer is not None else (RematChoice.NONE,):
            planner = whole
            if remat is RematChoice.AUTO:
                both = [peaks[choice] for choice in (RematChoice.NONE, RematChoice.FULL)]
                planner = dataclasses.replace(whole, cluster=_of_memory(sum(both) // 2))
            policy = Policy(schedule=schedule, remat=remat, optimizer=optimizer)
            with contextlib.suppress(PlanError):
                choice = planner.choose(stages, MICROBATCHES, policy)
                plan = planner.plan(choice, policy, WORK // SHARE, exact_memory=True)
                peaks[remat] = max(held.peak for held in plan.prediction.memory)
                words = (name, str(stages), schedule.value, remat.value)
                package = folder / "_".join(words).replace("-", "_")
                emit(plan, package)
                # Alone in memory: an example batch may be a slice of all its data.
                call = (subject.args, dict(subject.kwargs)), subject.target
                batch = tree_map(_alone, call)
                trained_by = None if optimizer is None else optimizer.value
                case = {"package": str(package), "batch": batch, "optimizer": trained_by}
                yield Made(words, plan, case)


def _alone(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _of_memory(memory: int) -> Cluster:
    here = local_cluster()
    return Cluster.of(dataclasses.replace(here.devices[0], memory=memory, kept_free=0), here.link)


def measure(cases: Sequence[dict[str, Any]], stages: int, folder: Path) -> list[list[list[int]]]:
    """For every rank, of every case what `live_memory.py` tells."""
    path = folder / f"cases_{stages}"
    torch.save(cases, path)
    command = [sys.executable]
    if stages > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={stages}"]
    command += [str(Path(__file__).parent / "live_memory.py"), str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    texts = [Path(f"{path}.{rank}").read_text() for rank in range(stages)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


@dataclass(frozen=True)
class Row:
    """A device of a package.

    Attributes:
        words: that head the row: network, stages, schedule, remat.
        action: at which the predicted peak is.
        predicted, live, allocated: bytes; the last two as `live_memory.py` tells them.
    """

    words: tuple[str, ...]
    device: int
    action: str
    predicted: int
    live: int
    allocated: int

    @property
    def bytes_off(self) -> int:
        """How much the prediction is off."""
        return self.predicted - self.live

    @property
    def off(self) -> float:
        """The share by which the prediction is off."""
        return self.bytes_off / self.live

    @property
    def missed(self) -> bool:
        """Whether it is off by more than it may be."""
        return abs(self.off) > ALLOWED and abs(self.bytes_off) > SLACK

    def cells(self) -> list[str]:
        """As the table has it."""
        off = f"{self.off:+.1%}" + " !" * self.missed
        sizes = _mib(self.predicted), _mib(self.live), off, _mib(self.allocated)
        return [*self.words, str(self.device), self.action, *sizes]


def rows_of(made: Sequence[Made], found: Sequence[Sequence[Sequence[int]]]) -> list[Row]:
    """A row for every device of every package."""
    return [
        Row(one.words, rank, memory.action, memory.peak, *found[rank][number])
        for number, one in enumerate(made)
        for rank, memory in enumerate(one.plan.prediction.memory)
    ]


def summary(rows: Sequence[Row]) -> str:
    """A row for every network and number of stages: how many peaks, and how far off at most.

    As a share only where there is more than `SLACK`.
    """
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(row.words[:2], []).append(row)
    lines = []
    for words, some in found.items():
        sizes = [row.live for row in some]
        off = max((row.off for row in some if row.live > SLACK), key=abs, default=0.0)
        bytes_off = max((row.bytes_off for row in some), key=abs)
        spread = f"{_mib(min(sizes))} to {_mib(max(sizes))}"
        over = max(row.allocated / row.live - 1 for row in some)
        figures = f"{off:+.2%}", str(bytes_off), f"{over:.0%}"
        lines.append([*words, str(len(some)), spread, *figures])
    words = ("network", "stages", "peaks", "measured MiB", "most off", "bytes", "workspaces add")
    return markdown(words, lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [*NETWORKS, "vit"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--optimizer", type=OptimizerKind, default=OptimizerKind.ADAM)
    parser.add_argument("--infer", action="store_true", help="measure inference, not training")
    arguments = parser.parse_args()
    optimizer = None if arguments.infer else arguments.optimizer
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in arguments.names or names:
        for stages in arguments.stages:
            with tempfile.TemporaryDirectory() as folder:
                made = list(packages(name, stages, optimizer, Path(folder)))
                cases = [one.case for one in made]
                found = rows_of(made, measure(cases, stages, Path(folder)))
                rows += found
                print(summary(found).splitlines()[-1], file=sys.stderr, flush=True)
    how = optimizer.value if optimizer else "inference"
    print(f"\n{how}, {MICROBATCHES} micro-batches; {machine()}\n")
    print(summary(rows))
    columns = ("network", "stages", "schedule", "remat", "device", "peak at")
    figures = ("predicted MiB", "measured MiB", "off", "with workspaces")
    print(f"\n{markdown((*columns, *figures), [row.cells() for row in rows])}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
