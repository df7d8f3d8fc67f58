"""Stage 1 of conv_net, the 2nd of 3: blocks.0.bn2 to blocks.1.conv2."""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .layers import ResidualPart, ResidualPart2


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": ResidualPart2(), "1": ResidualPart()})

    def forward(self, conv2_out: Tensor, stem_out: Tensor) -> tuple[Tensor, Tensor]:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            conv2_out: (B, 4, images.2, images.3) float32, from stage 0, made at models.py:27.
            stem_out: (B, 4, images.2, images.3) float32, from stage 0, made at models.py:41.

        Returns:
            blocks_0: (B, 4, images.2, images.3) float32, for stage 2.
            conv2_out: (B, 4, images.2, images.3) float32, for stage 2.
        """
        # models.py:42
        blocks_0 = checkpoint(self.blocks["0"], stem_out, conv2_out, use_reentrant=False)
        conv2_out = checkpoint(self.blocks["1"], blocks_0, use_reentrant=False)
        return blocks_0, conv2_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("blocks",)

# What runs again in the backward: modules and methods, with what of WRITES each reads or writes.
SEGMENTS = {
    **{f"blocks.{i}": (f"blocks.{i}",) for i in range(2)},
}
