"""Stage 2 of InceptionNet, the 3rd of 4: early.2.point.conv to late.1.pooled."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ConvNorm, Inception


class InceptionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = ConvNorm(32, 8, kernel=1, padding=0)
        self.narrow5 = ConvNorm(32, 4, kernel=1, padding=0)
        self.conv5 = ConvNorm(4, 8, kernel=5, padding=2)

    def forward(self, x: Tensor, conv3_out: Tensor, pooled_out: Tensor) -> Tensor:
        # inception.py:52-57
        point_out = self.point(x)  # (B, 8, images.2 // 2, images.3 // 2)
        conv5_out = self.conv5(self.narrow5(x))
        return torch.cat([point_out, conv3_out, conv5_out, pooled_out], dim=1)


class InceptionPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pooled = ConvNorm(32, 8, kernel=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        # inception.py:55
        pooled_out: Tensor = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))
        return pooled_out


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleDict({"2": InceptionPart()})
        self.late = nn.ModuleDict({"0": Inception(), "1": InceptionPart2()})
        self.auxiliary = nn.Linear(32, 10)

    def forward(
        self, x: Tensor, conv3_out: Tensor, pooled_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            x: (B, 32, images.2 // 2, images.3 // 2) float32, from stage 1, made at inception.py:57.
            conv3_out: (B, 8, images.2 // 2, images.3 // 2) float32, from stage 1, made at
                inception.py:35.
            pooled_out: (B, 8, images.2 // 2, images.3 // 2) float32, from stage 1, made at
                inception.py:35.

        Returns:
            auxiliary: (B, 10) float32, for stage 3 and the caller.
            x: (B, 32, images.2 // 4, images.3 // 4) float32, for stage 3.
            pooled_out: (B, 8, images.2 // 4, images.3 // 4) float32, for stage 3.
        """
        # inception.py:75-77
        x = self.early["2"](x, conv3_out, pooled_out)  # (B, 32, images.2 // 2, images.3 // 2)
        auxiliary = self.auxiliary(x.mean([2, 3]))  # (B, 10)
        x = F.max_pool2d(x, 2)  # (B, 32, images.2 // 4, images.3 // 4)
        x = self.late["0"](x)
        pooled_out = self.late["1"](x)  # (B, 8, images.2 // 4, images.3 // 4)
        return auxiliary, x, pooled_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "early",
    "late",
)
