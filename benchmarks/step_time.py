"""How long a training step takes as a pipeline of two stages, against the plain loop.

    python benchmarks/step_time.py [--microbatches 2 4 8] [--rounds 9] [NAME ...]

Measured are forward and backward of one mini-batch, without the optimizer:

    plain        the model on one thread, the whole mini-batch at once
    accumulate   the model on one thread, micro-batch by micro-batch
    local        the package in one process, a thread for each stage
    torchrun     the package in two processes with gloo

Every process uses one thread for an op, so that two stages can be at most twice as fast. The
variants take turns, round by round, so that a disturbance of the machine hits all of them; the
table gives medians, and the speed-up over `plain`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tables import machine, markdown

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.spec import ScheduleKind

EXAMPLES = Path(__file__).parents[1] / "examples"
STAGES = 2
POLL_S = 0.001


@dataclass(frozen=True)
class Network:
    """An example at a size that takes some tenths of a second a step.

    `model`, `inputs` and `target` are keyword arguments of the example's functions.
    """

    example: str
    model: dict[str, int]
    inputs: dict[str, int]
    target: dict[str, int]


NETWORKS = {
    "gpt": Network(
        "transformer", {"dim": 384, "heads": 6, "layers": 8, "sequence": 128, "vocabulary": 1024},
        {"batch": 8, "sequence": 128}, {"batch": 8, "sequence": 128},
    ),
    "resnet50": Network("resnet50", {}, {"batch": 8, "image": 128}, {"batch": 8}),
    "unet": Network("unet", {"width": 16}, {"batch": 8, "image": 96}, {"batch": 8, "image": 96}),
    "tiny": Network("mlp_digits", {"hidden": 32, "layers": 16}, {}, {}),
}  # fmt: skip


def load(name: str) -> ModuleType:
    """The example that a network is of."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(NETWORKS[name].example)


def subject_of(name: str) -> Subject:
    """The network with its example call."""
    network, example = NETWORKS[name], load(name)
    return Subject(
        name=name,
        model=example.build_model(**network.model),
        args=(example.example_inputs(**network.inputs),),
        target=example.example_target(**network.target),
        loss_fn=example.loss_fn,
    )


class Steps:
    """Runs `run` with gradients cleared before, and times it."""

    def __init__(self, run: Callable[[], object], parameters: list[torch.nn.Parameter]) -> None:
        self._run = run
        self._parameters = parameters

    def seconds(self) -> float:
        """One step."""
        for parameter in self._parameters:
            parameter.grad = None
        start = time.perf_counter()
        self._run()
        return time.perf_counter() - start


def plain(subject: Subject, microbatches: int) -> Steps:
    """The plain loop over micro-batches; one of them is the whole mini-batch."""
    inputs, target = subject.args[0], subject.target
    assert isinstance(inputs, torch.Tensor)
    assert isinstance(target, torch.Tensor)
    model = subject.model.train()
    parts = list(zip(inputs.chunk(microbatches), target.chunk(microbatches), strict=True))

    def run() -> None:
        for some_inputs, some_target in parts:
            assert subject.loss_fn is not None
            loss = subject.loss_fn(model(some_inputs), some_target)
            (loss / microbatches).backward()

    return Steps(run, list(model.parameters()))


def pipeline(package: Path, inputs: object, target: object) -> Steps:
    """The package's step in this process: all of it, or under torchrun this rank's part."""
    pipe = open_package(package)
    return Steps(lambda: pipe.step(inputs, target), list(pipe.parameters()))


def open_package(package: Path) -> Any:
    """The pipeline of a package, whose folder need not be importable so far."""
    sys.path.insert(0, str(package.parent))
    return importlib.import_module(package.name).Pipeline()


def worker(package: Path, network: str, rounds: int) -> None:
    """What torchrun starts: a step whenever the parent asks for one."""
    subject = subject_of(network)
    steps = pipeline(package, subject.args[0], subject.target)
    first = os.environ["RANK"] == "0"
    steps.seconds()
    for index in range(rounds):
        if first:
            _signal(package.parent / f"ready{index}")
            _wait(package.parent / f"go{index}")
        seconds = steps.seconds()  # the other rank waits in here for the first one's tensors
        if first:
            _signal(package.parent / f"done{index}", str(seconds))


def _signal(path: Path, text: str = "") -> None:
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.rename(path)


def _wait(path: Path, process: subprocess.Popen[bytes] | None = None) -> str:
    while not path.exists():
        if process is not None and process.poll() is not None:
            raise SystemExit(f"torchrun ended with {process.returncode}")
        time.sleep(POLL_S)
    return path.read_text()


@contextlib.contextmanager
def torchrun(package: Path, network: str, rounds: int) -> Iterator[Callable[[int], float]]:
    """Two processes that run the package; gives a function that times step `index`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={STAGES}", __file__, "--worker", str(package)]
    process = subprocess.Popen([*command, "--rounds", str(rounds), network])

    def seconds(index: int) -> float:
        _wait(package.parent / f"ready{index}", process)
        _signal(package.parent / f"go{index}")
        return float(_wait(package.parent / f"done{index}", process))

    try:
        yield seconds
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def measure(name: str, microbatches: int, schedule: ScheduleKind, rounds: int) -> dict[str, float]:
    """The median seconds of each variant, measured in turns."""
    subject = subject_of(name)
    options = CompileOptions(
        stages=STAGES, microbatches=microbatches, schedule=schedule, validate=False
    )
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / f"{name}_m{microbatches}_{schedule.name.lower()}"
        compile_package(subject, options, package)
        variants = {
            "plain": plain(subject, 1),
            "accumulate": plain(subject, microbatches),
            "local": pipeline(package, subject.args[0], subject.target),
        }
        times: dict[str, list[float]] = {key: [] for key in (*variants, "torchrun")}
        for steps in variants.values():
            steps.seconds()
        with torchrun(package, name, rounds) as distributed:
            for index in range(rounds):
                times["torchrun"].append(distributed(index))
                for key, steps in variants.items():
                    times[key].append(steps.seconds())
    return {key: statistics.median(seconds) for key, seconds in times.items()}


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NETWORKS)}")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedule", type=ScheduleKind, default=ScheduleKind.ONE_F_ONE_B)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        worker(arguments.worker, arguments.names[0], arguments.rounds)
        return
    rows = []
    for name in arguments.names or NETWORKS:
        for microbatches in arguments.microbatches:
            times = measure(name, microbatches, arguments.schedule, arguments.rounds)
            ratios = [f"{times['plain'] / seconds:.2f}" for seconds in times.values()][1:]
            rows.append((name, microbatches, f"{times['plain'] * 1e3:.0f}", *ratios))
    print(f"{STAGES} stages, {arguments.schedule.value}; {machine()}\n")
    header = ("network", "M", "plain ms", "accumulate", "local", "torchrun")
    print(markdown(header, rows))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
