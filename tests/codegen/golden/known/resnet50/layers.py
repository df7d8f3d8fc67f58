"""What several stages of ResNet have."""

from torch import Tensor, nn


class Bottleneck(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv3 = nn.Conv2d(out_channels, in_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(in_channels)

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        relu_out: Tensor = self.relu(out)
        return relu_out


class BottleneckWithShortcut(nn.Module):
    def __init__(
        self, in_channels: int, out_channels: int, out_channels_2: int, stride: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(
            out_channels, out_channels, kernel_size=3, padding=1, bias=False, stride=stride
        )
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv3 = nn.Conv2d(out_channels, out_channels_2, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels_2)
        self.shortcut = nn.Sequential(
            nn.Conv2d(in_channels, out_channels_2, kernel_size=1, bias=False, stride=stride),
            nn.BatchNorm2d(out_channels_2),
        )

    def forward(self, x: Tensor) -> Tensor:
        # resnet50.py:47-51
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.shortcut(x)
        relu_out: Tensor = self.relu(out)
        return relu_out
