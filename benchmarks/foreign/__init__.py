"""Models of other people's libraries, small but true to their architecture; a module a library.

Torchvision's C++ operators are declared first: its library does not load beside a CPU torch, and
what imports torchvision, as transformers does, needs them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def loads() -> bool:
    """Whether torchvision is there, and its library of C++ operators loads beside this torch."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
            return True
    except OSError:
        pass
    return False


def declare_operators() -> None:
    """Declares the operators, which are nowhere else: twice declared they would end the process."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    boxes = "Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width"
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        f"roi_align({boxes}, int sampling_ratio, bool aligned) -> Tensor",
        f"roi_pool({boxes}) -> (Tensor, Tensor)",
        f"ps_roi_align({boxes}, int sampling_ratio) -> (Tensor, Tensor)",
        f"ps_roi_pool({boxes}) -> (Tensor, Tensor)",
        "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, "
        "int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, "
        "int groups, int offset_groups, bool use_mask) -> Tensor",
        "_roi_align_backward(Tensor grad, Tensor rois, float a, int b, int c, int d, int e, int f, "
        "int g, int h, bool i) -> Tensor",
        "_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float a, int b, int c, int d, "
        "int e, int f, int g) -> Tensor",
        "_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor mapping, float a, int b, int c, "
        "int d, int e, int f, int g, int h) -> Tensor",
        "_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor mapping, float a, int b, int c, "
        "int d, int e, int f, int g) -> Tensor",
        "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, "
        "Tensor mask, Tensor bias, int a, int b, int c, int d, int e, int f, int g, int h, bool i)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "box_iou_rotated(Tensor a, Tensor b) -> Tensor",
        "qroi_align(Tensor a, Tensor b, float c, int d, int e, int f, bool g) -> Tensor",
    ):
        library.define(schema)
    KEPT.append(library)


KEPT: list[torch.library.Library] = []
"""The declarations, which end with the object that made them."""


if not loads() and not hasattr(torch.ops.torchvision, "nms"):
    declare_operators()
