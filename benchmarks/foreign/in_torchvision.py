"""Of torchvision: of every family the smallest model that has published weights.

A family is a file of `torchvision.models` (classification, segmentation, video, optical flow, and
detection where torchvision's C++ operators load). Weights are random, and heads have ten classes.
MViT is made for clips of 112 pixels, not 224, two of which take 7 GB in a step of plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from foreign.model import Foreign, classes, cross_entropy, images

CLASSES = 10
SIZES = {"inception": 299, "vision_transformer": 224, "maxvit": 224, "alexnet": 64}


def names() -> list[str]:
    """One of every family."""
    from torchvision import extension, models

    found: dict[str, tuple[int, str]] = {}
    for name in models.list_models():
        family = models.get_model_builder(name).__module__
        runs = ".detection" not in family or extension._has_ops()
        if runs and ".quantization" not in family:
            best = min(models.get_model_weights(name), key=lambda w: w.meta["num_params"])
            size = (best.meta["num_params"], name)
            found[family] = min(found.get(family, size), size)
    return [name for _, name in sorted(found.values())]


def foreign(name: str) -> Foreign:
    """The model of a name."""
    from torchvision import models

    builder = models.get_model_builder(name)
    kind, _, family = builder.__module__.removeprefix("torchvision.models.").rpartition(".")
    settings: dict[str, Any] = {"weights": None}
    if kind != "optical_flow":
        settings["num_classes"] = CLASSES
    if kind in ("segmentation", "detection"):
        settings["weights_backbone"] = None

    def build() -> nn.Module:
        return builder(**settings)

    if kind == "video":
        side = {"mvit": 112, "s3d": 224}.get(family, 64)
        build = _of_side(side, build) if family == "mvit" else build
        samples = 2 if family == "mvit" else 4
        return Foreign(build, _clips(side), cross_entropy, classes(CLASSES), samples)
    if kind == "optical_flow":
        return Foreign(build, lambda n: (_pixels(n), _pixels(n)), _flow, _two(128), 2)
    if kind == "segmentation":
        return Foreign(build, images(64), _segments, _labels(64), 4)
    if kind == "detection":
        return Foreign(build, _pictures, lambda losses, _: sum(losses.values()))
    return Foreign(build, images(SIZES.get(family, 64)), cross_entropy, classes(CLASSES), 4)


def _of_side(side: int, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """MViT for clips of this side, which its builders do not ask for."""
    from torchvision.models.video import mvit

    def sized(**settings: Any) -> nn.Module:
        return own(**{**settings, "spatial_size": (side, side)})

    def made() -> nn.Module:
        with mock.patch.object(mvit, "_mvit", sized):
            return build()

    own = mvit._mvit
    return made


def _clips(side: int) -> Callable[[int], torch.Tensor]:
    return lambda samples: torch.randn(samples, 3, 16, side, side)


def _pixels(samples: int) -> torch.Tensor:
    return torch.rand(samples, 3, 128, 128) * 2 - 1


def _two(side: int) -> Callable[[int], torch.Tensor]:
    return lambda samples: torch.randn(samples, 2, side, side)


def _labels(side: int) -> Callable[[int], torch.Tensor]:
    return lambda samples: torch.randint(CLASSES, (samples, side, side))


def _segments(output: Any, target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(output["out"], target)
    return loss + 0.5 * F.cross_entropy(output["aux"], target) if "aux" in output else loss


def _flow(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The sequence loss of RAFT."""
    weights = [0.8 ** (len(output) - 1 - i) for i in range(len(output))]
    terms = zip(weights, output, strict=True)
    return torch.stack([w * (flow - target).abs().mean() for w, flow in terms]).sum()


def _pictures(samples: int) -> object:
    """Images of their own sizes with boxes, as detectors are trained."""
    pictures = [torch.rand(3, 64 + 8 * i, 64) for i in range(samples)]
    boxes = torch.tensor([[4.0, 4.0, 40.0, 40.0]])
    return pictures, [{"boxes": boxes, "labels": torch.tensor([1])} for _ in range(samples)]
