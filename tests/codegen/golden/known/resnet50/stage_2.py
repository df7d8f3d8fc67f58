"""Stage 2 of ResNet, the 3rd of 4: layer3.0.conv1 to layer3.4."""

from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(128, 32, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(32, 32, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 128, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(128)

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))  # (B, 32, 4, 4)
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))  # (B, 128, 4, 4)
        out += x
        relu_out: Tensor = self.relu(out)
        return relu_out


class BottleneckWithShortcut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(64, 32, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(32, 32, kernel_size=3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 128, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(128)
        self.shortcut = nn.Sequential(
            nn.Conv2d(64, 128, kernel_size=1, stride=2, bias=False), nn.BatchNorm2d(128)
        )

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))  # (B, 32, 8, 8)
        out = self.relu(self.bn2(self.conv2(out)))  # (B, 32, 4, 4)
        out = self.bn3(self.conv3(out))  # (B, 128, 4, 4)
        out += self.shortcut(x)
        relu_out: Tensor = self.relu(out)
        return relu_out


class Stage2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer3 = nn.Sequential(BottleneckWithShortcut(), *(Bottleneck() for _ in range(4)))

    def forward(self, relu_out: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            relu_out: (B, 64, 8, 8) float32, from stage 1, made at resnet50.py:51.

        Returns:
            relu_out: (B, 128, 4, 4) float32, for stage 3.
        """
        relu_out = self.layer3(relu_out)  # (B, 128, 4, 4)
        return relu_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = ("layer3",)
