"""The step of a plan of timed ops against the clock: every example, schedule and way to start.

    python benchmarks/prediction.py [--schedules gpipe 1f1b ...] [--starts threads torchrun]
        [NAME ...]

For every case a package is made for two devices, as `gpipe-compile --cost measured` does it.

    ops        predicted before anything of the package ran, from ops timed one by one, with what
               the optimizer takes
    measured   what the package's own `run.py bench` tells: forward and backward of a mini-batch
    ratio      measured to predicted

Every process uses one thread for an op, so two cores are needed, and nothing else should run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tables import machine, markdown

from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.compile import trace_subject
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import Policy
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.measured import Start, time_step
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.errors import PipelineError
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.targets.torch_stages import emit

EXAMPLES = Path(__file__).parents[1] / "examples"
DEVICES = 2
MICROBATCHES = 4
STAGES = {ScheduleKind.INTERLEAVED: 2 * DEVICES, ScheduleKind.ZBV: 2 * DEVICES}
"""Of schedules that need more than one stage a device."""

SIZES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "mlp_digits": ({}, {}),
    "transformer": ({}, {}),
    "gpt2_huggingface": ({}, {}),
    "inception": ({}, {}),
    "unet": ({"width": 8}, {"batch": 8, "image": 64}),
    "alexnet": ({"width": 16}, {"batch": 8, "image": 128}),
    "resnet50": ({"width": 16}, {"batch": 8, "image": 64}),
}
"""By example, what its model and its inputs are made with, so that steps are short."""


def subject_of(name: str) -> Subject:
    """An example with its call."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module(name)
    model, sizes = SIZES[name]
    inputs = example.example_inputs(**sizes)
    own_loss = not hasattr(example, "loss_fn")
    known = example.example_target.__code__.co_varnames if not own_loss else ()
    target = {key: size for key, size in sizes.items() if key in known}
    return Subject(
        name=name,
        model=example.build_model(**model),
        args=() if isinstance(inputs, dict) else (inputs,),
        kwargs=inputs if isinstance(inputs, dict) else {},
        target=None if own_loss else example.example_target(**target),
        loss_fn=None if own_loss else example.loss_fn,
    )


@dataclass(frozen=True)
class Case:
    """A package, and what was planned for it."""

    package: Path
    plan: Plan


def packages(
    name: str, schedules: Sequence[ScheduleKind], folder: Path
) -> dict[ScheduleKind, Case | str]:
    """The package of every schedule, or why there is none."""
    graph = trace_subject(subject_of(name))
    planner = Planner(graph, local_cluster(), measured=True)
    found: dict[ScheduleKind, Case | str] = {}
    for schedule in schedules:
        package = folder / f"{name}_{schedule.name.lower()}"
        policy = Policy(schedule=schedule)
        try:
            stages = STAGES.get(schedule, DEVICES)
            plan = planner.plan(planner.choose(stages, MICROBATCHES, policy), policy)
            emit(plan, package)
        except (GPipeCompilerError, PipelineError) as error:
            found[schedule] = str(error).splitlines()[0]
            continue
        found[schedule] = Case(package, plan)
    return found


def rows_of(
    name: str, schedules: Sequence[ScheduleKind], starts: Sequence[Start]
) -> Iterator[tuple[str, ...]]:
    """The row of the table for every case of an example."""
    with tempfile.TemporaryDirectory(prefix="gpipe-prediction-") as folder:
        for kind, case in packages(name, schedules, Path(folder)).items():
            if isinstance(case, str):
                yield name, kind.value, "none", case, "", ""
                continue
            for start in starts:
                measured_s = time_step(case.package, DEVICES, start)
                predicted_s = case.plan.prediction.step_s
                figures = _ms(predicted_s), _ms(measured_s), f"{measured_s / predicted_s:.2f}"
                yield name, kind.value, start.value, *figures


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--schedules", type=ScheduleKind, nargs="+", default=list(ScheduleKind))
    parser.add_argument("--starts", type=Start, nargs="+", default=list(Start))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in arguments.names or SIZES:
        for row in rows_of(name, arguments.schedules, arguments.starts):
            found.append(row)
            print(" ".join(row), file=sys.stderr, flush=True)
    print(f"{DEVICES} devices, {MICROBATCHES} micro-batches; {machine()}\n")
    print(markdown(("network", "schedule", "start", "ops ms", "measured ms", "ratio"), found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
