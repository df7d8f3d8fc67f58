"""What a step takes on this machine, from the stages of a written package, timed as they are.

The times of single ops leave out what happens between them and beside them: autograd's own work,
Python's, the engine's, another device that uses the same memory, caches and interpreter. So the
package times its stages (`runtime/train/stage_clock.py`), none waiting for another, and between
that messages, as they are sent in training; the schedule is simulated with these times. Nothing is
fitted to how long a step takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from gpipe_compiler.cluster import core_count
from gpipe_compiler.errors import ValidationError
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.devices import gpu_count
from gpipe_compiler.runtime.train.stage_times import MeasuredStages, StageSeconds
from gpipe_compiler.simulate.contention import simulate_sharing
from gpipe_compiler.simulate.step import StageTimes


class Start(Enum):
    """How a package is started: a thread for each device, or a process under torchrun."""

    THREADS = "threads"
    TORCHRUN = "torchrun"


def clocked(plan: Plan, directory: Path, progress: Callable[[str], None]) -> Plan:
    """The plan, with what its step takes on this machine.

    Under torchrun only where this machine has a core or a GPU for every process, and torchrun can
    be started.

    Args:
        directory: the package of the plan.
        progress: called with what is about to be done.

    Raises:
        ValidationError: when the package cannot be run.
    """
    devices = len(plan.orders)
    progress("timing the stages")
    threads_s = step_seconds(plan, time_stages(directory, devices, Start.THREADS))
    torchrun_s = None
    if 1 < devices <= _places():
        progress("timing the stages under torchrun")
        try:
            torchrun_s = step_seconds(plan, time_stages(directory, devices, Start.TORCHRUN))
        except ValidationError as error:
            progress(f"no prediction for torchrun: {error.problem.splitlines()[-1]}")
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


def time_stages(directory: Path, devices: int, start: Start) -> MeasuredStages:
    """The stages of a package, timed in processes of their own.

    Raises:
        ValidationError: when the package cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-clock-") as scratch:
        report = Path(scratch, "stages.json")
        words = ["bench", "--steps", "1", "--report", str(report)]
        command = [*start_command(directory / "run.py", devices, start), *words]
        finished = subprocess.run(command, check=False, capture_output=True, text=True)
        with contextlib.suppress(OSError):
            return MeasuredStages.from_json(report.read_text(encoding="utf-8"))
    raise ValidationError(
        f"the package cannot be timed in {start.value}: exit code {finished.returncode}\n"
        f"{finished.stderr.strip()}"
    )


def step_seconds(plan: Plan, found: MeasuredStages) -> float:
    """The step of a plan whose stages take the measured times, as `run.py bench` measures it:
    forward and backward of a mini-batch, without the optimizer."""
    alone, together = (_times(stages, found) for stages in (found.alone, found.together))
    return simulate_sharing(plan.orders, alone, together, plan.joint).step_s + found.around_s


def _times(stages: Sequence[StageSeconds], found: MeasuredStages) -> list[StageTimes]:
    return [
        _stage_times(seconds, receive_s, gradient_s)
        for seconds, receive_s, gradient_s in zip(
            stages, found.receive_s, found.gradient_s, strict=True
        )
    ]


def _stage_times(seconds: StageSeconds, receive_s: float, gradient_s: float) -> StageTimes:
    """Where every backward runs the forward again, that takes as long as the first one did."""
    backward_s = seconds.backward_s or max(0.0, seconds.again_s - seconds.forward_s)
    return StageTimes(
        seconds.forward_s,
        backward_s + seconds.weight_s,
        receive_s,
        gradient_s,
        max(0.0, seconds.again_s - backward_s) if seconds.again_s else 0.0,
        seconds.weight_s,
    )
