"""The Plan: which op runs in which stage, what crosses between stages, and what to expect.

A plan is data. It prints, it compares, and it goes to JSON and back; the graph it was made from
travels with it but is no part of the JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gpipe_compiler import __version__
from gpipe_compiler.cluster import Cluster, Device, is_host
from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.options import NO_CONSTRAINTS, Constraints
from gpipe_compiler.plan.fields import to_fields, typed
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.plan.stages import OpNote, Prediction, Stage, WhatIf, WholeModel, list_ops
from gpipe_compiler.runtime.schedule.actions import Orders, format_order, parse_order
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    Crossing,
    Precision,
    Remat,
    ScheduleKind,
    WeightSharding,
)
from gpipe_compiler.simulate.step import Simulation, StageTimes, simulate
from gpipe_compiler.text.escaping import shell_line

FORMAT = 3
"""The version of the JSON; a reader refuses any other."""


KEPT = 1.6
"""What a process that keeps freed memory takes at most, in shares of its tensors. glibc asks for 96
bytes more than it hands out where memory is aligned as torch's is (`_int_memalign`), so that a
freed block does not serve the next request of its size; of 20 packages none took more than 1.57."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The versions that made a plan, and the command; "" where they are not known.

    Attributes:
        compiler: the version of gpipe-compiler.
        command: as a shell takes it; "" for a plan that was made from Python.
    """

    compiler: str = ""
    torch: str = ""
    command: str = ""

    @classmethod
    def here(cls, words: Sequence[str] = ()) -> Origin:
        """This program, as it was called with some arguments.

        Absolute paths among them, which mean nothing elsewhere, are told from the current directory
        on, or by their last name where they are not below it.
        """
        command = shell_line(["gpipe-compile", *map(_portable, words)]) if words else ""
        return cls(__version__, torch.__version__, command)


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes that processes take on a host.

    Attributes:
        base: of each, before it holds a model.
        tensors: of each device, at most.
        keeps_freed: whether malloc keeps what is freed for the next micro-batch, which is faster:
            where all devices have the memory.
    """

    base: int
    tensors: tuple[int, ...]
    keeps_freed: bool


@dataclass(frozen=True)
class Plan:
    """A graph cut into stages, with a schedule and a prediction.

    Attributes:
        training: whether the package trains, or only infers.
        microbatches: of a mini-batch in each replica.
        batch_size: samples in the mini-batch planned for, of all replicas.
        orders: each device's compute actions.
        cost_source: how op times were found, in words.
        joint: the stages that take all micro-batches as one, for exact BatchNorm.
        placement: the device of the pipeline that each stage runs on; empty for one each.
        slots: for every device of the pipeline, its number in the cluster; empty where they are
            taken in order.
        frontier: the settings that were compared, where they were not given.
        precision: that which shapes, bytes and times are for.
        replicas: of the pipeline, which share every mini-batch.
        sharding: what they divide among them.
        what_if: what could be done about memory; None where nobody has asked.
        optimizer: whose memory and time count, in words; "" in inference and in older plans.
        cut_inside: the share of the best time with cuts anywhere that could be given for cuts which
            open fewer modules.
        opened: the modules that lie in several stages, of those that count (`cut.inside`).
        whole: what the same devices do without a pipeline: one alone, and all as replicas; empty
            where the plan itself has one device.
        calibration: by what op times of forwards and of backwards were scaled.
        sizes: dimensions of inputs that are free beside the batch, by name: those of the example,
            which everything here is for.
        tied: which op ties most of the work together, in words; "" where none does.
        noted: what stands in the JSON about each op, for people; see `ops`.
        origin: the program and the command that made it.
    """

    name: str
    stages: tuple[Stage, ...]
    crossings: tuple[Crossing, ...]
    schedule: ScheduleKind
    microbatches: int
    batch_size: int
    training: bool
    orders: Orders
    cluster: Cluster
    cost_source: str
    prediction: Prediction
    batchnorm: BatchNorm = BatchNorm.MICRO
    precision: Precision = Precision.FP32
    joint: tuple[int, ...] = ()
    placement: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    constraints: Constraints = NO_CONSTRAINTS
    frontier: Frontier | None = None
    replicas: int = 1
    sharding: WeightSharding = WeightSharding.NONE
    what_if: WhatIf | None = None
    optimizer: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    tied: str = ""
    cut_inside: float = 0.0
    opened: tuple[str, ...] = ()
    whole: tuple[WholeModel, ...] = ()
    calibration: tuple[float, float] = (1.0, 1.0)
    graph: Graph | None = field(default=None, compare=False, repr=False)
    noted: tuple[OpNote, ...] = field(default=(), compare=False, repr=False)
    origin: Origin = field(default_factory=Origin.here, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.fits:  # what is known of the best plan holds among those that fit
            unknown = dataclasses.replace(self.prediction, proved=False, lower_bound_s=0.0)
            object.__setattr__(self, "prediction", unknown)

    @property
    def known_graph(self) -> Graph:
        """The graph, which every plan has that was not read from JSON alone."""
        assert self.graph is not None
        return self.graph

    @property
    def fits(self) -> bool:
        """Whether every device holds what it takes at its peak, as far as that is known."""
        sizes = self.prediction.device_bytes
        return all(size <= d.memory for size, d in zip(sizes, self.devices, strict=False))

    def device_of(self, stage: int) -> int:
        """The number in the cluster of the device that a stage runs on."""
        place = self.placement[stage] if self.placement else stage
        return self.slots[place] if self.slots else place

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those of the pipeline, by rank."""
        count = len(self.orders)
        cluster = self.cluster.sized(count)
        return tuple(cluster.devices[slot] for slot in self.slots or range(count))

    @property
    def microbatch_size(self) -> int:
        return self.batch_size // (self.replicas * self.microbatches)

    @cached_property
    def process(self) -> ProcessMemory | None:
        """What its processes take on a host; None elsewhere, and where it is not known."""
        memory, devices = self.prediction.memory, self.devices
        if not memory or not all(is_host(each) and each.kept_free for each in devices):
            return None
        base = max(device.kept_free for device in devices)
        pairs = zip(memory, devices, strict=True)
        keeps = all(base + math.ceil(KEPT * held.reserved) <= one.memory for held, one in pairs)
        pairs = zip(memory, devices, strict=True)
        tensors = (
            math.ceil(KEPT * held.reserved) if keeps else one.needed(held.reserved) - one.kept_free
            for held, one in pairs
        )
        return ProcessMemory(base, tuple(tensors), keeps)

    @property
    def here_s(self) -> float:
        """Seconds of a mini-batch where the cluster's devices are: no less than one after another
        takes, where there are fewer places to compute than devices."""
        found, devices = self.prediction, len(self.orders) * self.replicas
        if self.cluster.places is None or devices <= self.cluster.places:
            return found.step_s
        busy_s = (1.0 - found.bubble) * found.step_s * devices
        return max(found.step_s, busy_s / self.cluster.places)

    @cached_property
    def ops(self) -> tuple[OpNote, ...]:
        """A note on every op, in order: from the graph, or from the JSON; none in older JSON."""
        if self.graph is None:
            return self.noted
        return list_ops(self.graph, self.microbatch_size)

    @cached_property
    def note_of(self) -> Mapping[str, OpNote]:
        """The same by the names of the ops."""
        return {note.name: note for note in self.ops}

    @uncollected()
    def to_json(self) -> str:
        written = {"orders": [format_order(order) for order in self.orders], "noted": self.ops}
        fields = {
            field.name: to_fields(written.get(field.name, getattr(self, field.name)))
            for field in dataclasses.fields(self)
            if field.name != "graph"
        }
        fields["prediction"] |= {"gap": self.prediction.gap, "here_s": self.here_s}
        if self.process is not None:
            fields["prediction"]["process"] = to_fields(self.process)
        return json.dumps({"format": FORMAT, **fields}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, graph: Graph | None = None) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ModelError: when the text is no plan, or one of another version.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields.pop("format")
            if version != FORMAT:
                raise ModelError(
                    f"the plan has format {version}, this program reads {FORMAT}",
                    hint="compile the package again with this version",
                )
            fields["prediction"].pop("gap")
            fields["prediction"].pop("here_s", None)
            fields.setdefault("origin", {})
            fields["prediction"].pop("process", None)
            orders = tuple(parse_order(order) for order in fields.pop("orders"))
            plan = cls(**typed(cls, fields), orders=orders, graph=graph)
            _check_whole(plan)
        except RecursionError:
            raise ModelError("this is no plan: lists within lists without end") from None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise ModelError(f"this is no plan: {type(error).__name__}: {error}") from error
        return plan

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.stages)} stages, {self.microbatches} micro-batches of "
            f"{self.microbatch_size}, {self.schedule.value}"
        )


def _check_whole(plan: Plan) -> None:
    """Makes sure that what a plan counts is there, and that its numbers name what there is."""
    stages, devices = len(plan.stages), len(plan.orders)
    known = {note.name for note in plan.noted}
    memory, prediction = plan.prediction.memory, plan.prediction
    places = plan.placement or tuple(range(stages))
    counts = (plan.microbatches, plan.replicas, plan.batch_size)
    faults = {
        "it has no stages": not stages,
        "its stages are not numbered in order": [s.index for s in plan.stages] != [*range(stages)],
        "a number is not above 0": min(counts) < 1,
        "its batch does not split": plan.batch_size % (plan.microbatches * plan.replicas) != 0,
        "its cluster has no devices, or such without memory": not plan.cluster.devices
        or min(device.memory for device in plan.cluster.devices) < 1,
        "its stages have no places": len(places) != stages or set(places) - set(range(devices)),
        "its devices have no slots": len(plan.slots) not in (0, devices)
        or (plan.slots and not 0 <= min(plan.slots) <= max(plan.slots) < len(plan.cluster.devices)),
        "a value crosses between stages that there are not": any(
            not 0 <= stage < stages
            for crossing in plan.crossings
            for stage in (crossing.source, *crossing.targets)
        ),
        "an action is of no stage or micro-batch": any(
            not (0 <= action.stage < stages and 0 <= action.microbatch < plan.microbatches)
            for order in plan.orders
            for action in order
        ),
        "its peaks are not those of its stages": len(prediction.peak_bytes) != stages,
        "its peaks are not those of its devices": len(prediction.device_bytes) not in (0, devices)
        or len(memory) not in (0, devices),
        "an op is not described": bool(known) and any(set(s.ops) - known for s in plan.stages),
        "a size or a time is below 0": min(
            *prediction.peak_bytes, *prediction.device_bytes, prediction.step_s, 0
        )
        < 0,
    }
    for fault, found in faults.items():
        if found:
            raise ValueError(fault)


def _portable(word: str) -> str:
    """An argument, or `--option=argument`, without an absolute path."""
    option, equals, text = word.rpartition("=")
    path = Path(text)
    if not path.is_absolute():
        return word
    home = Path.cwd()
    return f"{option}{equals}{path.relative_to(home) if path.is_relative_to(home) else path.name}"


# --- the simulated step ---------------------------------------------------------------------------


def timeline(plan: Plan) -> Simulation:
    return simulate(plan.orders, stage_times(plan), plan.joint)


def stage_times(plan: Plan) -> tuple[StageTimes, ...]:
    """For every stage, seconds of one micro-batch: computing, and moving what it receives."""
    cluster = plan.cluster

    def seconds(crossing: Crossing, target: int) -> float:
        ends = plan.device_of(crossing.source), plan.device_of(target)
        return cluster.between(*ends).seconds(crossing_bytes(crossing))

    times = []
    for stage in plan.stages:
        received = [c for c in plan.crossings if stage.index in c.targets]
        alone = StageTimes(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s if plan.training else 0.0,
            weight_s=stage.weight_s,
            update_s=stage.update_s,
            receive_s=sum(seconds(c, stage.index) for c in received),
            gradient_s=sum(
                seconds(c, stage.index) for c in received if c.gradient and plan.training
            ),
        )
        times.append(recomputing(stage, alone) if plan.training else alone)
    return tuple(times)


def recomputing(stage: Stage, times: StageTimes) -> StageTimes:
    """The times of a stage with what it runs again: segments when their backward has come."""
    return dataclasses.replace(
        times,
        backward_s=times.backward_s + stage.segments_s,
        recompute_s=stage.forward_s if stage.remat is Remat.FULL else 0.0,
    )


def crossing_bytes(crossing: Crossing) -> int:
    return torch.Size(crossing.example_shape).numel() * crossing.dtype.itemsize


# --- plans that are compared ---------------------------------------------------------------------


@dataclass(frozen=True)
class SweepPoint:
    """A plan for a number of devices, and for a size of mini-batch.

    Attributes:
        devices: of one replica of the pipeline.
        plan: None where there can be none, for the reason that `problem` is.
    """

    devices: int
    batch_size: int
    plan: Plan | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits
