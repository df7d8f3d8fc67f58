"""Operator graphs of well-known networks, op by op, with roofline times: what cuts are tried on.

The graphs are as a tracer sees the networks: every convolution, BatchNorm, ReLU, pooling, addition,
concatenation and view is an op. Times are a roofline of a 10 TFLOP/s card with 350 GB/s, times a
number drawn per op between 0.85 and 1.25, as measured ones scatter (a convolution of the same
work differs by its shape). They stand for profiles, and are none.

    AlexNet (Krizhevsky 2012), VGG-16 (Simonyan & Zisserman 2015), ResNet-50/-101 (He et al. 2016),
    GoogLeNet (Szegedy et al. 2015), Inception-v3 (Szegedy et al. 2016), DenseNet-121 (Huang et al.
    2017), NASNet-A (Zoph et al. 2018), AmoebaNet-D (Real et al. 2019), HRNet (Wang et al. 2020),
    U-Net (Ronneberger et al. 2015), GNMT (Wu et al. 2016), an LSTM unrolled over layers and time,
    Transformer (Vaswani et al. 2017).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.graph_file import BareGraph, BareOp

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


def alexnet() -> BareGraph:
    """AlexNet, 128 samples a micro-batch."""
    net = Network("alexnet", 128)
    x = net.input(3, 224, 224)
    x = net.relu(net.conv(x, 64, 11, 4, bias=True))
    x = net.pool(x)
    x = net.pool(net.relu(net.conv(x, 192, 5, bias=True)))
    for channels in (384, 256, 256):
        x = net.relu(net.conv(x, channels, 3, bias=True))
    x = net.pool(x)
    x = net.view(x, x.size)
    for features in (4096, 4096):
        x = net.relu(net.linear(net.op("dropout", [x], x.shape), features))
    net.linear(x, 1000)
    return net.graph()


def vgg16() -> BareGraph:
    """VGG-16, 64 samples a micro-batch."""
    net = Network("vgg16", 64)
    x = net.input(3, 224, 224)
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = net.relu(net.conv(x, channels, 3, bias=True))
        x = net.pool(x)
    x = net.view(x, x.size)
    for features in (4096, 4096):
        x = net.op("dropout", [net.relu(net.linear(x, features))], (features,))
    net.linear(x, 1000)
    return net.graph()


def resnet(blocks: Sequence[int]) -> BareGraph:
    """ResNet with bottleneck blocks, 64 samples a micro-batch."""
    net = Network(f"resnet{3 * sum(blocks) + 2}", 64)
    x = net.pool(net.conv_bn_relu(net.input(3, 224, 224), 64, 7, 2))
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            y = net.conv_bn_relu(x, width, 1)
            y = net.conv_bn_relu(y, width, 3, stride)
            y = net.bn(net.conv(y, 4 * width, 1))
            skip = x if block else net.bn(net.conv(x, 4 * width, 1, stride))
            x = net.relu(net.add(y, skip))
    net.head(x)
    return net.graph()


def googlenet() -> BareGraph:
    """GoogLeNet without auxiliary heads, 64 samples a micro-batch."""
    net = Network("googlenet", 64)
    x = net.pool(net.conv_bn_relu(net.input(3, 224, 224), 64, 7, 2))
    x = net.pool(net.conv_bn_relu(net.conv_bn_relu(x, 64), 192, 3))
    rows = (
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (),
        (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), (),
        (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )  # fmt: skip
    for row in rows:
        if not row:
            x = net.pool(x)
            continue
        one, three_in, three, five_in, five, pooled = row
        x = net.concat(
            net.conv_bn_relu(x, one),
            net.conv_bn_relu(net.conv_bn_relu(x, three_in), three, 3),
            net.conv_bn_relu(net.conv_bn_relu(x, five_in), five, 3),
            net.conv_bn_relu(net.pool(x, 1), pooled),
        )
    net.head(net.op("dropout", [x], x.shape))
    return net.graph()


def inception_v3() -> BareGraph:
    """Inception-v3 without its auxiliary head, 64 samples a micro-batch."""
    net = Network("inception_v3", 64)
    c = net.conv_bn_relu
    x = c(c(c(net.input(3, 299, 299), 32, 3, 2), 32, 3), 64, 3)
    x = net.pool(c(c(net.pool(x), 80), 192, 3))
    for pooled in (32, 64, 64):
        x = net.concat(
            c(x, 64),
            c(c(x, 48), 64, 5),
            c(c(c(x, 64), 96, 3), 96, 3),
            c(net.pool(x, 1, "avg"), pooled),
        )
    x = net.concat(c(x, 384, 3, 2), c(c(c(x, 64), 96, 3), 96, 3, 2), net.pool(x))
    for width in (128, 160, 160, 192):
        double = c(x, width)
        for kernel in ((7, 1), (1, 7), (7, 1)):
            double = c(double, width, kernel)
        x = net.concat(
            c(x, 192),
            c(c(c(x, width), width, (1, 7)), 192, (7, 1)),
            c(double, 192, (1, 7)),
            c(net.pool(x, 1, "avg"), 192),
        )
    seven = c(c(c(x, 192), 192, (1, 7)), 192, (7, 1))
    x = net.concat(c(c(x, 192), 320, 3, 2), c(seven, 192, 3, 2), net.pool(x))
    for _ in range(2):
        three = c(x, 384)
        double = c(c(x, 448), 384, 3)
        x = net.concat(
            c(x, 320),
            net.concat(c(three, 384, (1, 3)), c(three, 384, (3, 1))),
            net.concat(c(double, 384, (1, 3)), c(double, 384, (3, 1))),
            c(net.pool(x, 1, "avg"), 192),
        )
    net.head(net.op("dropout", [x], x.shape))
    return net.graph()


def densenet121() -> BareGraph:
    """DenseNet-121, every layer a concatenation of all before it, 32 samples a micro-batch."""
    net = Network("densenet121", 32)
    x = net.pool(net.conv_bn_relu(net.input(3, 224, 224), 64, 7, 2))
    for index, layers in enumerate((6, 12, 24, 16)):
        features = [x]
        for _ in range(layers):
            y = net.concat(*features) if len(features) > 1 else x
            y = net.conv(net.relu(net.bn(y)), 128, 1)
            features.append(net.conv(net.relu(net.bn(y)), 32, 3))
        x = net.relu(net.bn(net.concat(*features)))
        if index < 3:
            x = net.pool(net.conv(x, x.shape[0] // 2, 1), 2, "avg")
    net.head(x)
    return net.graph()


def _relu_conv_bn(
    net: Network, x: Tensor, channels: int, kernel: tuple[int, int] | int = 1, stride: int = 1
) -> Tensor:
    return net.bn(net.conv(net.relu(x), channels, kernel, stride))


def _separable(net: Network, x: Tensor, channels: int, kernel: int, stride: int = 1) -> Tensor:
    """Two depthwise separable convolutions, one after the other."""
    for step in (stride, 1):
        x = net.conv(net.relu(x), x.shape[0], kernel, step, groups=x.shape[0])
        x = net.bn(net.conv(x, channels, 1))
    return x


def _fit(net: Network, x: Tensor, like: Tensor, channels: int) -> Tensor:
    """The output of the cell before last, in the size of the last one's."""
    stride = max(1, round(x.shape[1] / like.shape[1]))
    return _relu_conv_bn(net, x, channels, 1, stride)


def nasnet_a(cells: int = 18, filters: int = 168, batch: int = 16, image: int = 331) -> BareGraph:
    """NASNet-A: normal cells in three groups, reductions between them and two in the stem."""
    net = Network(f"nasnet_a_{cells}", batch)
    x = net.bn(net.conv(net.input(3, image, image), 96, 3, 2))
    before = x
    for width in (filters // 4, filters // 2):
        before, x = x, _nasnet_reduction(net, x, before, width)
    for group in range(3):
        width = filters * 2**group
        if group:
            before, x = x, _nasnet_reduction(net, x, before, width)
        for _ in range(cells // 3):
            before, x = x, _nasnet_normal(net, x, before, width)
    net.head(net.relu(x))
    return net.graph()


def _nasnet_normal(net: Network, now: Tensor, before: Tensor, width: int) -> Tensor:
    left, right = _fit(net, before, now, width), _relu_conv_bn(net, now, width)
    return net.concat(
        left,
        net.add(_separable(net, right, width, 5), _separable(net, left, width, 3)),
        net.add(_separable(net, left, width, 5), _separable(net, left, width, 3)),
        net.add(net.pool(right, 1, "avg"), left),
        net.add(net.pool(left, 1, "avg"), net.pool(left, 1, "avg")),
        net.add(_separable(net, right, width, 3), right),
    )


def _nasnet_reduction(net: Network, now: Tensor, before: Tensor, width: int) -> Tensor:
    left, right = _fit(net, before, now, width), _relu_conv_bn(net, now, width)
    first = net.add(_separable(net, right, width, 5, 2), _separable(net, left, width, 7, 2))
    second = net.add(net.pool(right), _separable(net, left, width, 7, 2))
    third = net.add(net.pool(right, 2, "avg"), _separable(net, left, width, 5, 2))
    fourth = net.add(net.pool(first, 1, "avg"), second)
    fifth = net.add(_separable(net, first, width, 3), net.pool(right))
    return net.concat(second, third, fourth, fifth)


Step = Callable[[Network, Tensor, int, int], Tensor]


def _seven(net: Network, x: Tensor, width: int, stride: int) -> Tensor:
    y = _relu_conv_bn(net, x, width // 4, 1)
    y = _relu_conv_bn(net, y, width // 4, (1, 7), stride)
    return _relu_conv_bn(net, _relu_conv_bn(net, y, width // 4, (7, 1)), width, 1)


def _three(net: Network, x: Tensor, width: int, stride: int) -> Tensor:
    y = _relu_conv_bn(net, x, width // 4, 1)
    return _relu_conv_bn(net, _relu_conv_bn(net, y, width // 4, 3, stride), width, 1)


_AMOEBA: Mapping[str, Step] = {
    "1x1": lambda net, x, width, stride: _relu_conv_bn(net, x, width, 1, stride),
    "3x3": _three,
    "1x7_7x1": _seven,
    "max": lambda net, x, width, stride: net.pool(x, stride),
    "avg": lambda net, x, width, stride: net.pool(x, stride, "avg"),
    "none": lambda net, x, width, stride: (
        x if stride == 1 else _relu_conv_bn(net, x, width, 1, stride)
    ),
}
_NORMAL = (
    (("1x1", 1), ("max", 1)), (("none", 1), ("1x7_7x1", 0)), (("1x1", 0), ("1x7_7x1", 0)),
    (("max", 2), ("none", 2)), (("avg", 1), ("1x1", 5)),
)  # fmt: skip
_REDUCTION = (
    (("max", 0), ("max", 0)), (("none", 2), ("3x3", 1)), (("1x7_7x1", 2), ("max", 2)),
    (("none", 3), ("max", 1)), (("avg", 2), ("1x1", 3)),
)  # fmt: skip


def amoebanet_d(layers: int = 18, width: int = 256, batch: int = 16) -> BareGraph:
    """AmoebaNet-D (L, D) at 224 x 224."""
    net = Network(f"amoebanet_d_{layers}", batch)
    x = before = net.bn(net.conv(net.input(3, 224, 224), width // 4, 3, 2))
    for channels in (width // 2, width):
        before, x = x, _amoeba(net, x, before, channels, 2)
    for group in range(3):
        channels = width * 2**group
        if group:
            before, x = x, _amoeba(net, x, before, channels, 2)
        for _ in range(layers // 3):
            before, x = x, _amoeba(net, x, before, channels, 1)
    net.head(x)
    return net.graph()


def _amoeba(net: Network, now: Tensor, before: Tensor, width: int, stride: int) -> Tensor:
    """One cell; the first two states are made as wide as the others."""
    states = [_relu_conv_bn(net, now, width), _fit(net, before, now, width)]
    steps, out = (_NORMAL, (0, 3, 4, 6)) if stride == 1 else (_REDUCTION, (4, 5, 6))
    for pair in steps:
        parts = [
            _AMOEBA[kind](net, states[source], width, stride if source < 2 else 1)
            for kind, source in pair
        ]
        states.append(net.add(*parts))
    return net.concat(*(states[index] for index in out))


def hrnet(width: int = 32, batch: int = 16) -> BareGraph:
    """HRNet: up to four resolutions side by side, which exchange what they know."""
    net = Network("hrnet", batch)
    x = net.conv_bn_relu(net.conv_bn_relu(net.input(3, 224, 224), 64, 3, 2), 64, 3, 2)
    branches = [net.conv_bn_relu(x, width, 3)]
    for count, modules in ((2, 1), (3, 4), (4, 3)):
        while len(branches) < count:
            last = branches[-1]
            branches.append(net.conv_bn_relu(last, 2 * last.shape[0], 3, 2))
        for _ in range(modules):
            branches = [_basic_blocks(net, branch) for branch in branches]
            branches = _exchange(net, branches)
    net.head(net.concat(*(_resize(net, branch, branches[0]) for branch in branches)))
    return net.graph()


def _basic_blocks(net: Network, x: Tensor) -> Tensor:
    for _ in range(4):
        y = net.conv_bn_relu(x, x.shape[0], 3)
        x = net.relu(net.add(net.bn(net.conv(y, x.shape[0], 3)), x))
    return x


def _exchange(net: Network, branches: Sequence[Tensor]) -> list[Tensor]:
    found = []
    for target in branches:
        parts = []
        for source in branches:
            part = source
            if source.shape[1] < target.shape[1]:
                part = _resize(net, net.bn(net.conv(source, target.shape[0], 1)), target)
            while part.shape[1] > target.shape[1]:
                channels = target.shape[0] if part.shape[1] // 2 == target.shape[1] else None
                part = net.bn(net.conv(part, channels or part.shape[0], 3, 2))
            parts.append(part)
        found.append(net.relu(net.add(*parts)))
    return found


def _resize(net: Network, x: Tensor, like: Tensor) -> Tensor:
    return x if x.shape[1:] == like.shape[1:] else net.op("up", [x], (x.shape[0], *like.shape[1:]))


def unet(depth: int = 5, width: int = 48, batch: int = 8) -> BareGraph:
    """U-Net at 256 x 256: skips from each size of the way down to the same on the way up."""
    net = Network("unet", batch)
    x = net.input(3, 256, 256)
    skips = []
    for level in range(depth):
        x = net.conv_bn_relu(net.conv_bn_relu(x, width * 2**level, 3), width * 2**level, 3)
        if level < depth - 1:
            skips.append(x)
            x = net.pool(x)
    for skip in reversed(skips):
        up = _resize(net, net.conv_bn_relu(x, skip.shape[0], 1), skip)
        x = net.concat(up, skip)
        x = net.conv_bn_relu(net.conv_bn_relu(x, skip.shape[0], 3), skip.shape[0], 3)
    net.conv(x, 2, 1)
    return net.graph()


def gnmt(layers: int = 8, hidden: int = 1024, words: int = 50, batch: int = 64) -> BareGraph:
    """GNMT, a layer an op: bidirectional first layer, attention read by every decoder layer."""
    net = Network(f"gnmt_{layers}", batch)
    source, target = net.input(words), net.input(words)

    def embed(x: Tensor) -> Tensor:
        return net.op("embedding", [x], (words, hidden), parameters=32_000 * hidden)

    def lstm(x: Tensor) -> Tensor:
        weights = 4 * hidden * (x.shape[-1] + hidden)
        flops = 2.0 * weights * words * 2  # products of one word at a time run at half the speed
        out = net.op("lstm", [x], (words, hidden), flops=flops, parameters=weights)
        return net.op("getitem", [out], out.shape, free=True)

    x = embed(source)
    both = net.op("cat", [lstm(x), lstm(x)], (words, 2 * hidden))
    x = lstm(net.op("dropout", [both], both.shape))
    for _ in range(layers - 2):
        x = net.add(lstm(net.op("dropout", [x], x.shape)), x)
    keys = x
    y = lstm(embed(target))
    scores = net.op(
        "bmm", [net.linear(y, hidden), keys], (words, words), flops=2.0 * words**2 * hidden
    )
    weights = net.op("softmax", [scores], scores.shape)
    context = net.op("bmm", [weights, keys], (words, hidden), flops=2.0 * words**2 * hidden)
    for layer in range(layers - 1):
        joined = net.op("cat", [y, context], (words, 2 * hidden))
        z = lstm(net.op("dropout", [joined], joined.shape))
        y = net.add(z, y) if layer else z
    net.linear(y, 32_000)
    return net.graph()


def lstm_grid(layers: int = 8, words: int = 24, hidden: int = 1024, batch: int = 64) -> BareGraph:
    """An LSTM unrolled over layers and words; a layer's weights count with its first cell."""
    net = Network(f"lstm_{layers}x{words}", batch)
    row = [net.op("embedding", [net.input(1)], (hidden,), parameters=0) for _ in range(words)]
    for _ in range(layers):
        state: list[Tensor] = []
        for index, x in enumerate(row):
            weights = 8 * hidden * hidden
            inputs = [x, *state[-1:]]
            shape = (hidden,)
            flops = 4.0 * weights
            state.append(
                net.op("cell", inputs, shape, flops=flops, parameters=0 if index else weights)
            )
        row = state
    for x in row:
        net.linear(x, 8000)
    return net.graph()


def transformer(layers: int = 6, dim: int = 512, words: int = 128, batch: int = 32) -> BareGraph:
    """Transformer, encoder and decoder; all decoder layers read what the encoder gives."""
    net = Network(f"transformer_{layers}", batch)

    def attention(x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (net.view(net.linear(source, dim), words, dim) for source in (x, memory, memory))
        flops = 2.0 * words * words * dim
        scores = net.op("bmm", [q, k], (words, words * dim // 64), flops=flops)
        weights = net.op("dropout", [net.op("softmax", [scores], scores.shape)], scores.shape)
        y = net.view(net.op("bmm", [weights, v], (words, dim), flops=flops), words, dim)
        y = net.linear(y, dim)
        return norm(net.add(net.op("dropout", [y], y.shape), x))

    def norm(x: Tensor) -> Tensor:
        return net.op("norm", [x], x.shape, parameters=2 * dim)

    def feed(x: Tensor) -> Tensor:
        y = net.linear(net.relu(net.linear(x, 4 * dim)), dim)
        return norm(net.add(net.op("dropout", [y], y.shape), x))

    def embed() -> Tensor:
        words_in = net.input(words)
        x = net.op("embedding", [words_in], (words, dim), parameters=32_000 * dim)
        return net.op("dropout", [net.op("position", [x], x.shape)], x.shape)

    x = embed()
    for _ in range(layers):
        x = feed(attention(x, x))
    y = embed()
    for _ in range(layers):
        y = feed(attention(attention(y, y), x))
    net.linear(y, 32_000)
    return net.graph()


GRAPHS: Mapping[str, Callable[[], BareGraph]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "googlenet": googlenet,
    "inception_v3": inception_v3,
    "densenet121": densenet121,
    "unet": unet,
    "gnmt_8": gnmt,
    "gnmt_16": lambda: gnmt(16),
    "transformer_6": transformer,
    "lstm_8x24": lstm_grid,
    "hrnet": hrnet,
    "amoebanet_d_18": amoebanet_d,
    "nasnet_a_mobile": lambda: nasnet_a(12, 44, 64, 224),
    "nasnet_a_large": nasnet_a,
}
"""Every graph by name."""
