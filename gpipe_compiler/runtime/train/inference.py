"""`run.py infer` and `run.py bench`: runs the model, and times its steps and stages."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch

from ..core.options import execution_options
from ..core.pipeline import Pipeline
from ..core.topology import planned_placement
from ..core.weights import save_file
from .comparison import flat_tensors
from .data import InputChoice, call_on, samples_of
from .process import say
from .stage_times import WARM_UP, StageSeconds, measure_stages, stage_table


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
) -> None:
    """Time steps (or inference, where there is no loss).

    Args:
        report: JSON to write.
        stages: whether to time each stage, too.
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
    timed = measure_stages(pipe, once, steps) if stages else []
    if pipe.rank != 0:
        return
    samples = samples_of(pipe.spec, pipe.microbatches, inputs, target)
    _print_steps(pipe, directory, choice, seconds[WARM_UP:], samples)
    if stages:
        print(stage_table(timed))
    if report is not None:
        _write_times(report, statistics.median(seconds[WARM_UP:]), timed)


def _print_steps(
    pipe: Pipeline, directory: Path, choice: InputChoice, measured: list[float], samples: int
) -> None:
    median = statistics.median(measured)
    what = "inference" if pipe.spec.loss is None else "step"
    sizes = {size.name: size.example for size in pipe.spec.sizes} | {**choice.sizes}
    if sizes:
        what += " at " + ", ".join(f"{name}={size}" for name, size in sizes.items())
    print(
        f"{what}: median {_time(median)} of {len(measured)}, fastest {_time(min(measured))}, "
        f"{samples / median:.1f} samples/s"
    )
    planned = all(size.example == sizes[size.name] for size in pipe.spec.sizes)
    for what, seconds in _known(pipe, directory, samples).items() if planned else ():
        print(f"{what} {_time(seconds)}: {median / seconds:.2f} times that was measured")


def _write_times(report: Path, step_s: float, stages: list[StageSeconds]) -> None:
    times = {"step_s": step_s, "stages": [dataclasses.asdict(stage) for stage in stages]}
    report.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")


def _known(pipe: Pipeline, directory: Path, samples: int) -> dict[str, float]:
    """What the plan says of a step, where this run is the one that was planned.

    What was measured when the package was written, where it was started in this way.
    """
    spec = pipe.spec
    here = pipe.microbatches, pipe.schedule, pipe.placement, pipe.options, samples
    planned = spec.microbatches, spec.schedule, planned_placement(spec)
    whole = spec.microbatches * spec.microbatch_size
    if here != (*planned, execution_options(spec, None, None, None), whole):
        return {}
    try:
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        prediction = plan["prediction"]
        timed = prediction.get("threads_s" if pipe.world.size == 1 else "torchrun_s")
        if timed is not None:
            return {"when it was compiled": float(timed)}
        return {"predicted": float(prediction.get("here_s", prediction["step_s"]))}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}  # a package without its plan still runs


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
