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
