"""Stage 2 of conv_net, the 3rd of 3: blocks.1.bn2 to head."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class ResidualPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, blocks_1_conv2: Tensor, blocks_0_relu_1: Tensor) -> Tensor:
        # models.py:27-29
        out = self.bn2(blocks_1_conv2)  # (B, 4, 8, 8)
        out += blocks_0_relu_1
        blocks_1_relu_1 = self.relu(out)
        return blocks_1_relu_1


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"1": ResidualPart()})
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, blocks_1_conv2: Tensor, blocks_0_relu_1: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            blocks_1_conv2: (B, 4, 8, 8) float32, from stage 1, made at models.py:27.
            blocks_0_relu_1: (B, 4, 8, 8) float32, from stage 1, made at models.py:29.

        Returns:
            head: (B, 5) float32, for the caller.
        """
        # models.py:29-44
        blocks_1_relu_1 = checkpoint(
            self.segment_1, blocks_1_conv2, blocks_0_relu_1, use_reentrant=False
        )
        head = checkpoint(self.segment_2, blocks_1_relu_1, use_reentrant=False)  # (B, 5)
        return head

    def segment_1(self, blocks_1_conv2: Tensor, blocks_0_relu_1: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        blocks_1_relu_1 = self.blocks["1"](blocks_1_conv2, blocks_0_relu_1)  # (B, 4, 8, 8)
        return blocks_1_relu_1

    def segment_2(self, blocks_1_relu_1: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        # models.py:43-44
        x = self.pool(blocks_1_relu_1).flatten(1)  # (B, 4)
        head = self.head(x)  # (B, 5)
        return head

    def loss(self, head: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            head: (B, 5) float32, what forward returned.
            target: (B,) int64, the target.
        """
        # models.py:208
        loss = F.cross_entropy(head.flatten(0, -2), target.flatten())
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("blocks",)

# Methods that run again in the backward, with what of WRITES each reads or writes.
SEGMENTS = {
    "segment_1": ("blocks",),
    "segment_2": (),
}
