"""Stage 0 of conv_net, the 1st of 3: stem.0 to blocks.0.conv2."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # stem
        self.stem_0 = nn.Conv2d(3, 4, kernel_size=3, padding=1)
        self.stem_1 = nn.BatchNorm2d(4)
        self.stem_2 = nn.ReLU()

        # blocks.0
        self.blocks_0_conv1 = nn.Conv2d(4, 4, kernel_size=3, padding=1, bias=False)
        self.blocks_0_bn1 = nn.BatchNorm2d(4)
        self.blocks_0_relu = nn.ReLU(inplace=True)
        self.blocks_0_conv2 = nn.Conv2d(4, 4, kernel_size=3, padding=1, bias=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, 8, 8) float32, the model's args[0].

        Returns:
            stem_2: (B, 4, 8, 8) float32, for stage 1.
            blocks_0_conv2: (B, 4, 8, 8) float32, for stage 1.
        """
        # stem (models.py:41)
        stem_2 = checkpoint(self.stem, images, use_reentrant=False)  # (B, 4, 8, 8)

        # blocks.0 (models.py:27)
        blocks_0_conv2 = checkpoint(self.segment_1, stem_2, use_reentrant=False)
        return stem_2, blocks_0_conv2

    def stem(self, images: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        # stem (models.py:41)
        x = self.stem_0(images)  # (B, 4, 8, 8)
        x = self.stem_1(x)
        stem_2 = self.stem_2(x)
        return stem_2

    def segment_1(self, stem_2: Tensor) -> Tensor:
        """Runs again in the backward; only arguments are kept."""
        # blocks.0 (models.py:26-27)
        out = self.blocks_0_relu(self.blocks_0_bn1(self.blocks_0_conv1(stem_2)))  # (B, 4, 8, 8)
        blocks_0_conv2 = self.blocks_0_conv2(out)
        return blocks_0_conv2


# The module's own names of its state, and the model's.
STATE = {
    "stem_0.weight": "stem.0.weight",
    "stem_0.bias": "stem.0.bias",
    "stem_1.weight": "stem.1.weight",
    "stem_1.bias": "stem.1.bias",
    "stem_1.running_mean": "stem.1.running_mean",
    "stem_1.running_var": "stem.1.running_var",
    "stem_1.num_batches_tracked": "stem.1.num_batches_tracked",
    "blocks_0_conv1.weight": "blocks.0.conv1.weight",
    "blocks_0_bn1.weight": "blocks.0.bn1.weight",
    "blocks_0_bn1.bias": "blocks.0.bn1.bias",
    "blocks_0_bn1.running_mean": "blocks.0.bn1.running_mean",
    "blocks_0_bn1.running_var": "blocks.0.bn1.running_var",
    "blocks_0_bn1.num_batches_tracked": "blocks.0.bn1.num_batches_tracked",
    "blocks_0_conv2.weight": "blocks.0.conv2.weight",
}

# Buffers, by the stage's own names, that a forward in train mode writes to.
WRITES = (
    "stem_1.running_mean",
    "stem_1.running_var",
    "stem_1.num_batches_tracked",
    "blocks_0_bn1.running_mean",
    "blocks_0_bn1.running_var",
    "blocks_0_bn1.num_batches_tracked",
)

# Methods that run again in the backward, with the buffers of WRITES that each reads or writes.
SEGMENTS = {
    "stem": (
        "stem_1.running_mean",
        "stem_1.running_var",
        "stem_1.num_batches_tracked",
    ),
    "segment_1": (
        "blocks_0_bn1.running_mean",
        "blocks_0_bn1.running_var",
        "blocks_0_bn1.num_batches_tracked",
    ),
}
