"""Stage 1 of UNet, the 2nd of 4: down.3.0 to bottom.5."""

from torch import Tensor, nn

from .layers import ConvBlock


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleDict({"3": ConvBlock(32, 64)})
        self.pool = nn.MaxPool2d(kernel_size=2)
        self.bottom = ConvBlock(64, 128)

    def forward(self, pool_out: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            pool_out: (B, 32, images.2 // 8, images.3 // 8) float32, from stage 0, made at
                unet.py:66.

        Returns:
            down_3: (B, 64, images.2 // 8, images.3 // 8) float32, for stage 2.
            bottom_out: (B, 128, images.2 // 16, images.3 // 16) float32, for stage 2.
        """
        # unet.py:66
        down_3 = self.down["3"](pool_out)  # (B, 64, images.2 // 8, images.3 // 8)
        x = self.pool(down_3)  # (B, 64, images.2 // 16, images.3 // 16)
        bottom_out = self.bottom(x)  # (B, 128, images.2 // 16, images.3 // 16)
        return down_3, bottom_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "down",
    "bottom",
)
