"""Stage 1 of ResNet, the 2nd of 4: layer2.0.conv1 to layer2.3."""

from torch import Tensor, nn

from .layers import Bottleneck, BottleneckWithShortcut


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer2 = nn.Sequential(
            BottleneckWithShortcut(32, 16, 64, stride=2), *(Bottleneck(64, 16) for _ in range(3))
        )

    def forward(self, layer1_out: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            layer1_out: (B, 32, (images.2 - 1) // 4 + 1, (images.3 - 1) // 4 + 1) float32, from
                stage 0, made at resnet50.py:51.

        Returns:
            layer2_out: (B, 64, (images.2 - 1) // 8 + 1, (images.3 - 1) // 8 + 1) float32, for stage
                2.
        """
        # resnet50.py:72
        layer2_out: Tensor = self.layer2(layer1_out)
        return layer2_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("layer2",)
