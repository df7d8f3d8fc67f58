"""Stage 3 of InceptionNet, the 4th of 4: late.1.point.conv to scores."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ConvNorm, Inception


class InceptionPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = ConvNorm(32, 8, kernel=1, padding=0)
        self.narrow3 = ConvNorm(32, 4, kernel=1, padding=0)
        self.conv3 = ConvNorm(4, 8, kernel=3, padding=1)
        self.narrow5 = ConvNorm(32, 4, kernel=1, padding=0)
        self.conv5 = ConvNorm(4, 8, kernel=5, padding=2)

    def forward(self, x: Tensor, pooled_out: Tensor) -> Tensor:
        # inception.py:52-57
        point_out = self.point(x)  # (B, 8, images.2 // 4, images.3 // 4)
        conv3_out = self.conv3(self.narrow3(x))
        conv5_out = self.conv5(self.narrow5(x))
        return torch.cat([point_out, conv3_out, conv5_out, pooled_out], dim=1)


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.ModuleDict({"1": InceptionPart(), "2": Inception()})
        self.scores = nn.Linear(32, 10)

    def forward(self, late_0: Tensor, pooled_out: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            late_0: (B, 32, images.2 // 4, images.3 // 4) float32, from stage 2, made at
                inception.py:57.
            pooled_out: (B, 8, images.2 // 4, images.3 // 4) float32, from stage 2, made at
                inception.py:35.

        Returns:
            scores_out: (B, 10) float32, for the caller.
        """
        # inception.py:77-78
        x = self.late["2"](self.late["1"](late_0, pooled_out))
        scores_out: Tensor = self.scores(x.mean([2, 3]))  # (B, 10)
        return scores_out

    def loss(self, scores: Tensor, target: Tensor, auxiliary: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            scores: (B, 10) float32, what forward returned.
            target: (B,) int64, the target.
            auxiliary: (B, 10) float32, from stage 2, made at inception.py:76.
        """
        # inception.py:96
        loss = F.cross_entropy(scores, target) + F.cross_entropy(auxiliary, target) * 0.3
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("late",)
