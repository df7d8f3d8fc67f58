"""Stage 3 of ResNet, the 4th of 4: layer3.5.conv1 to fc."""

import torch.nn.functional as F
from torch import Tensor, nn

from .layers import Bottleneck, BottleneckWithShortcut


class Stage3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer3 = nn.ModuleDict({"5": Bottleneck(128, 32)})
        self.layer4 = nn.Sequential(
            BottleneckWithShortcut(128, 64, 256, stride=2), *(Bottleneck(256, 64) for _ in range(2))
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(256, 10)

    def forward(self, layer3_4: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            layer3_4: (B, 128, (images.2 - 1) // 16 + 1, (images.3 - 1) // 16 + 1) float32, from
                stage 2, made at resnet50.py:51.

        Returns:
            fc_out: (B, 10) float32, for the caller.
        """
        # resnet50.py:72-74
        x = self.layer4(self.layer3["5"](layer3_4))
        x = self.avgpool(x).flatten(1)  # (B, 256)
        fc_out: Tensor = self.fc(x)  # (B, 10)
        return fc_out

    def loss(self, fc_out: Tensor, target: Tensor) -> Tensor:
        """The loss of one micro-batch.

        Args:
            fc_out: (B, 10) float32, what forward returned.
            target: (B,) int64, the target.
        """
        loss = F.cross_entropy(fc_out, target)
        return loss


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "layer3",
    "layer4",
)
