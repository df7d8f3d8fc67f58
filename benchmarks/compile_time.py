"""How long each step of a compile takes, and how much memory, for the examples.

    python benchmarks/compile_time.py [--stages 4] [--no-validate] [--repeat 1] [NAME ...]

Each compile runs in a process of its own. A step is what the compiler reports as one; its peak is
the largest resident set seen while it lasts, the interpreter and PyTorch (some 250 MB) included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import machine, markdown

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = (
    "mlp_digits",
    "alexnet",
    "resnet50",
    "unet",
    "transformer",
    "transformer_1_3b",
    "gpt2_huggingface",
    "inception",
    "inputs",
)


class Clock:
    """Seconds and peak memory between one report of progress and the next."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, float, float]] = []
        self._name = "load"
        self._begin()

    def __call__(self, name: str) -> None:
        """A step ends and the next begins; every file that is written counts to one of them."""
        name = "writing" if name.startswith("writing") else name.partition(" ")[0]
        if name == self._name:
            return
        self.steps.append((self._name, time.perf_counter() - self._start, _peak_bytes() / 1e6))
        self._name = name
        self._begin()

    def _begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self._start = time.perf_counter()


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel does not tell the peak of the resident set")


def one(name: str, stages: int, validate: bool) -> list[tuple[str, float, float]]:
    """The steps of one compile, in this process."""
    from gpipe_compiler.compile import CompileOptions
    from gpipe_compiler.compile import compile as compile_package
    from gpipe_compiler.frontend.source import load

    clock = Clock()
    subject = load(str(EXAMPLES / f"{name}.py"))
    options = CompileOptions(stages=stages, validate=validate)
    with tempfile.TemporaryDirectory() as folder:
        compile_package(subject, options, Path(folder) / "package", progress=clock)
        clock("")
    return clock.steps


def measured(name: str, arguments: argparse.Namespace) -> list[tuple[str, float, float]]:
    """The steps of `repeat` compiles, each in a process of its own: median times, highest peaks."""
    runs = []
    for _ in range(arguments.repeat):
        command = [sys.executable, __file__, "--one", name, "--stages", str(arguments.stages)]
        if not arguments.validate:
            command.append("--no-validate")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            print(f"{name} failed: {last}", file=sys.stderr)
            return []
        runs.append(json.loads(result.stdout.splitlines()[-1]))
    return [
        (steps[0][0], statistics.median(s[1] for s in steps), max(s[2] for s in steps))
        for steps in zip(*runs, strict=True)
    ]


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--no-validate", dest="validate", action="store_false")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.stages, arguments.validate)))
        return
    rows = []
    for name in arguments.names or NAMES:
        steps = measured(name, arguments)
        rows += [(name, *_cells(step)) for step in steps]
        if steps:
            total = (sum(s[1] for s in steps), max(s[2] for s in steps))
            rows.append((name, *_cells(("all", *total))))
    print(f"{arguments.stages} stages; {machine()}\n")
    print(markdown(("example", "step", "seconds", "peak MB"), rows))


def _cells(step: tuple[str, float, float]) -> tuple[str, str, str]:
    return step[0], f"{step[1]:.2f}", f"{step[2]:.0f}"


if __name__ == "__main__":
    main()
