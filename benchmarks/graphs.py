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

from collections.abc import Callable, Mapping

from networks.cells import amoebanet_d, nasnet_a
from networks.convolutional import (
    alexnet,
    densenet121,
    googlenet,
    hrnet,
    inception_v3,
    resnet,
    unet,
    vgg16,
)
from networks.sequences import gnmt, lstm_grid, transformer

from gpipe_compiler.graph_json.file import BareGraph

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
