"""A layer's weight as matrices [groups, out, in] and what they multiply as rows [groups, n, in]. Torch.

Of a convolution, `in` runs over the positions of the kernel and, fastest, over the channels: the M inputs of an N:M
pattern are then channels at one position, which is what sparse tensor cores take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from compress.blocks.trace import CONVOLUTIONS
from compress.prune.layers import windows

CHUNK = 1 << 24
"""Numbers of patches that are held at once."""


def groups_of(layer: nn.Module) -> int:
    """Return the number of groups of a convolution; 1 for other layers."""
    return int(getattr(layer, "groups", 1))


def as_matrices(weight: Tensor, groups: int = 1) -> Tensor:
    """Return a weight [out, in, *kernel] as [groups, out / groups, kernel * in]."""
    return weight.movedim(1, -1).reshape(groups, len(weight) // groups, -1)


def as_weight(matrices: Tensor, shape: Sequence[int]) -> Tensor:
    """Return matrices as the weight [out, in, *kernel], which is `shape`: the inverse of `as_matrices`."""
    out, inputs, *kernel = shape
    return matrices.reshape(out, *kernel, inputs).movedim(-1, 1).contiguous()


def inputs_of(layer: nn.Module, x: Tensor, rows: Tensor | None = None) -> Iterator[Tensor]:
    """Yield what the weight multiplies for the input `x`, in parts [groups, n, in].

    `rows` [B, T]: False where padding is, which is left out where `x` has that shape; not of a convolution.
    """
    if isinstance(layer, CONVOLUTIONS):
        size = math.prod(layer.kernel_size) * x[0].numel()
        for part in x.split(max(1, CHUNK // size)):
            yield patches(layer, part)
        return
    flat = x.reshape(-1, x.shape[-1])
    if rows is not None and len(flat) == rows.numel():
        flat = flat[rows.reshape(-1)]
    yield flat[None]


def patches(layer: Any, x: Tensor) -> Tensor:
    """Return [groups, n, kernel * in / groups]: what each output of a convolution is a product with.

    `x` [N, in, *size].
    """
    seen = windows(layer, x)  # [N, in, *places, *taps]
    n_space = len(layer.kernel_size)
    last = seen.permute(0, *range(2, 2 + 2 * n_space), 1)  # [N, *places, *taps, in]
    kernel, channels = math.prod(layer.kernel_size), x.shape[1]
    grouped = last.reshape(-1, kernel, layer.groups, channels // layer.groups)
    return grouped.permute(2, 0, 1, 3).reshape(layer.groups, len(grouped), -1)
