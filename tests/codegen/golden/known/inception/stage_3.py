"""Stage 3 of InceptionNet, the 4th of 4: late.1.point.conv to scores."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, padding: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size=kernel_size, bias=False, padding=padding
        )
        self.norm = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        # inception.py:35
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = ConvNorm(32, 8, kernel_size=1, padding=0)
        self.narrow3 = ConvNorm(32, 4, kernel_size=1, padding=0)
        self.conv3 = ConvNorm(4, 8, kernel_size=3, padding=1)
        self.narrow5 = ConvNorm(32, 4, kernel_size=1, padding=0)
        self.conv5 = ConvNorm(4, 8, kernel_size=5, padding=2)
        self.pooled = ConvNorm(32, 8, kernel_size=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        # inception.py:55-57
        point_out = self.point(x)  # (B, 8, 8, 8)
        conv3_out = self.conv3(self.narrow3(x))
        conv5_out = self.conv5(self.narrow5(x))
        branches = F.max_pool2d(x, [3, 3], stride=[1, 1], padding=[1, 1])  # (B, 32, 8, 8)
        pooled_out = self.pooled(branches)  # (B, 8, 8, 8)
        return torch.cat([point_out, conv3_out, conv5_out, pooled_out], 1)  # (B, 32, 8, 8)


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.ModuleDict({str(i): Inception() for i in range(1, 3)})
        self.scores = nn.Linear(32, 10)

    def forward(self, late_0: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            late_0: (B, 32, 8, 8) float32, from stage 2, made at inception.py:57.

        Returns:
            scores_out: (B, 10) float32, for the caller.
        """
        # inception.py:78
        for late in self.late.values():
            late_0 = late(late_0)
        scores_out: Tensor = self.scores(late_0.mean([2, 3]))  # (B, 10)
        return scores_out

    def loss(self, scores_out: Tensor, target: Tensor, auxiliary: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            scores_out: (B, 10) float32, what forward returned.
            target: (B,) int64, the target.
            auxiliary: (B, 10) float32, from stage 2, made at inception.py:76.
        """
        # inception.py:96
        loss = F.cross_entropy(scores_out, target) + F.cross_entropy(auxiliary, target) * 0.3
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("late",)
