"""A small residual CNN for scikit-learn's handwritten digits (8 x 8 grey pixels, ten classes); 110,810 parameters.

Its weights and data lie in `digits/`, written by `python -m compress.zoo.train_digits`. Both stages keep the full 8 x 8
resolution, which leaves enough work per weight for int8 to be measurably faster.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

DIGITS = Path(__file__).parent / "digits"
"""Folder of digits_resnet.safetensors, train.npz and test.npz."""
MEAN, STD = 0.305, 0.376
"""Of the training pixels, once scaled to 0..1: the `mean` and `std` of the preprocessing."""


class Block(nn.Module):
    """relu(x + f(x)) with two 3 x 3 convolutions; a 1 x 1 convolution on the shortcut where the width changes."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if in_channels != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(in_channels, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn1(self.conv1(x)).relu()  # [N, channels, 8, 8]
        return (self.bn2(self.conv2(h)) + self.shortcut(x)).relu()


class DigitsResNet(nn.Module):
    """Stem, one block of each width, mean over the pixels, linear classifier."""

    def __init__(self, widths: tuple[int, int] = (48, 64), n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layer1 = Block(widths[0], widths[0])
        self.layer2 = Block(widths[0], widths[1])
        self.linear = nn.Linear(widths[1], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float32 [N, 10] of images float32 [N, 1, 8, 8], normalised by MEAN and STD."""
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer2(self.layer1(x))  # [N, 64, 8, 8]
        return self.linear(x.mean(dim=(2, 3)))


def digits_resnet() -> DigitsResNet:
    """Return the network, with fresh weights."""
    return DigitsResNet()
