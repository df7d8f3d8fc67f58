"""Networks of cells that a search has found: NASNet-A and AmoebaNet-D."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpipe_compiler.graph_json.file import BareGraph
from networks.building import Network, Tensor


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
