"""Stage 1 of ResNet, the 2nd of 4: layer2.0.conv1 to layer2.3."""

from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(64, 16, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(16, 16, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 64, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))  # (B, 16, 8, 8)
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))  # (B, 64, 8, 8)
        out += x
        relu_out: Tensor = self.relu(out)
        return relu_out


class BottleneckWithShortcut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(32, 16, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(16, 16, kernel_size=3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 64, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(64)
        self.shortcut = nn.Sequential(
            nn.Conv2d(32, 64, kernel_size=1, stride=2, bias=False), nn.BatchNorm2d(64)
        )

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))  # (B, 16, 16, 16)
        out = self.relu(self.bn2(self.conv2(out)))  # (B, 16, 8, 8)
        out = self.bn3(self.conv3(out))  # (B, 64, 8, 8)
        out += self.shortcut(x)
        relu_out: Tensor = self.relu(out)
        return relu_out


class Stage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer2 = nn.Sequential(BottleneckWithShortcut(), *(Bottleneck() for _ in range(3)))

    def forward(self, relu_out: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            relu_out: (B, 32, 16, 16) float32, from stage 0, made at resnet50.py:51.

        Returns:
            relu_out: (B, 64, 8, 8) float32, for stage 2.
        """
        relu_out = self.layer2(relu_out)  # (B, 64, 8, 8)
        return relu_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("layer2",)
