"""`run.py infer` and `run.py bench`: runs the model, and times its steps and stages."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from ..core.pipeline import Pipeline
from ..core.weights import save_file
from .comparison import flat_tensors
from .data import InputChoice, call_on, counts_of
from .process import say
from .stage_times import WARM_UP, measure_stages
from .told import Told, format_time, stage_table, told_lines, write_calibration


def infer(pipe: Pipeline, directory: Path, choice: InputChoice, output: Path | None) -> None:
    """Run the model, print its outputs' shapes, and save them where a file is named."""
    pipe.eval()
    inputs: object = None
    if pipe.rank == 0:
        inputs = call_on(pipe.spec, directory, choice)[0]
    outputs = flat_tensors(pipe(inputs))
    if pipe.rank != 0:
        return
    for name, tensor in outputs.items():
        say(f"{name}: {'x'.join(map(str, tensor.shape)) or 'scalar'} {_dtype(tensor)}")
    if output is not None:
        save_file(outputs, output)
        say(f"outputs saved to {output}")


def bench(
    pipe: Pipeline,
    directory: Path,
    choice: InputChoice,
    steps: int,
    report: Path | None = None,
    *,
    stages: bool = False,
    calibration: Path | None = None,
) -> None:
    """Time steps (or inference, where there is no loss), and compare with the plan.

    Args:
        report: JSON to write with the times.
        stages: whether to time each stage, too.
        calibration: JSON to write for the compiler, with what stages took over what was
            told; they are timed for it.
    """
    inputs, target = call_on(pipe.spec, directory, choice) if pipe.rank == 0 else (None, None)

    def once() -> None:
        if pipe.spec.loss is None:
            pipe(inputs)
        else:
            pipe.zero_grad()
            pipe.step(inputs, target).item()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    seconds = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    timed = measure_stages(pipe, once, steps) if stages or calibration else []
    if pipe.rank != 0:
        return
    samples, _ = counts_of(pipe.spec, pipe.microbatches, inputs, target)
    sizes = {size.name: size.example for size in pipe.spec.sizes} | {**choice.sizes}
    planned = all(size.example == sizes[size.name] for size in pipe.spec.sizes)
    told = Told.of(pipe, directory, samples) if planned else None
    _print_steps(pipe, seconds[WARM_UP:], samples, sizes)
    median = statistics.median(seconds[WARM_UP:])
    if timed:
        print(stage_table(timed, told.stages if told else ()))
    if told is not None:
        for line in told_lines(pipe, told, median, timed):
            print(line)
    if report is not None:
        times = {"step_s": median, "stages": [dataclasses.asdict(stage) for stage in timed]}
        report.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
    if calibration is not None:
        write_calibration(calibration, told, timed, pipe.spec.name)
        what = f"gpipe-compile --calibration {calibration} plans with it"
        say(f"calibration written to {calibration}; {what}")


def _print_steps(
    pipe: Pipeline, measured: list[float], samples: int, sizes: Mapping[str, int]
) -> None:
    median = statistics.median(measured)
    what = "inference" if pipe.spec.loss is None else "step"
    if sizes:
        what += " at " + ", ".join(f"{name}={size}" for name, size in sizes.items())
    fastest = format_time(min(measured))
    print(
        f"{what}: median {format_time(median)} of {len(measured)}, fastest {fastest}, "
        f"{samples / median:.1f} samples/s"
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
