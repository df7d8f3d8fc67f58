"""Stage 0 of UNet, the 1st of 4: down.0.0 to down.1.5."""

from torch import Tensor, nn

from .layers import ConvBlock


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleDict({"0": ConvBlock(3, 8), "1": ConvBlock(8, 16)})
        self.pool = nn.MaxPool2d(kernel_size=2)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, 32, 32) float32, the model's args[0].

        Returns:
            x: (B, 8, 32, 32) float32, for stage 3.
            x_2: (B, 16, 16, 16) float32, for stage 3.
            x_3: (B, 16, 8, 8) float32, for stage 1.
        """
        # unet.py:66
        x = self.down["0"](images)  # (B, 8, 32, 32)
        x_2 = self.pool(x)  # (B, 8, 16, 16)
        x_2 = self.down["1"](x_2)  # (B, 16, 16, 16)
        x_3 = self.pool(x_2)  # (B, 16, 8, 8)
        return x, x_2, x_3


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("down",)
