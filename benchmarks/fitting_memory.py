"""Models of growing size, and the largest that fits devices of so much memory: for
`memory_tables.py`."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, Device
from gpipe_compiler.cluster.catalogue import PCIE3
from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import NO_CONSTRAINTS, Constraints, Policy, RematChoice
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.planner.memory_fit import choose_exactly
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.spec import OptimizerKind, ScheduleKind

sys.path.append(str(Path(__file__).parents[1] / "examples"))

BYTES_EACH = 12
"""Of a parameter, its gradient and what RMSProp remembers; as much as SGD with momentum."""

MEMORY = 8 * 10**9
"""Of a device, in GPipe's Table 1."""

SHARE = 40
"""Cuts take so many times less work than for a package."""


@dataclass(frozen=True)
class Sized:
    """A model of a size, with its mini-batch, without numbers.

    Attributes:
        name: of the size, as (18, 416).
        batch: samples of a mini-batch.
    """

    name: str
    model: nn.Module
    inputs: torch.Tensor
    target: torch.Tensor
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @property
    def parameters(self) -> int:
        """How many."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def batch(self) -> int:
        """Samples of a mini-batch."""
        return len(self.inputs)


def amoebanet(layers: int, filters: int, batch: int = 128) -> Sized:
    """AmoebaNet-D for 224 x 224 images."""
    import amoebanet as example

    with torch.device("meta"):
        model = example.amoebanet_d(layers, filters)
        images, labels = torch.empty(batch, 3, 224, 224), torch.empty(batch).long()
    return Sized(f"({layers}, {filters})", model, images, labels, example.loss_fn)


def transformer(layers: int, batch: int = 32) -> Sized:
    """Transformer-L for sequences of 1024 words."""
    import transformer_l as example

    inputs, target = example.example_inputs(batch), example.example_target(batch)
    model = example.build_model(layers=layers)
    return Sized(str(layers), model, inputs.to("meta"), target.to("meta"), example.loss_fn)


@dataclass(frozen=True)
class Fit:
    """What the devices of a plan take.

    Attributes:
        parameters: of the model.
        bytes: of every device at its peak.
        memory: that a device has.
    """

    name: str
    parameters: int
    bytes: tuple[int, ...]
    memory: int = MEMORY

    @property
    def fits(self) -> bool:
        """Whether no device takes more than it has."""
        return max(self.bytes) <= self.memory

    @property
    def activations(self) -> int:
        """Bytes of all devices, less those of parameters, gradients and optimizer."""
        return sum(self.bytes) - BYTES_EACH * self.parameters


def planned(
    sized: Sized,
    devices: int,
    *,
    microbatches: int,
    schedule: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    remat: RematChoice = RematChoice.AUTO,
    memory: int = MEMORY,
    balance: Sequence[int] = (),
) -> Fit:
    """The model in a pipeline over devices of so much memory, as this compiler plans it.

    What fits counts here, not how long a step takes: cuts take less work than for a package.

    Args:
        balance: how many of the model's parts each stage has; empty for our own cut.
    """
    subject = Subject(
        "model", sized.model, (sized.inputs,), target=sized.target, loss_fn=sized.loss_fn
    )
    graph = trace_mode(subject, training=True)
    device = Device("8 GB", 10e12, 500e9, memory, 0.0)
    policy = Policy(
        schedule=schedule, remat=remat, optimizer=OptimizerKind.MOMENTUM, cut_inside=0.0
    )
    planner = Planner(graph, Cluster.of(device, PCIE3), constraints=pinned(balance))
    choice = planner.choose(devices, microbatches, policy)
    found = choose_exactly(planner.builder(choice, policy, WORK // SHARE)).memory
    return Fit(sized.name, sized.parameters, tuple(device.peak for device in found), memory)


def pinned(balance: Sequence[int]) -> Constraints:
    """So many consecutive parts of a sequence in every stage."""
    stages = [stage for stage, parts in enumerate(balance) for _ in range(parts)]
    pins = tuple((str(part), stage) for part, stage in enumerate(stages))
    return Constraints(pins=pins) if pins else NO_CONSTRAINTS


def largest(
    sizes: Sequence[int], fit: Callable[[int], Fit], near: int = 0
) -> tuple[Fit | None, Fit | None]:
    """The last of growing sizes that fits, None where the first does not; and the next one, which
    does not, None where all fit.

    From a size that may be near it in steps twice as long each time, then by bisection.
    """
    found: Fit | None = None
    beyond: Fit | None = None
    low, high = 0, len(sizes)
    place = bisect.bisect_right(sizes, near) - 1 if near else high // 2
    step = 1 if near else high
    while low < high:
        place = min(max(place, low), high - 1)
        tried = fit(sizes[place])
        if tried.fits:
            found, low = tried, place + 1
            ahead = place + step
        else:
            beyond, high = tried, place
            ahead = place - step
        step *= 2
        place = ahead if low <= ahead < high else (low + high) // 2
    return found, beyond


def most_parameters(devices: int) -> int:
    """That so many devices hold, with nothing else."""
    return devices * MEMORY // BYTES_EACH
