"""Stage 0 of ResNet, the 1st of 4: conv1 to layer1.2."""

from torch import Tensor, nn

from .layers import Bottleneck, BottleneckWithShortcut


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(
            BottleneckWithShortcut(8, 8, 32, stride=1), *(Bottleneck(32, 8) for _ in range(2))
        )

    def forward(self, images: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, images.2, images.3) float32, the model's args[0].

        Returns:
            layer1_out: (B, 32, (images.2 - 1) // 4 + 1, (images.3 - 1) // 4 + 1) float32, for stage
                1.
        """
        # resnet50.py:71-72
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        layer1_out: Tensor = self.layer1(x)
        return layer1_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "bn1",
    "layer1",
)
