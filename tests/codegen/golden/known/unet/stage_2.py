"""Stage 2 of UNet, the 3rd of 4: up.0.0 to grow.2."""

import torch
from torch import Tensor, nn

from .layers import ConvBlock


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleDict({"0": ConvBlock(128, 64), "1": ConvBlock(64, 32)})
        self.grow = nn.ModuleDict(
            {
                "1": nn.ConvTranspose2d(64, 32, kernel_size=2, stride=2),
                "2": nn.ConvTranspose2d(32, 16, kernel_size=2, stride=2),
            },
        )

    def forward(self, x: Tensor, down_2: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            x: (B, 128, images.2 // 8, images.3 // 8) float32, from stage 1, made at unet.py:69.
            down_2: (B, 32, images.2 // 4, images.3 // 4) float32, from stage 1, made at unet.py:64.

        Returns:
            grow_2: (B, 16, 2 * (images.2 // 4), 2 * (images.3 // 4)) float32, for stage 3.
        """
        # unet.py:69
        x = self.up["0"](x)  # (B, 64, images.2 // 8, images.3 // 8)
        x = torch.cat([down_2, self.grow["1"](x)], dim=1)  # (B, 64, images.2 // 4, images.3 // 4)
        x = self.up["1"](x)  # (B, 32, images.2 // 4, images.3 // 4)
        grow_2: Tensor = self.grow["2"](x)  # (B, 16, 2 * (images.2 // 4), 2 * (images.3 // 4))
        return grow_2


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("up",)
