"""A layer's weight as matrices [groups, out, in] and what they multiply as rows [groups, n, in]. Torch.

Of a convolution, `in` runs over the positions of the kernel and, fastest, over the channels: the M inputs of an N:M
pattern are then channels at one position, which is what sparse tensor cores take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.blocks.trace import CONVOLUTIONS

CHUNK = 1 << 24
"""Numbers of patches that are held at once."""


def groups_of(layer: nn.Module) -> int:
    """Of a convolution; 1 for others."""
    return int(getattr(layer, "groups", 1))


def as_matrices(weight: Tensor, groups: int = 1) -> Tensor:
    """[out, in, *kernel] as [groups, out / groups, kernel * in]."""
    return weight.movedim(1, -1).reshape(groups, len(weight) // groups, -1)


def as_weight(matrices: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of `as_matrices`: [out, in, *kernel], which is `shape`."""
    out, inputs, *kernel = shape
    return matrices.reshape(out, *kernel, inputs).movedim(-1, 1).contiguous()


def inputs_of(layer: nn.Module, x: Tensor, rows: Tensor | None = None) -> Iterator[Tensor]:
    """What the weight multiplies for the input `x`, in parts [groups, n, in].

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
    """[groups, n, kernel * in / groups]: what each output of a convolution is a product with; `x` [N, in, *size]."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padding = layer._reversed_padding_repeated_twice  # as torch itself pads; numbers also where padding is "same"
    x = functional.pad(x, padding, mode)
    reach = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    counts = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, layer.stride, strict=True)]
    taken = []
    for offsets in itertools.product(*map(range, layer.kernel_size)):
        starts = [o * d for o, d in zip(offsets, layer.dilation, strict=True)]
        spans = zip(starts, counts, layer.stride, strict=True)
        taken.append(x[(slice(None), slice(None), *(slice(a, a + s * (c - 1) + 1, s) for a, c, s in spans))])
    found = torch.stack(taken, 2).flatten(3)  # [N, in, kernel, positions]
    n, channels, kernel, positions = found.shape
    grouped = found.reshape(n, layer.groups, channels // layer.groups, kernel, positions)
    return grouped.permute(1, 0, 4, 3, 2).reshape(layer.groups, n * positions, -1)
