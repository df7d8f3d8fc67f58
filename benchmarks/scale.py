"""How long a dry run takes, and how much memory, for models far larger than this machine.

    python benchmarks/scale.py [NAME ...]

Each plan is made in a process of its own, with its weights nowhere. The columns: seconds on the
clock, seconds of the processor (all threads of the process), and the largest resident set so far.
A machine that is busy with other things shows in the first column only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tables import machine, markdown

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Size:
    """A model, and how it is cut."""

    model: str
    stages: int
    microbatches: int


SIZES = {
    "transformer-13": Size("transformer_l.py:transformer_13", 4, 32),
    "transformer-103": Size("transformer_l.py:transformer_103", 16, 64),
    "transformer-415": Size("transformer_l.py:transformer_415", 64, 128),
    "transformer-1663": Size("transformer_l.py:transformer_1663", 128, 256),
    "one-trillion": Size("transformer_1t.py", 512, 1024),
}


class Clock:
    """Seconds, processor seconds and peak bytes at every report of progress."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float, float, float]] = []
        self._name = "importing"
        self._begun = self._now()

    def __call__(self, name: str) -> None:
        """A step ends and the next begins."""
        wall, processor = self._now()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.steps.append((self._name, wall - self._begun[0], processor - self._begun[1], peak))
        self._name, self._begun = name, (wall, processor)

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def one(size: Size) -> list[tuple[str, float, float, float]]:
    """The steps of one dry run, in this process."""
    clock = Clock()
    from gpipe_compiler.cluster import Cluster, Device, Link
    from gpipe_compiler.compile import CompileOptions
    from gpipe_compiler.compile import compile as compile_package
    from gpipe_compiler.frontend.source import load
    from gpipe_compiler.report.text import format_plan
    from gpipe_compiler.runtime.spec import ScheduleKind

    clock("loading")
    subject = load(str(EXAMPLES / size.model))
    # Without recomputing the largest models exceed this memory, so the limit is searched as well.
    device = Device("80 GB, 100 TFLOP/s", 100e12, 2e12, 80 * 10**9, 5e-6)
    options = CompileOptions(
        stages=size.stages,
        microbatches=size.microbatches,
        schedule=ScheduleKind.ONE_F_ONE_B,
        cluster=Cluster.of(device, Link(25e9, 5e-6)),
    )
    made = compile_package(subject, options, None, progress=clock)
    clock("plan.json")
    made.plan.to_json()
    clock("report")
    format_plan(made.plan)
    clock("")
    return clock.steps


def in_a_process(name: str) -> list[tuple[str, float, float, float]]:
    """The same, in a process of its own."""
    environment = {"OMP_NUM_THREADS": "2", **os.environ}
    command = [sys.executable, __file__, "--one", name]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{name} failed: {last}", file=sys.stderr)
        return []
    steps: list[tuple[str, float, float, float]] = json.loads(result.stdout.splitlines()[-1])
    return steps


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(SIZES[arguments.one])))
        return
    rows = []
    for name in arguments.names or SIZES:
        size = SIZES[name]
        label = f"{name}, K = {size.stages}, M = {size.microbatches}"
        steps = in_a_process(name)
        rows += [(label, *_cells(step)) for step in steps]
        if steps:
            total = (sum(s[1] for s in steps), sum(s[2] for s in steps), max(s[3] for s in steps))
            rows.append((label, *_cells(("all", *total))))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{machine()}; load {load}\n")
    print(markdown(("plan", "step", "seconds", "processor s", "peak GB"), rows))


def _cells(step: tuple[str, float, float, float]) -> tuple[str, str, str, str]:
    return step[0], f"{step[1]:.1f}", f"{step[2]:.1f}", f"{step[3] / 1e9:.2f}"


if __name__ == "__main__":
    main()
