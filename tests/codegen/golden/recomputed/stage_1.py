"""Stage 1 of conv_net, the 2nd of 3: blocks.0.bn2 to blocks.1.conv2."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # blocks.0
        self.blocks_0_bn2 = nn.BatchNorm2d(4)
        self.blocks_0_relu = nn.ReLU(inplace=True)

        # blocks.1
        self.blocks_1_conv1 = nn.Conv2d(4, 4, kernel_size=3, padding=1, bias=False)
        self.blocks_1_bn1 = nn.BatchNorm2d(4)
        self.blocks_1_relu = nn.ReLU(inplace=True)
        self.blocks_1_conv2 = nn.Conv2d(4, 4, kernel_size=3, padding=1, bias=False)

    def forward(self, blocks_0_conv2: Tensor, stem_2: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            blocks_0_conv2: (B, 4, 8, 8) float32, from stage 0, made at models.py:27.
            stem_2: (B, 4, 8, 8) float32, from stage 0, made at models.py:41.

        Returns:
            blocks_0_relu_1: (B, 4, 8, 8) float32, for stage 2.
            blocks_1_conv2: (B, 4, 8, 8) float32, for stage 2.
        """
        # blocks.0 (models.py:29)
        blocks_0_relu_1 = checkpoint(self.segment_1, blocks_0_conv2, stem_2, use_reentrant=False)

        # blocks.1 (models.py:27)
        blocks_1_conv2 = checkpoint(self.segment_2, blocks_0_relu_1, use_reentrant=False)
        return blocks_0_relu_1, blocks_1_conv2

    def segment_1(self, blocks_0_conv2: Tensor, stem_2: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        # blocks.0 (models.py:27-29)
        out = self.blocks_0_bn2(blocks_0_conv2)  # (B, 4, 8, 8)
        out += stem_2
        blocks_0_relu_1 = self.blocks_0_relu(out)
        return blocks_0_relu_1

    def segment_2(self, blocks_0_relu_1: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        # blocks.1 (models.py:26-27)
        out = self.blocks_1_relu(self.blocks_1_bn1(self.blocks_1_conv1(blocks_0_relu_1)))
        blocks_1_conv2 = self.blocks_1_conv2(out)
        return blocks_1_conv2


# The module's own names of its state, and the model's.
STATE = {
    "blocks_0_bn2.weight": "blocks.0.bn2.weight",
    "blocks_0_bn2.bias": "blocks.0.bn2.bias",
    "blocks_0_bn2.running_mean": "blocks.0.bn2.running_mean",
    "blocks_0_bn2.running_var": "blocks.0.bn2.running_var",
    "blocks_0_bn2.num_batches_tracked": "blocks.0.bn2.num_batches_tracked",
    "blocks_1_conv1.weight": "blocks.1.conv1.weight",
    "blocks_1_bn1.weight": "blocks.1.bn1.weight",
    "blocks_1_bn1.bias": "blocks.1.bn1.bias",
    "blocks_1_bn1.running_mean": "blocks.1.bn1.running_mean",
    "blocks_1_bn1.running_var": "blocks.1.bn1.running_var",
    "blocks_1_bn1.num_batches_tracked": "blocks.1.bn1.num_batches_tracked",
    "blocks_1_conv2.weight": "blocks.1.conv2.weight",
}

# Buffers, by the stage's own names, that a forward in train mode writes to.
WRITES = (
    "blocks_0_bn2.running_mean",
    "blocks_0_bn2.running_var",
    "blocks_0_bn2.num_batches_tracked",
    "blocks_1_bn1.running_mean",
    "blocks_1_bn1.running_var",
    "blocks_1_bn1.num_batches_tracked",
)

# Methods that run again in the backward, with the buffers of WRITES that each reads or writes.
SEGMENTS = {
    "segment_1": (
        "blocks_0_bn2.running_mean",
        "blocks_0_bn2.running_var",
        "blocks_0_bn2.num_batches_tracked",
    ),
    "segment_2": (
        "blocks_1_bn1.running_mean",
        "blocks_1_bn1.running_var",
        "blocks_1_bn1.num_batches_tracked",
    ),
}
