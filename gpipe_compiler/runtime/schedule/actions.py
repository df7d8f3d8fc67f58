"""What a device does: computing, and passing on boundary values; how it prints and parses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ..sizes import Shape, Sizes, example_shape, shape_at

if TYPE_CHECKING:
    import torch


class Phase(Enum):
    """The part of a stage's work.

    Where a schedule gives a stage WEIGHT actions, its BACKWARD makes the gradients of what it
    received, and WEIGHT those of its parameters, at any later time; elsewhere BACKWARD makes both.
    """

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"

    # Enum's own is a call of Python code, and schedules look up actions by the million.
    __hash__ = object.__hash__


_COMPUTE = re.compile(r"(\d+)([FBW])(\d+)")


class Compute(NamedTuple):
    """One part of one stage's work on one micro-batch; prints as `2F0`."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Compute:
        """The action that prints as `text`.

        Raises:
            ValueError: when no action prints so.
        """
        match = _COMPUTE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no action: expected stage, F, B or W, micro-batch (2F0)")
        return cls(int(match[1]), Phase(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Crossing:
    """A boundary value: made in one stage, used in later ones.

    An input of the pipeline that later stages use is a crossing from stage 0.

    Attributes:
        shape: that of one micro-batch of `PipelineSpec.microbatch_size` samples.
        batch_dim: the dimension that grows in proportion to the micro-batch, None if none does.
        gradient: whether a gradient comes back from every target.
    """

    value: str
    source: int
    targets: tuple[int, ...]
    shape: Shape
    dtype: torch.dtype
    batch_dim: int | None = 0
    gradient: bool = True

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of one micro-batch as the package was compiled."""
        return example_shape(self.shape)

    def shape_for(self, samples: int, microbatch_size: int, sizes: Sizes) -> tuple[int, ...]:
        """The shape in a micro-batch.

        Args:
            microbatch_size: the samples that `shape` is for.
        """
        shape = list(shape_at(self.shape, sizes))
        if self.batch_dim is not None:
            shape[self.batch_dim] = shape[self.batch_dim] * samples // microbatch_size
        return tuple(shape)


class Transfer(NamedTuple):
    """A boundary value of one micro-batch on its way from stage to stage.

    `gradient` marks the gradient of the value, which runs the other way: its source is the stage
    that used the value, its target the stage that made it.
    """

    value: str
    microbatch: int
    source: int
    target: int
    gradient: bool = False

    def __str__(self) -> str:
        mark = "'" if self.gradient else ""
        return f"{self.value}{mark}[{self.microbatch}] {self.source}>{self.target}"


@dataclass(frozen=True, slots=True)
class Send:
    """The sending half of a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """The receiving half of a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"receive {self.transfer}"


@dataclass(frozen=True, slots=True)
class SharedSum:
    """The gradients of a parameter that several stages own become their sum, on every owner.

    A step that the devices of all owners take together.
    """

    parameter: str
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return f"sum {self.parameter} over {','.join(map(str, self.stages))}"


Action = Compute | Send | Receive | SharedSum

Orders = tuple[tuple[Compute, ...], ...]
"""For every device, its compute actions in order: what a schedule is."""

Programs = tuple[tuple[Action, ...], ...]
"""For every device, all its actions in order: a schedule after lowering."""


def parse_order(text: str) -> tuple[Compute, ...]:
    """The actions of one device from their printed form, separated by white space."""
    return tuple(Compute.parse(word) for word in text.split())


def format_order(order: Iterable[Compute]) -> str:
    return " ".join(map(str, order))


def split_stages(orders: Orders) -> frozenset[int]:
    """The stages whose backward is in two parts."""
    return frozenset(a.stage for order in orders for a in order if a.phase is Phase.WEIGHT)
