"""Stage 1 of InceptionNet, the 2nd of 4: early.1.point.conv to early.2.pooled."""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ConvNorm, Inception


class InceptionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow3 = ConvNorm(32, 4, kernel=1, padding=0)
        self.conv3 = ConvNorm(4, 8, kernel=3, padding=1)
        self.pooled = ConvNorm(32, 8, kernel=1, padding=0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # inception.py:53-55
        conv3_out = self.conv3(self.narrow3(x))  # (B, 8, images.2 // 2, images.3 // 2)
        pooled_out = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))
        return conv3_out, pooled_out


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleDict({"1": Inception(), "2": InceptionPart()})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            x: (B, 32, images.2 // 2, images.3 // 2) float32, from stage 0, made at inception.py:57.

        Returns:
            x: (B, 32, images.2 // 2, images.3 // 2) float32, for stage 2.
            conv3_out: (B, 8, images.2 // 2, images.3 // 2) float32, for stage 2.
            pooled_out: (B, 8, images.2 // 2, images.3 // 2) float32, for stage 2.
        """
        # inception.py:75
        x = self.early["1"](x)  # (B, 32, images.2 // 2, images.3 // 2)
        conv3_out, pooled_out = self.early["2"](x)
        return x, conv3_out, pooled_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("early",)
