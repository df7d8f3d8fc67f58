"""Stage 1 of UNet, the 2nd of 4: down.2.0 to grow.0."""

import torch
from torch import Tensor, nn

from .layers import ConvBlock


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleDict({"2": ConvBlock(16, 32), "3": ConvBlock(32, 64)})
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.bottom = ConvBlock(64, 128)
        self.grow = nn.ModuleDict({"0": nn.ConvTranspose2d(128, 64, kernel_size=2, stride=2)})

    def forward(self, pool_out: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            pool_out: (B, 16, images.2 // 4, images.3 // 4) float32, from stage 0, made at
                unet.py:66.

        Returns:
            down_2: (B, 32, images.2 // 4, images.3 // 4) float32, for stage 2.
            x: (B, 128, images.2 // 8, images.3 // 8) float32, for stage 2.
        """
        # unet.py:66-69
        down_2 = self.down["2"](pool_out)  # (B, 32, images.2 // 4, images.3 // 4)
        x = self.pool(down_2)  # (B, 32, images.2 // 8, images.3 // 8)
        x = self.down["3"](x)  # (B, 64, images.2 // 8, images.3 // 8)
        pool_out = self.pool(x)  # (B, 64, images.2 // 16, images.3 // 16)
        x = torch.cat([x, self.grow["0"](self.bottom(pool_out))], dim=1)
        return down_2, x


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "down",
    "bottom",
)
