"""What several stages of conv_net have."""

from torch import Tensor, nn


class ResidualPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, kernel_size=3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        # models.py:26-27
        out = self.relu(self.bn1(self.conv1(x)))  # (B, 4, images.2, images.3)
        conv2_out: Tensor = self.conv2(out)
        return conv2_out


class ResidualPart2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, conv2_out: Tensor) -> Tensor:
        # models.py:27-29
        out = self.bn2(conv2_out)  # (B, 4, images.2, images.3)
        out += x
        relu_out: Tensor = self.relu(out)
        return relu_out
