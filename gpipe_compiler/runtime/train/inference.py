"""`run.py infer` and `run.py bench`: runs the model, and times its steps and stages."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.engine import DeviceResult, Engine
from ..core.options import execution_options
from ..core.pipeline import Pipeline
from ..core.ranks import together
from ..core.request import StepRequest
from ..core.topology import planned_placement
from ..core.transport import Endpoint
from ..core.weights import save_file
from ..core.wiring import ActionStep, StageWiring
from ..schedule.actions import Compute, Phase, Transfer
from .comparison import flat_tensors
from .data import InputChoice, call_on, samples_of
from .process import say


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


# --- the times of stages, seen while engines run whole steps --------------------------------------

WARM_UP = 3
"""Steps that do not count."""


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one micro-batch in one stage, beside whatever other devices do meanwhile.

    Attributes:
        backward_s: with the forward that is run again; where the schedule splits the backward,
            its first part.
        weight_s: the second part, where there is one.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0


def measure_stages(pipe: Pipeline, step: Callable[[], None], steps: int) -> list[StageSeconds]:
    """The stages of a pipeline; every rank calls it and gets all of them.

    Args:
        steps: of which the medians are taken.
    """
    execution = pipe.execution
    own = execution.engines
    engines = [_TimedEngine(engine) for engine in own]
    execution.engines = engines
    try:
        for turn in range(WARM_UP + steps):
            if turn == WARM_UP:
                for engine in engines:
                    engine.seconds.clear()
            step()
    finally:
        execution.engines = own
    mine = {stage: times for engine in engines for stage, times in engine.stages().items()}

    def joined(parts: Sequence[Mapping[int, StageSeconds]]) -> list[StageSeconds]:
        found = {stage: seconds for part in parts for stage, seconds in part.items()}
        return [found[stage] for stage in sorted(found)]

    return together(pipe.world, "measured times", lambda: mine, joined)


def stage_table(stages: Sequence[StageSeconds]) -> str:
    """One line a stage, in milliseconds of a micro-batch."""
    lines = ["stage  forward ms  backward ms  weight ms"]
    for index, one in enumerate(stages):
        forward, backward, weight = (
            f"{1e3 * seconds:.3g}" if seconds else ""
            for seconds in (one.forward_s, one.backward_s, one.weight_s)
        )
        lines.append(f"{index:5}  {forward:>10}  {backward:>11}  {weight:>9}".rstrip())
    return "\n".join(lines)


class _TimedEngine(Engine):
    """An engine that notes how long each micro-batch is in a stage, waiting left out."""

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self.seconds: dict[tuple[int, Phase], list[float]] = defaultdict(list)

    def run(
        self,
        steps: Sequence[ActionStep],
        wiring: Sequence[StageWiring],
        request: StepRequest,
        endpoint: Endpoint,
        ended: Callable[[int], None] | None = None,
    ) -> DeviceResult:
        waits = _Waits(endpoint, self.device)
        timed = _TimedProgram(steps, waits)
        found = super().run(timed, wiring, request, waits, ended)
        for step, seconds in zip(steps, timed.seconds, strict=True):
            if isinstance(step.action, Compute):
                # A joint stage takes all micro-batches at once.
                joint = wiring[step.action.stage].joint is not None
                share = seconds / (request.microbatches if joint else 1)
                self.seconds[step.action.stage, step.action.phase].append(share)
        return found

    def stages(self) -> dict[int, StageSeconds]:
        medians = {key: statistics.median(each) for key, each in self.seconds.items()}
        phases = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT
        return {
            stage: StageSeconds(*(medians.get((stage, phase), 0.0) for phase in phases))
            for stage in self.modules
        }


class _Waits:
    """An endpoint that counts the seconds in which a device waits for values."""

    def __init__(self, endpoint: Endpoint, device: torch.device) -> None:
        self.seconds = 0.0
        self.device = device
        self.send, self.expect = endpoint.send, endpoint.expect
        self.exchange, self.flush = endpoint.exchange, endpoint.flush
        self._take = endpoint.take

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        self.settle()
        start = time.perf_counter()
        tensor = self._take(transfer)
        self.settle()
        self.seconds += time.perf_counter() - start
        return tensor

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _TimedProgram(list[ActionStep]):
    """A program that notes the seconds at each of its steps, without those of waiting."""

    def __init__(self, steps: Sequence[ActionStep], waits: _Waits) -> None:
        super().__init__(steps)
        self._waits = waits
        self.seconds: list[float] = []

    def __iter__(self) -> Iterator[ActionStep]:
        self.seconds = []
        for step in super().__iter__():
            start, waited = time.perf_counter(), self._waits.seconds
            yield step
            self._waits.settle()
            waited = self._waits.seconds - waited
            self.seconds.append(time.perf_counter() - start - waited)
