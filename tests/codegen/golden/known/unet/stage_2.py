"""Stage 2 of UNet, the 3rd of 4: grow.0 to up.1.5."""

import torch
from torch import Tensor, nn

from .layers import ConvBlock


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.ModuleDict(
            {
                "0": nn.ConvTranspose2d(128, 64, kernel_size=2, stride=2),
                "1": nn.ConvTranspose2d(64, 32, kernel_size=2, stride=2),
            },
        )
        self.up = nn.ModuleDict({"0": ConvBlock(128, 64), "1": ConvBlock(64, 32)})

    def forward(self, bottom_out: Tensor, down_3: Tensor, down_2: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            bottom_out: (B, 128, images.2 // 16, images.3 // 16) float32, from stage 1, made at
                unet.py:67.
            down_3: (B, 64, images.2 // 8, images.3 // 8) float32, from stage 1, made at unet.py:64.
            down_2: (B, 32, images.2 // 4, images.3 // 4) float32, from stage 0, made at unet.py:64.

        Returns:
            up_1: (B, 32, images.2 // 4, images.3 // 4) float32, for stage 3.
        """
        # unet.py:69
        x = torch.cat([down_3, self.grow["0"](bottom_out)], dim=1)
        x = self.up["0"](x)  # (B, 64, images.2 // 8, images.3 // 8)
        x = torch.cat([down_2, self.grow["1"](x)], dim=1)  # (B, 64, images.2 // 4, images.3 // 4)
        up_1: Tensor = self.up["1"](x)  # (B, 32, images.2 // 4, images.3 // 4)
        return up_1


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("up",)
