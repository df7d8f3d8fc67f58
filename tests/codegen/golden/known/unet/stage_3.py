"""Stage 3 of UNet, the 4th of 4: grow.2 to score."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import ConvBlock


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.ModuleDict(
            {
                "2": nn.ConvTranspose2d(32, 16, kernel_size=2, stride=2),
                "3": nn.ConvTranspose2d(16, 8, kernel_size=2, stride=2),
            },
        )
        self.up = nn.ModuleDict({"2": ConvBlock(32, 16), "3": ConvBlock(16, 8)})
        self.score = nn.Conv2d(8, 1, kernel_size=1)

    def forward(self, up_1: Tensor, down_1: Tensor, down_0: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            up_1: (B, 32, images.2 // 4, images.3 // 4) float32, from stage 2, made at unet.py:70.
            down_1: (B, 16, images.2 // 2, images.3 // 2) float32, from stage 0, made at unet.py:64.
            down_0: (B, 8, images.2, images.3) float32, from stage 0, made at unet.py:64.

        Returns:
            score_out: (B, 1, images.2, images.3) float32, for the caller.
        """
        # unet.py:69-71
        x = torch.cat([down_1, self.grow["2"](up_1)], dim=1)
        x = self.up["2"](x)  # (B, 16, images.2 // 2, images.3 // 2)
        x = torch.cat([down_0, self.grow["3"](x)], dim=1)  # (B, 16, images.2, images.3)
        x = self.up["3"](x)  # (B, 8, images.2, images.3)
        score_out: Tensor = self.score(x)  # (B, 1, images.2, images.3)
        return score_out

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            output: (B, 1, images.2, images.3) float32, what forward returned.
            target: (B, 1, images.2, images.3) float32, the target.
        """
        # unet.py:90
        loss = F.binary_cross_entropy_with_logits(output, target)
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("up",)
