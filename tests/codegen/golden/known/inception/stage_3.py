"""Stage 3 of InceptionNet, the 4th of 4: late.1.point.conv to scores."""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Inception


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
        # inception.py:77-78
        for late in self.late.values():
            late_0 = late(late_0)  # (B, 32, 8, 8)
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
