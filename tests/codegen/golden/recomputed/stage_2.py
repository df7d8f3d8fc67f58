"""Stage 2 of conv_net, the 3rd of 3: blocks.1.bn2 to head."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .layers import ResidualPart2


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": ResidualPart2()})
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, conv2_out: Tensor, blocks_0: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            conv2_out: (B, 4, images.2, images.3) float32, from stage 1, made at models.py:27.
            blocks_0: (B, 4, images.2, images.3) float32, from stage 1, made at models.py:29.

        Returns:
            head_out: (B, 5) float32, for the caller.
        """
        # models.py:42-44
        x = checkpoint(self.blocks["1"], blocks_0, conv2_out, use_reentrant=False)
        head_out: Tensor = checkpoint(self.segment_1, x, use_reentrant=False)  # (B, 5)
        return head_out

    def segment_1(self, x: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        # models.py:43-44
        x = self.pool(x).flatten(1)  # (B, 4)
        head_out: Tensor = self.head(x)  # (B, 5)
        return head_out

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            output: (B, 5) float32, what forward returned.
            target: (B,) int64, the target.
        """
        # models.py:208
        loss = F.cross_entropy(output.flatten(0, -2), target.flatten())
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("blocks",)

# What runs again in the backward: modules and methods, with what of WRITES each reads or writes.
SEGMENTS = {
    "segment_1": (),
    "blocks.1": ("blocks",),
}
