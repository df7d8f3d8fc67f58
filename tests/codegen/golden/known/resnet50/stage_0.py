"""Stage 0 of ResNet, the 1st of 4: conv1 to layer1.2."""

from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(32, 8, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 32, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))  # (B, 8, 16, 16)
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))  # (B, 32, 16, 16)
        out += x
        relu_out: Tensor = self.relu(out)
        return relu_out


class BottleneckWithShortcut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, 8, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 32, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(32)
        self.shortcut = nn.Sequential(
            nn.Conv2d(8, 32, kernel_size=1, bias=False), nn.BatchNorm2d(32)
        )

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))  # (B, 8, 16, 16)
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))  # (B, 32, 16, 16)
        out += self.shortcut(x)
        relu_out: Tensor = self.relu(out)
        return relu_out


class Stage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BottleneckWithShortcut(), *(Bottleneck() for _ in range(2)))

    def forward(self, images: Tensor) -> Tensor:
        """One micro-batch of B samples; sizes in comments are for it.

        Args:
            images: (B, 3, 64, 64) float32, the model's args[0].

        Returns:
            relu_out: (B, 32, 16, 16) float32, for stage 1.
        """
        # resnet50.py:71
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))  # (B, 8, 16, 16)
        relu_out: Tensor = self.layer1(x)  # (B, 32, 16, 16)
        return relu_out


# Buffers that a forward in train mode writes to; a module stands for all that are in it.
WRITES = (
    "bn1",
    "layer1",
)
