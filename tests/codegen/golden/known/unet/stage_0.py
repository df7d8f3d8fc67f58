"""Stage 0 of UNet, the 1st of 4: down.0.0 to down.2.5."""

from torch import Tensor, nn

from .layers import ConvBlock


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleDict(
            {"0": ConvBlock(3, 8), "1": ConvBlock(8, 16), "2": ConvBlock(16, 32)}
        )
        self.pool = nn.MaxPool2d(kernel_size=2)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, images.2, images.3) float32, the model's args[0].

        Returns:
            *skips: (B, 8, images.2, images.3) float32; (B, 16, images.2 // 2, images.3 // 2)
                float32; (B, 32, images.2 // 4, images.3 // 4) float32, for stage 3 and stage 2.
            x: (B, 32, images.2 // 8, images.3 // 8) float32, for stage 1.
        """
        # unet.py:66
        x = images
        skips: list[Tensor] = []
        for block in self.down.values():
            down_2 = block(x)
            skips.append(down_2)
            x = self.pool(down_2)
        return *skips, x


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("down",)
