"""Stage 0 of conv_net, the 1st of 3: stem.0 to blocks.0.conv2."""

from torch import Tensor, nn

from .layers import ResidualPart


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, kernel_size=3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.blocks = nn.Sequential(ResidualPart())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, images.2, images.3) float32, the model's args[0].

        Returns:
            stem_out: (B, 4, images.2, images.3) float32, for stage 1.
            conv2_out: (B, 4, images.2, images.3) float32, for stage 1.
        """
        # models.py:41-42
        stem_out = self.stem(images)  # (B, 4, images.2, images.3)
        conv2_out = self.blocks(stem_out)
        return stem_out, conv2_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "stem",
    "blocks",
)
