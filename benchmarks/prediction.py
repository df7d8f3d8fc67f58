"""The predicted step of two devices against the clock: every example, schedule and way to start.

    python benchmarks/prediction.py [--rounds 7] [--schedules gpipe 1f1b ...]
        [--starts threads torchrun] [NAME ...]

For every case a package is made. Its step is predicted as `gpipe-compile --cost measured` does it:
the stages are timed without waiting for one another, messages as they are sent in training, and the
schedule is simulated with these times. What it takes is what the package's own `planner` says:
forward and backward of a mini-batch, the median of its steps. What a machine can do changes with
its neighbours, from one second to the next. So predicting and measuring take turns of a second or
so, all schedules round by round, and each measurement is compared with the prediction made right
before it.

    ops        predicted before anything of the package ran, from ops timed one by one, with what
               the optimizer takes
    predicted  from timed stages; the median over the rounds
    measured   the median over the rounds
    ratio      measured to predicted, the median over the rounds, and where their middle half lies

Every process uses one thread for an op, so two cores are needed, and nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tables import machine, markdown

from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.codegen.package import emit
from gpipe_compiler.compile import trace_subject
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import Policy
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.measured import Start, start_command, step_seconds
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.errors import PipelineError
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.runtime.train.stage_times import MeasuredStages

EXAMPLES = Path(__file__).parents[1] / "examples"
DEVICES = 2
MICROBATCHES = 4
STAGES = {ScheduleKind.INTERLEAVED: 2 * DEVICES, ScheduleKind.ZBV: 2 * DEVICES}
"""Of schedules that need more than one stage a device."""

WITHIN = 0.15
MEASURED_S = 0.1
"""Seconds of steps that `planner` takes its median of, in every round."""

PHASE_S = 0.05
"""Seconds for which stages are timed alone, and as long together, in every round."""

LEAST_STEPS, MOST_STEPS = 5, 100

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

    @property
    def steps(self) -> int:
        """How many `planner` is to take."""
        wanted = int(MEASURED_S / self.plan.prediction.step_s)
        return max(LEAST_STEPS, min(MOST_STEPS, wanted))


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


@dataclass(frozen=True)
class Round:
    """One prediction and one measurement, in seconds."""

    predicted: float
    measured: float


def rounds_of(cases: Sequence[Case], start: Start, count: int) -> list[list[Round]]:
    """Predictions and measurements in turns, in one start of all packages."""
    report = cases[0].package.parent / f"{start.value}.json"
    words = [f"{case.package}:{case.steps}" for case in cases]
    command = [*start_command(Path(__file__), DEVICES, start), "--rounds", str(count)]
    finished = subprocess.run([*command, "--report", str(report), "--worker", *words], check=False)
    if finished.returncode:
        raise SystemExit(f"{start.value}: exit code {finished.returncode}")
    rows = json.loads(report.read_text())
    return [
        [
            Round(step_seconds(case.plan, MeasuredStages.from_json(row["stages"])), row["seconds"])
            for row in found
        ]
        for case, found in zip(cases, rows, strict=True)
    ]


def worker(words: Sequence[str], rounds: int, report: Path) -> None:
    """What is started: times the stages and the steps of every package, round by round."""
    opened = [_open(*word.rsplit(":", 1)) for word in words]
    found: list[list[dict[str, Any]]] = [[] for _ in opened]
    for _ in range(rounds):
        for row, package in zip(found, opened, strict=True):
            row.append({"stages": package.time_stages(), "seconds": package.bench()})
    if opened[0].pipe.rank == 0:
        report.write_text(json.dumps(found))
    for package in opened:
        package.pipe.close()


@dataclass
class Opened:
    """A package in this process."""

    folder: Path
    steps: int
    pipe: Any
    part: Any
    """Imports a module of the package's `runtime.train` by name."""

    def time_stages(self) -> str:
        """What `run.py bench --report` writes."""
        inputs, target = self.part("data").example_call(self.pipe.spec, self.folder, None)
        found = self.part("stage_clock").measure_stages(self.pipe, inputs, target, PHASE_S)
        return str(found.to_json())

    def bench(self) -> float:
        """The median that `run.py bench` prints."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            choice = self.part("data").InputChoice()
            self.part("inference").bench(self.pipe, self.folder, choice, self.steps)
        told = re.search(r"median (\S+) (ms|s)", said.getvalue())
        return float(told[1]) * {"s": 1.0, "ms": 1e-3}[told[2]] if told else 0.0


def _open(folder: str, steps: str) -> Opened:
    path = Path(folder)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    package = importlib.import_module(path.name)

    def part(name: str) -> Any:
        return importlib.import_module(f"{path.name}.runtime.train.{name}")

    part("process").keep_memory()
    return Opened(path, int(steps), package.Pipeline(), part)


def rows_of(
    name: str, schedules: Sequence[ScheduleKind], starts: Sequence[Start], rounds: int
) -> Iterator[tuple[float | None, tuple[str, ...]]]:
    """The ratio and the row of the table for every case of an example."""
    with tempfile.TemporaryDirectory(prefix="gpipe-prediction-") as folder:
        made = packages(name, schedules, Path(folder))
        cases = {kind: case for kind, case in made.items() if isinstance(case, Case)}
        for kind, reason in made.items():
            if isinstance(reason, str):
                yield None, (name, kind.value, "none", reason, "", "", "")
        for start in starts:
            found = rounds_of(list(cases.values()), start, rounds) if cases else []
            for (kind, case), row in zip(cases.items(), found, strict=True):
                ratios = [one.measured / one.predicted for one in row]
                ratio = statistics.median(ratios)
                yield (
                    ratio,
                    (
                        name,
                        kind.value,
                        start.value,
                        _ms(case.plan.prediction.step_s),
                        _ms(statistics.median(one.predicted for one in row)),
                        _ms(statistics.median(one.measured for one in row)),
                        f"{ratio:.2f} ({_middle(ratios)})"
                        f"{'' if abs(ratio - 1) <= WITHIN else ' *'}",
                    ),
                )


def _middle(ratios: Sequence[float]) -> str:
    """Between which numbers the middle half of them lies."""
    if len(ratios) == 1:
        return "one round"
    low, _, high = statistics.quantiles(ratios, method="inclusive")
    return f"{low:.2f} to {high:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--schedules", type=ScheduleKind, nargs="+", default=list(ScheduleKind))
    parser.add_argument("--starts", type=Start, nargs="+", default=list(Start))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        worker(arguments.worker, arguments.rounds, arguments.report)
        return
    header = ("network", "schedule", "start", "ops ms", "predicted ms", "measured ms", "ratio")
    found = []
    for name in arguments.names or SIZES:
        for ratio, row in rows_of(name, arguments.schedules, arguments.starts, arguments.rounds):
            found.append((ratio, row))
            print(" ".join(row), file=sys.stderr, flush=True)
    ratios = [ratio for ratio, _ in found if ratio is not None]
    within = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    print(f"{DEVICES} devices, {MICROBATCHES} micro-batches; {machine()}\n")
    print(markdown(header, [row for _, row in found]))
    print(f"\n{within} of {len(ratios)} within {WITHIN:.0%} (* is not)")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
