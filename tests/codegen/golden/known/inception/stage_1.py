"""Stage 1 of InceptionNet, the 2nd of 4: early.0.conv3.conv to early.2.conv5."""

import torch
from torch import Tensor, nn

from .layers import ConvNorm, Inception


class InceptionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv3 = ConvNorm(4, 8, kernel_size=3, padding=1)
        self.conv5 = ConvNorm(4, 8, kernel_size=5, padding=2)

    def forward(
        self, narrow3_out: Tensor, narrow5_out: Tensor, point_out: Tensor, pooled_out: Tensor
    ) -> Tensor:
        # inception.py:53-57
        conv3_out = self.conv3(narrow3_out)  # (B, 8, 16, 16)
        conv5_out = self.conv5(narrow5_out)
        return torch.cat([point_out, conv3_out, conv5_out, pooled_out], dim=1)  # (B, 32, 16, 16)


class InceptionPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow5 = ConvNorm(32, 4, kernel_size=1, padding=0)
        self.conv5 = ConvNorm(4, 8, kernel_size=5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        # inception.py:54
        conv5_out: Tensor = self.conv5(self.narrow5(x))  # (B, 8, 16, 16)
        return conv5_out


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early = nn.ModuleDict({"0": InceptionPart(), "1": Inception(), "2": InceptionPart2()})

    def forward(
        self, narrow3_out: Tensor, narrow5_out: Tensor, point_out: Tensor, pooled_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            narrow3_out: (B, 4, 16, 16) float32, from stage 0, made at inception.py:35.
            narrow5_out: (B, 4, 16, 16) float32, from stage 0, made at inception.py:35.
            point_out: (B, 8, 16, 16) float32, from stage 0, made at inception.py:35.
            pooled_out: (B, 8, 16, 16) float32, from stage 0, made at inception.py:35.

        Returns:
            x: (B, 32, 16, 16) float32, for stage 2.
            early_2: (B, 8, 16, 16) float32, for stage 2.
        """
        # inception.py:75
        x = self.early["0"](narrow3_out, narrow5_out, point_out, pooled_out)  # (B, 32, 16, 16)
        x = self.early["1"](x)
        early_2 = self.early["2"](x)  # (B, 8, 16, 16)
        return x, early_2


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("early",)
