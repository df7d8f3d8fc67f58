"""What several stages of InceptionNet have."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Module):
    def __init__(self, channels: int, width: int, kernel: int, padding: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel_size=kernel, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(width, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        # inception.py:35
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = ConvNorm(32, 8, kernel=1, padding=0)
        self.narrow3 = ConvNorm(32, 4, kernel=1, padding=0)
        self.conv3 = ConvNorm(4, 8, kernel=3, padding=1)
        self.narrow5 = ConvNorm(32, 4, kernel=1, padding=0)
        self.conv5 = ConvNorm(4, 8, kernel=5, padding=2)
        self.pooled = ConvNorm(32, 8, kernel=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        # inception.py:52-57
        point_out = self.point(x)
        conv3_out = self.conv3(self.narrow3(x))
        conv5_out = self.conv5(self.narrow5(x))
        pooled_out = self.pooled(F.max_pool2d(x, 3, stride=1, padding=1))
        return torch.cat([point_out, conv3_out, conv5_out, pooled_out], dim=1)
