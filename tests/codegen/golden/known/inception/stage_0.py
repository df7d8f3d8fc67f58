"""Stage 0 of InceptionNet, the 1st of 4: stem.conv to early.0.pooled."""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ConvNorm


class InceptionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = ConvNorm(32, 8, kernel_size=1, padding=0)
        self.narrow3 = ConvNorm(32, 4, kernel_size=1, padding=0)
        self.narrow5 = ConvNorm(32, 4, kernel_size=1, padding=0)
        self.pooled = ConvNorm(32, 8, kernel_size=1, padding=0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        # inception.py:52-55
        point_out = self.point(x)  # (B, 8, 16, 16)
        narrow3_out = self.narrow3(x)  # (B, 4, 16, 16)
        narrow5_out = self.narrow5(x)
        pooled_out = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))  # (B, 8, 16, 16)
        return point_out, narrow3_out, narrow5_out, pooled_out


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 32, kernel_size=3, padding=1)
        self.early = nn.ModuleDict({"0": InceptionPart()})

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, 32, 32) float32, the model's args[0].

        Returns:
            point_out: (B, 8, 16, 16) float32, for stage 1.
            narrow3_out: (B, 4, 16, 16) float32, for stage 1.
            narrow5_out: (B, 4, 16, 16) float32, for stage 1.
            pooled_out: (B, 8, 16, 16) float32, for stage 1.
        """
        # inception.py:74-75
        x = F.max_pool2d(self.stem(images), 2)  # (B, 32, 16, 16)
        point_out, narrow3_out, narrow5_out, pooled_out = self.early["0"](x)
        return point_out, narrow3_out, narrow5_out, pooled_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "stem",
    "early",
)
