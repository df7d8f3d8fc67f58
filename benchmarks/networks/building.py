"""A network written down op by op: its layers, and what each costs on a roofline."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_compiler.graph_json.file import BareGraph, BareOp

FLOPS = 10e12
BANDWIDTH = 350e9
LAUNCH_S = 4e-6
BYTES = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """The output of an op: numbers of one sample, as channels, height and width, or alike."""

    op: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


class Network:
    """A graph while it is written down."""

    def __init__(self, name: str, batch: int) -> None:
        self.name = name
        self.batch = batch
        self.ops: list[BareOp] = []
        self.edges: list[tuple[str, str]] = []
        self._random = random.Random(name)
        self._first = True

    def graph(self) -> BareGraph:
        """What has been written."""
        return BareGraph(tuple(self.ops), tuple(self.edges), self.name)

    def op(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        shape: tuple[int, ...],
        *,
        flops: float = 0.0,
        parameters: int = 0,
        free: bool = False,
    ) -> Tensor:
        """One op; `flops` are those of one sample, forward.

        Args:
            free: it takes no time, as a view does.
        """
        name = f"{kind}_{len(self.ops)}"
        size = math.prod(shape)
        moved = BYTES * (self.batch * (size + sum(t.size for t in inputs)) + parameters)
        forward = max(LAUNCH_S, self.batch * flops / FLOPS, moved / BANDWIDTH)
        # Backward a product is two products; other ops read and write about as much again.
        backward = forward * (2.0 if flops and inputs else 1.0 if flops else 1.2)
        scatter = self._random.uniform(0.85, 1.25)
        self.ops.append(
            BareOp(
                name,
                0.0 if free else forward * scatter,
                0.0 if free else backward * scatter * self._random.uniform(0.95, 1.1),
                BYTES * self.batch * size,
                BYTES * parameters,
                0 if free else BYTES * self.batch * size,
            )
        )
        self.edges.extend(dict.fromkeys((source.op, name) for source in inputs))
        return Tensor(name, shape)

    # --- layers ------------------------------------------------------------------------------

    def input(self, *shape: int) -> Tensor:
        """What the network is given."""
        return self.op("input", [], shape, free=True)

    def conv(
        self,
        x: Tensor,
        channels: int,
        kernel: tuple[int, int] | int = 3,
        stride: int = 1,
        *,
        groups: int = 1,
        bias: bool = False,
    ) -> Tensor:
        """A convolution that keeps the size, or divides it by the stride."""
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        inside, height, width = x.shape
        shape = (channels, -(-height // stride), -(-width // stride))
        weights = high * wide * inside // groups * channels
        flops = 2.0 * weights * shape[1] * shape[2] * (4 if groups > 1 else 1)
        return self.op("conv", [x], shape, flops=flops, parameters=weights + channels * bias)

    def bn(self, x: Tensor) -> Tensor:
        """BatchNorm."""
        return self.op("bn", [x], x.shape, parameters=2 * x.shape[0])

    def relu(self, x: Tensor) -> Tensor:
        """ReLU."""
        return self.op("relu", [x], x.shape)

    def pool(self, x: Tensor, stride: int = 2, kind: str = "max") -> Tensor:
        """Pooling."""
        c, h, w = x.shape
        return self.op(f"{kind}pool", [x], (c, -(-h // stride), -(-w // stride)))

    def add(self, *inputs: Tensor) -> Tensor:
        """A sum."""
        return self.op("add", inputs, inputs[0].shape)

    def concat(self, *inputs: Tensor) -> Tensor:
        """A concatenation of channels."""
        return self.op("cat", inputs, (sum(t.shape[0] for t in inputs), *inputs[0].shape[1:]))

    def view(self, x: Tensor, *shape: int) -> Tensor:
        """Another shape for the same numbers."""
        return self.op("view", [x], shape, free=True)

    def linear(self, x: Tensor, features: int) -> Tensor:
        """A dense layer over the last dimension."""
        *outer, inside = x.shape
        weights = inside * features
        return self.op(
            "linear",
            [x],
            (*outer, features),
            flops=2.0 * weights * math.prod(outer),
            parameters=weights + features,
        )

    def conv_bn_relu(
        self, x: Tensor, channels: int, kernel: tuple[int, int] | int = 1, stride: int = 1
    ) -> Tensor:
        """Convolution, BatchNorm, ReLU."""
        return self.relu(self.bn(self.conv(x, channels, kernel, stride)))

    def head(self, x: Tensor, classes: int = 1000) -> Tensor:
        """Average over all places, then a dense layer."""
        pooled = self.op("mean", [x], (x.shape[0], 1, 1))
        return self.linear(self.view(pooled, x.shape[0]), classes)
