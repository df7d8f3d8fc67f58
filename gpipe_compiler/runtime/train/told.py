"""The step time and memory that the plan predicts, beside what was measured."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.options import execution_options
from ..core.pipeline import Pipeline
from ..core.topology import planned_placement
from ..errors import UsageError
from ..spec import PipelineSpec
from .process import resident
from .stage_times import StageSeconds

CLOSE = 1.25
"""Times that differ by a smaller factor were predicted well."""

_MB = 1e6


@dataclass(frozen=True)
class Peak:
    """The arithmetic of a mini-batch, held against what the plan's devices do at most.

    Attributes:
        step_s: seconds of its products, convolutions and attention, if all devices of a replica did
            them at their peak and never waited.
        device: the name of each device.
    """

    step_s: float
    device: str

    @classmethod
    def read(cls, plan: Mapping[str, Any]) -> Peak | None:
        """That of a plan, where it says, and all devices are equal."""
        seconds = sum(float(stage.get("arithmetic_s", 0.0)) for stage in plan.get("stages", ()))
        known = plan.get("cluster", {}).get("devices", ())
        slots = dict.fromkeys(plan.get("slots", ()))
        names = {str(known[slot]["name"]) for slot in slots if slot < len(known)}
        if not seconds or len(names) != 1:
            return None
        return cls(int(plan["microbatches"]) * seconds / len(slots), names.pop())

    def is_of(self, gpu: str) -> bool:
        """Whether a GPU that PyTorch calls so is one of these."""
        own, there = (set(re.findall(r"[A-Z0-9]+", text.upper())) for text in (self.device, gpu))
        return own <= there and not (there - own) & _OTHER_KINDS


_OTHER_KINDS = {"PCIE", "NVL", "TI", "SUPER", "LAPTOP", "MOBILE", "D"}
"""Words after the name of a GPU by which it has other figures."""


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What a plan raises that is not there, or is none; a package without its plan still runs."""


def _plan_in(directory: Path) -> Any:
    return json.loads((directory / "plan.json").read_text(encoding="utf-8"))


def planned_samples(spec: PipelineSpec) -> int:
    return spec.microbatches * spec.microbatch_size


def planned_to_give_back(directory: Path) -> bool:
    """Whether the plan of a package has memory for its tensors, but not for freed ones too."""
    try:
        process = _plan_in(directory)["prediction"].get("process")
        return process is not None and not process["keeps_freed"]
    except _UNREADABLE:
        return False


@dataclass(frozen=True)
class Told:
    """The prediction in the plan of a package.

    Attributes:
        step_s: of a step, in the way that `what` names.
        stages: of each; empty where the plan does not say.
        peak_bytes: tensors of every device, and what its allocator reserves, at most.
        bubble: the share of device time that is spent waiting; None where the plan does not say.
        peak: what its devices compute at most; None where it does not say, or they are unequal.
        process: bytes of a process on a host before it holds a model, and of the tensors of each
            device at most; None where the plan does not say.
        calibration: by which the forwards and backwards of its costs were scaled already.
    """

    what: str
    step_s: float
    stages: tuple[StageSeconds, ...] = ()
    peak_bytes: tuple[tuple[int, int], ...] = ()
    calibration: tuple[float, float] = (1.0, 1.0)
    bubble: float | None = None
    peak: Peak | None = None
    process: tuple[int, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, pipe: Pipeline, directory: Path, samples: int) -> Told | None:
        """That of this run; None where another one was planned, or nothing can be read.

        Of the step, what was measured when the package was written, where it was started in
        this way; else what was predicted.
        """
        spec = pipe.spec
        here = pipe.microbatches, pipe.schedule, pipe.placement, pipe.options, samples
        if pipe.replicas == spec.replicas and pipe.sharding is not spec.sharding:
            return None
        planned = spec.microbatches, spec.schedule, planned_placement(spec)
        options = execution_options(spec, None, None, None)
        if here != (*planned, options, planned_samples(spec)):
            return None
        try:
            return cls._read(_plan_in(directory), alone=pipe.world.size == 1)
        except _UNREADABLE:
            return None

    @classmethod
    def _read(cls, plan: Mapping[str, Any], *, alone: bool) -> Told:
        prediction = plan["prediction"]
        timed = prediction.get("threads_s" if alone else "torchrun_s")
        expected = float(prediction.get("here_s", prediction["step_s"]))
        memory = prediction.get("memory", ())
        forward, backward = plan.get("calibration", (1.0, 1.0))
        bubble, process = prediction.get("bubble"), prediction.get("process")
        return cls(
            "predicted" if timed is None else "when it was compiled",
            expected if timed is None else float(timed),
            tuple(map(_stage, plan.get("stages", ()))),
            tuple((int(d["peak"]), int(d.get("reserved", 0))) for d in memory),
            (float(forward), float(backward)),
            None if bubble is None else float(bubble),
            Peak.read(plan),
            process and (int(process["base"]), tuple(map(int, process["tensors"]))),
        )

    def numbers(
        self, seconds: float, devices: Collection[str], minibatches: int = 1
    ) -> dict[str, float]:
        """What it says of a step that took so long on devices that PyTorch calls so."""
        found = {} if self.bubble is None else {"planned_bubble": self.bubble}
        if self.peak is not None and all(map(self.peak.is_of, devices)):
            found["mfu"] = minibatches * self.peak.step_s / seconds
        return found


def _stage(stage: Mapping[str, Any]) -> StageSeconds:
    weight_s = float(stage["weight_s"])
    again_s = float(stage["forward_s"]) if stage["remat"] == "full" else 0.0
    again_s += float(stage.get("segments_s", 0.0))
    return StageSeconds(
        float(stage["forward_s"]),
        float(stage["backward_s"]) - weight_s + again_s,
        weight_s,
    )


def told_lines(
    pipe: Pipeline, told: Told, step_s: float, stages: Sequence[StageSeconds] = ()
) -> list[str]:
    """Lines for the terminal: the predicted step time and memory, beside what was measured."""
    ratio = step_s / told.step_s
    reason = likely_reason(told, step_s, stages)
    engines = pipe.execution.engines
    own = {pipe.placement[stage]: e.device for e in engines for stage in e.modules}
    return [
        f"{told.what} {format_time(told.step_s)}: {ratio:.2f} times that was measured",
        *([f"  {reason}"] if reason else []),
        *memory_lines(told, own),
    ]


def format_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def stage_table(stages: Sequence[StageSeconds], told: Sequence[StageSeconds] = ()) -> str:
    """One line a stage, in milliseconds of a micro-batch; with the prediction in brackets."""
    lines = ["stage  forward ms  backward ms  weight ms"]
    for index, one in enumerate(stages):
        other = told[index] if len(told) == len(stages) else None
        forward, backward, weight = (
            f"{1e3 * seconds:.3g}" if seconds else "" for seconds in dataclasses.astuple(one)
        )
        line = f"{index:5}  {forward:>10}  {backward:>11}  {weight:>9}".rstrip()
        if other is not None:
            # What splits no backward is told as one.
            split = dataclasses.astuple(other) if one.weight_s else _joined(other)
            figures = (f"{1e3 * seconds:.3g}" for seconds in split if seconds)
            line = f"{line:42}  (told {', '.join(figures)})"
        lines.append(line)
    return "\n".join(lines)


def _joined(stage: StageSeconds) -> tuple[float, float]:
    return stage.forward_s, stage.backward_s + stage.weight_s


def likely_reason(told: Told, step_s: float, stages: Sequence[StageSeconds]) -> str:
    """Why a step took longer or shorter than predicted, as far as its stages show; "" if it
    did not."""
    if 1 / CLOSE <= step_s / told.step_s <= CLOSE:
        return ""
    ratios = _ratios(told, stages)
    if ratios is None:
        return "run.py bench --stages shows whether computing or waiting is off"
    measured, expected = (sum(map(sum, map(_joined, each))) for each in (stages, told.stages))
    if expected and not 1 / CLOSE <= measured / expected <= CLOSE:
        return (
            f"stages compute for {measured / expected:.2f} times what was told: estimates "
            "know neither small kernels nor Python; gpipe-compile --cost measured times "
            "the ops, and bench --calibrate FILE lets the next plan know"
        )
    return (
        "stages compute for as long as was told: what is off is transfers, and waiting "
        "for one another or for a place to compute"
    )


def _ratios(told: Told, stages: Sequence[StageSeconds]) -> tuple[float, float] | None:
    """By what factors forwards and backwards took longer than predicted; None where unknown."""
    if not stages or len(stages) != len(told.stages):
        return None
    sums = [
        [sum(parts) for parts in zip(*map(_joined, each), strict=True)]
        for each in (stages, told.stages)
    ]
    (forward, backward), (forward_told, backward_told) = sums
    if not forward or not forward_told:
        return None
    found = forward / forward_told
    return found, backward / backward_told if backward_told and backward else found


def write_calibration(
    file: Path, told: Told | None, stages: Sequence[StageSeconds], name: str
) -> None:
    """Writes a file for `gpipe-compile --calibration`.

    Raises:
        UsageError: where the plan says nothing of this run.
    """
    ratios = None if told is None else _ratios(told, stages)
    if told is None or ratios is None:
        raise UsageError(
            "there is nothing to calibrate by: this run is not the one that was planned, or "
            "the package has no plan.json",
            hint="run it with the planned batch, micro-batches, schedule and devices",
        )
    forward, backward = (
        ratio * before for ratio, before in zip(ratios, told.calibration, strict=True)
    )
    found = {"forward": forward, "backward": backward, "measured": name}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def memory_lines(told: Told, devices: Mapping[int, torch.device]) -> list[str]:
    """The peak of memory, beside the predicted one.

    Of GPUs what PyTorch's allocator says, of the processor the resident memory of this
    process, in which Python and torch are.

    Args:
        devices: by rank of the pipeline, those of this process.
    """
    lines = []
    on_host = [rank for rank, device in devices.items() if device.type != "cuda"]
    for rank, device in devices.items():
        if device.type == "cuda" and rank < len(told.peak_bytes):
            peak, reserved = told.peak_bytes[rank]
            allocated = torch.cuda.max_memory_allocated(device)
            taken = torch.cuda.max_memory_reserved(device)
            lines.append(
                f"device {rank}: {allocated / _MB:,.0f} MB allocated (told {peak / _MB:,.0f}), "
                f"{taken / _MB:,.0f} MB reserved (told {reserved / _MB:,.0f})"
            )
    if on_host and len(told.peak_bytes) > max(on_host):
        words = f"told {sum(told.peak_bytes[rank][0] for rank in on_host) / _MB:,.0f} MB of tensors"
        if told.process is not None:
            base, tensors = told.process
            most = base + sum(tensors[rank] for rank in on_host)
            words = f"told at most {most / _MB:,.0f}, {words.removeprefix('told ')}"
        lines.append(
            f"memory of the process: {resident() / _MB:,.0f} MB at most, with Python and "
            f"torch; {words}"
        )
    return lines
