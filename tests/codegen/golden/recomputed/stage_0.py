"""Stage 0 of conv_net, the 1st of 3: stem.0 to blocks.0.conv2."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
            images: (B, 3, 8, 8) float32, the model's args[0].

        Returns:
            x: (B, 4, 8, 8) float32, for stage 1.
            out: (B, 4, 8, 8) float32, for stage 1.
        """
        # models.py:27-41
        x = checkpoint(self.stem_, images, use_reentrant=False)  # (B, 4, 8, 8)
        out = checkpoint(self.segment_1, x, use_reentrant=False)
        return x, out

    def stem_(self, images: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        x: Tensor = self.stem(images)  # (B, 4, 8, 8)
        return x

    def segment_1(self, x: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        out: Tensor = self.blocks(x)  # (B, 4, 8, 8)
        return out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "stem",
    "blocks",
)

# Methods that run again in the backward, with what of WRITES each reads or writes.
SEGMENTS = {
    "stem_": ("stem",),
    "segment_1": ("blocks",),
}
