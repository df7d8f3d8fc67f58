"""Published throughputs of pipelines, and what they were run on: for `paper_tables.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from gpipe_compiler.cluster import Device, Link, built_in
from gpipe_compiler.cluster.catalogue import PCIE3
from gpipe_compiler.frontend.subject import Subject

sys.path.append(str(Path(__file__).parents[1] / "examples"))

TPU = Device("TPU v3 core", 61.5e12, 450e9, 16 * 10**9, 0.0)
"""Half of a chip's 123 TFLOP/s (bf16) and 900 GB/s; compiled programs launch no kernels."""
TPU_LINK = Link(70e9, 1e-6)
"""656 Gb/s a link of the chip's torus, about 70 GB/s of payload."""


class Recompute(Enum):
    """When a stage runs its forward again.

    EARLY: as soon as its device is free, without waiting for the gradient, for all micro-batches;
    so GPipe does (section 2.3). Our runtime does too, but not for a micro-batch whose backward
    follows at once.

    LATE: when the next stage has made the gradient, while that is copied; not for the last of
    several micro-batches (`except_last`). So torchgpipe must have done: its rows with one
    micro-batch are no faster on eight devices than on two, so nothing was hidden.
    """

    EARLY = "early"
    LATE = "late"


@dataclass(frozen=True)
class Row:
    """One published figure.

    Attributes:
        batch: samples of a mini-batch.
        balance: how many cells or layers each stage has; None where that is not published.
        published: throughput, relative to the table's first row.
        why: it is off, where that is known.
    """

    devices: int
    microbatches: int
    batch: int
    balance: tuple[int, ...] | None
    published: float
    why: str = ""

    @property
    def name(self) -> str:
        """As the papers call it."""
        return f"K={self.devices}, M={self.microbatches}"

    @property
    def size(self) -> int:
        """Samples of a micro-batch."""
        return -(-self.batch // self.microbatches)


@dataclass(frozen=True)
class Table:
    """A published table, and what its rows were run on.

    Attributes:
        depth: at which depth of module names its cells or layers stand.
        first: samples a second of the first row, where they are published.
    """

    title: str
    build: Callable[[], Subject]
    depth: int
    device: Device
    link: Link
    rows: tuple[Row, ...]
    recompute: Recompute
    first: float | None = None


def amoebanet() -> Subject:
    """AmoebaNet-D (18, 256) for 224 x 224 images, without numbers."""
    import amoebanet as example

    with torch.device("meta"):
        model = example.amoebanet_d(18, 256)
        inputs, target = torch.empty(4, 3, 224, 224), torch.empty(4).long()
    return Subject("AmoebaNet-D", model, (inputs,), target=target, loss_fn=example.loss_fn)


def transformer() -> Subject:
    """Transformer-48 without numbers."""
    import transformer_l as example

    model = example.build_model(layers=48)
    inputs, target = (make(batch=2).to("meta") for make in _batch_of(example))
    return Subject("Transformer-48", model, (inputs,), target=target, loss_fn=example.loss_fn)


def _batch_of(example: object) -> tuple[Callable[..., torch.Tensor], ...]:
    return example.example_inputs, example.example_target  # type: ignore[attr-defined]


_OWN_TABLE = "by its own K=4, M=32 with the same cut it should be 53/s instead of 44.5"
_MICROBATCHES = "rows with several micro-batches all come out fast: handling those takes time too"
TORCHGPIPE = Table(
    "torchgpipe, AmoebaNet-D (18, 256), P40",
    amoebanet,
    1,
    built_in("p40").device,
    PCIE3,
    (
        Row(2, 1, 96, (7, 17), 26.733 / 26.733),
        Row(2, 4, 256, (9, 15), 41.133 / 26.733),
        Row(2, 32, 1280, (9, 15), 47.386 / 26.733),
        Row(4, 1, 160, (3, 4, 5, 12), 26.827 / 26.733),
        Row(4, 4, 360, (3, 6, 7, 8), 44.543 / 26.733, _OWN_TABLE),
        Row(4, 32, 1152, (3, 6, 7, 8), 72.412 / 26.733, _MICROBATCHES),
        Row(8, 1, 196, (2, 2, 2, 2, 2, 3, 4, 7), 24.918 / 26.733),
        Row(8, 4, 480, (2, 2, 2, 3, 3, 4, 4, 4), 70.065 / 26.733),
        Row(8, 32, 1280, (2, 2, 2, 3, 3, 4, 4, 4), 132.413 / 26.733, _MICROBATCHES),
    ),
    Recompute.LATE,
    first=26.733,
)


def _untold(batch: int, published: Mapping[int, Sequence[float]]) -> tuple[Row, ...]:
    """Rows of a table that does not tell cuts: for every number of devices, M = 1, 4 and 32."""
    return tuple(
        Row(devices, microbatches, batch, None, figure)
        for devices, figures in published.items()
        for microbatches, figure in zip((1, 4, 32), figures, strict=True)
    )


GPIPE_AMOEBANET = Table(
    "GPipe Table 2, AmoebaNet-D (18, 256), TPU, batch assumed 128",
    amoebanet,
    1,
    TPU,
    TPU_LINK,
    _untold(128, {2: (1, 1.07, 1.21), 4: (1.13, 1.26, 1.84), 8: (1.38, 1.72, 3.48)}),
    Recompute.EARLY,
)
GPIPE_TRANSFORMER = Table(
    "GPipe Table 2, Transformer-48, TPU, batch assumed 32",
    transformer,
    2,
    TPU,
    TPU_LINK,
    _untold(32, {2: (1, 1.7, 1.8), 4: (1.07, 3.2, 3.4), 8: (1.3, 4.8, 6.3)}),
    Recompute.EARLY,
)
TABLES = {
    "torchgpipe": TORCHGPIPE,
    "amoebanet": GPIPE_AMOEBANET,
    "transformer": GPIPE_TRANSFORMER,
}
"""Every table by the name that a user types."""
