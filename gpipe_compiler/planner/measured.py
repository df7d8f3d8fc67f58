"""What a step of a written package takes on this machine: the package is run and timed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from gpipe_compiler.cluster import core_count
from gpipe_compiler.errors import ValidationError
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.devices import gpu_count


class Start(Enum):
    """How a package is started: a thread for each device, or a process under torchrun."""

    THREADS = "threads"
    TORCHRUN = "torchrun"


def clocked(plan: Plan, directory: Path, progress: Callable[[str], None]) -> Plan:
    """The plan, with what its step takes on this machine.

    Under torchrun only where this machine has a core or a GPU for every process, and torchrun can
    be started.

    Raises:
        ValidationError: when the package cannot be run.
    """
    devices = len(plan.orders)
    progress("timing the package")
    threads_s = time_step(directory, devices, Start.THREADS)
    torchrun_s = None
    if 1 < devices <= _places():
        progress("timing the package under torchrun")
        try:
            torchrun_s = time_step(directory, devices, Start.TORCHRUN)
        except ValidationError as error:
            progress(f"not timed under torchrun: {error.problem.splitlines()[-1]}")
    prediction = dataclasses.replace(plan.prediction, threads_s=threads_s, torchrun_s=torchrun_s)
    return dataclasses.replace(plan, prediction=prediction)


def _places() -> int:
    """How many processes can compute at once on this machine."""
    return gpu_count() or core_count()


def start_command(script: Path, devices: int, start: Start) -> list[str]:
    """How to start a script on this number of devices; its own arguments are to follow."""
    run = str(script)
    if start is Start.THREADS:
        return [sys.executable, run]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={devices}", run]


def time_step(directory: Path, devices: int, start: Start) -> float:
    """Seconds of a step of a package, as its own `run.py bench` finds them: forward and backward of
    a mini-batch, without the optimizer.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-clock-") as scratch:
        report = Path(scratch, "times.json")
        command = [*start_command(directory / "run.py", devices, start), "bench"]
        command += ["--report", str(report)]
        finished = subprocess.run(command, check=False, capture_output=True, text=True)
        with contextlib.suppress(OSError):
            return float(json.loads(report.read_text(encoding="utf-8"))["step_s"])
    raise ValidationError(
        f"the package cannot be timed in {start.value}: exit code {finished.returncode}\n"
        f"{finished.stderr.strip()}"
    )
