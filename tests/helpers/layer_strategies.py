"""Layers for hypothesis: small convolutions of any kind, with inputs that they can read."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def convolutions(draw: st.DrawFn, dimensions: int = 3) -> tuple[nn.Module, Tensor]:
    """A convolution over up to `dimensions` axes, strided, dilated, grouped, padded or not, and a batch that fits."""
    n = draw(st.integers(1, dimensions))
    groups, each, width = (draw(st.integers(1, 3)) for _ in range(3))
    kernel, stride, dilation, padding = (
        tuple(draw(st.integers(least, most)) for _ in range(n)) for least, most in ((1, 3), (1, 3), (1, 2), (0, 2))
    )
    same = draw(st.booleans()) and set(stride) == {1}
    size = [draw(st.integers(max(3, d * (k - 1) + 1), 7)) for d, k in zip(dilation, kernel, strict=True)]
    torch.manual_seed(draw(st.integers(0, 99)))
    layer = CONVOLUTIONS[n](
        groups * each,
        groups * width,
        kernel,
        stride=stride,
        padding="same" if same else padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    )
    return layer.requires_grad_(False), torch.randn(draw(st.integers(1, 3)), groups * each, *size)


class SmallNet(nn.Module):
    """x [n, 3, 6, 6] -> stem, blocks of three convolutions, with batch norm and a sum or not -> logits [n, 4]."""

    def __init__(self, width: int, blocks: list[tuple[int, bool, bool, int]]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 4)
        self.first = nn.ModuleList(nn.Conv2d(width, inner, 3, padding=1) for inner, *_ in blocks)
        self.norms = nn.ModuleList(nn.BatchNorm2d(inner) if normed else nn.Identity() for inner, normed, *_ in blocks)
        self.middle = nn.ModuleList(
            nn.Conv2d(inner, inner, 1, groups=inner if groups == 0 else 1) for inner, _, _, groups in blocks
        )
        self.last = nn.ModuleList(nn.Conv2d(inner, width, 1) for inner, *_ in blocks)
        self.sums = [residual for _, _, residual, _ in blocks]

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        for first, norm, middle, last, residual in zip(
            self.first, self.norms, self.middle, self.last, self.sums, strict=True
        ):
            inner = last(middle(norm(first(h)).relu()))
            h = inner + h if residual else inner
        return self.head(h.relu().mean((2, 3)))


@st.composite
def small_nets(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A net whose weights, biases and running statistics are random, and a batch."""
    block = st.tuples(st.integers(2, 6), st.booleans(), st.booleans(), st.integers(0, 1))
    torch.manual_seed(draw(st.integers(0, 99)))
    net = SmallNet(draw(st.integers(2, 6)), draw(st.lists(block, min_size=1, max_size=3))).requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1, 2)
            nn.init.normal_(module.bias)
            module(torch.randn(4, module.num_features, 2, 2))
    return net.eval(), torch.randn(draw(st.integers(1, 3)), 3, 6, 6)
