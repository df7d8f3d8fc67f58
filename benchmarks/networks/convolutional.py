"""Convolutional networks: in a row, with skips, with branches side by side, at several sizes."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_compiler.graph_json.file import BareGraph
from networks.building import Network, Tensor


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
