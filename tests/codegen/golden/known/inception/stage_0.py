"""Stage 0 of InceptionNet, the 1st of 4: stem.conv to early.0.pooled."""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ConvNorm, Inception


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 32, kernel=3, padding=1)
        self.early = nn.Sequential(Inception())

    def forward(self, images: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, images.2, images.3) float32, the model's args[0].

        Returns:
            x: (B, 32, images.2 // 2, images.3 // 2) float32, for stage 1.
        """
        # inception.py:74-75
        x: Tensor = F.max_pool2d(self.stem(images), 2)  # (B, 32, images.2 // 2, images.3 // 2)
        x = self.early(x)
        return x


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "stem",
    "early",
)
