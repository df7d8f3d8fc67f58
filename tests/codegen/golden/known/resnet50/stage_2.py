"""Stage 2 of ResNet, the 3rd of 4: layer3.0.conv1 to layer3.4."""

from torch import Tensor, nn

from .layers import Bottleneck, BottleneckWithShortcut


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer3 = nn.Sequential(
            BottleneckWithShortcut(64, 32, 128, stride=2), *(Bottleneck(128, 32) for _ in range(4))
        )

    def forward(self, layer2_out: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            layer2_out: (B, 64, (images.2 - 1) // 8 + 1, (images.3 - 1) // 8 + 1) float32, from
                stage 1, made at resnet50.py:51.

        Returns:
            layer3_4: (B, 128, (images.2 - 1) // 16 + 1, (images.3 - 1) // 16 + 1) float32, for
                stage 3.
        """
        # resnet50.py:72
        layer3_4: Tensor = self.layer3(layer2_out)
        return layer3_4


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("layer3",)
