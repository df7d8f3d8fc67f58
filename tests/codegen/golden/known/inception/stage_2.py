"""Stage 2 of InceptionNet, the 3rd of 4: early.2.point.conv to late.0.pooled."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ConvNorm, Inception


class InceptionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = ConvNorm(32, 8, kernel_size=1, padding=0)
        self.narrow3 = ConvNorm(32, 4, kernel_size=1, padding=0)
        self.conv3 = ConvNorm(4, 8, kernel_size=3, padding=1)
        self.pooled = ConvNorm(32, 8, kernel_size=1, padding=0)

    def forward(self, x: Tensor, conv5_out: Tensor) -> Tensor:
        # inception.py:52-57
        point_out = self.point(x)  # (B, 8, 16, 16)
        conv3_out = self.conv3(self.narrow3(x))
        pooled_out = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([point_out, conv3_out, conv5_out, pooled_out], dim=1)  # (B, 32, 16, 16)


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleDict({"2": InceptionPart()})
        self.auxiliary = nn.Linear(32, 10)
        self.late = nn.Sequential(Inception())

    def forward(self, early_1: Tensor, conv5_out: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            early_1: (B, 32, 16, 16) float32, from stage 1, made at inception.py:57.
            conv5_out: (B, 8, 16, 16) float32, from stage 1, made at inception.py:35.

        Returns:
            auxiliary: (B, 10) float32, for stage 3 and the caller.
            x: (B, 32, 8, 8) float32, for stage 3.
        """
        # inception.py:75-77
        x = self.early["2"](early_1, conv5_out)  # (B, 32, 16, 16)
        auxiliary = self.auxiliary(x.mean([2, 3]))  # (B, 10)
        x = self.late(F.max_pool2d(x, 2))  # (B, 32, 8, 8)
        return auxiliary, x


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "early",
    "late",
)
