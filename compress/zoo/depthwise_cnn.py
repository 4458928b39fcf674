"""A small network of depthwise convolutions for 32 x 32 images, of MobileNetV2's blocks (arXiv:1801.04381)."""

from __future__ import annotations

from torch import Tensor, nn

STAGES = ((24, 1, 1), (48, 2, 2), (96, 2, 2))
"""Channels, blocks and the first one's stride."""


class InvertedBlock(nn.Module):
    """1 x 1 to `expand` times the channels, 3 x 3 depthwise, 1 x 1 back; with a shortcut where nothing changes size."""

    def __init__(self, n_in: int, n_out: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        wide = expand * n_in
        self.layers = nn.Sequential(
            *_layer(n_in, wide, 1),
            nn.ReLU6(),
            *_layer(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            *_layer(wide, n_out, 1),
        )
        self.keeps_size = stride == 1 and n_in == n_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.keeps_size else y


def depthwise_cnn(n_classes: int = 10) -> nn.Sequential:
    """Return the network with random weights: float32 [N, 3, 32, 32] -> logits [N, classes]; 0.2 million weights."""
    layers: list[nn.Module] = [*_layer(3, 16, 3, 2), nn.ReLU6()]
    width = 16
    for channels, n_blocks, stride in STAGES:
        for place in range(n_blocks):
            layers.append(InvertedBlock(width, channels, stride if place == 0 else 1))
            width = channels
    head = [*_layer(width, 256, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, n_classes)]
    return nn.Sequential(*layers, *head)


def _layer(n_in: int, n_out: int, size: int, stride: int = 1, groups: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(n_in, n_out, size, stride, size // 2, groups=groups, bias=False)
    return convolution, nn.BatchNorm2d(n_out)
