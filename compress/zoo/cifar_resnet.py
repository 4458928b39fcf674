"""The CIFAR-10 residual networks of He et al., "Deep Residual Learning for Image Recognition" (2015), section 4.2.

Shortcuts are option A: where the width grows they take every second pixel and pad the new channels with zeros, so they
hold no weights. Parameter names are those of the public checkpoints of akamaster/pytorch_resnet_cifar10.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """relu(x + f(x)) with two 3 x 3 convolutions."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.n_new_channels = channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(h)) + self.shortcut(x)).relu()

    def shortcut(self, x: Tensor) -> Tensor:
        if self.n_new_channels == 0:
            return x
        before = self.n_new_channels // 2
        subsampled = x[:, :, :: self.stride, :: self.stride]  # [N, in, H / stride, W / stride]
        return F.pad(subsampled, (0, 0, 0, 0, before, self.n_new_channels - before))


class CifarResNet(nn.Module):
    """3 x 3 stem, three stages of `n_blocks` blocks at widths 16, 32, 64, mean over the pixels, linear classifier."""

    def __init__(self, n_blocks: int, n_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _make_stage(16, 16, n_blocks, stride=1)
        self.layer2 = _make_stage(16, 32, n_blocks, stride=2)
        self.layer3 = _make_stage(32, 64, n_blocks, stride=2)
        self.linear = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits float32 [N, 10] of images float32 [N, 3, 32, 32].

        The published weights take pixels of 0..1 less the mean (.485, .456, .406), over the std (.229, .224, .225).
        """
        x = self.bn1(self.conv1(x)).relu()
        x = self.layer3(self.layer2(self.layer1(x)))  # [N, 64, 8, 8]
        return self.linear(x.mean(dim=(2, 3)))


def resnet20(n_classes: int = 10) -> CifarResNet:
    """Return a network of three blocks a stage; 0.27 million parameters."""
    return CifarResNet(3, n_classes)


def resnet56(n_classes: int = 10) -> CifarResNet:
    """Return a network of nine blocks a stage; 0.85 million parameters."""
    return CifarResNet(9, n_classes)


def _make_stage(in_channels: int, channels: int, n_blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(n_blocks - 1)))
