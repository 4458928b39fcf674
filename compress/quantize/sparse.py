"""Weights that an earlier pass set to zero: whatever rounds or learns leaves them zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 0.05
"""Share of exact zeros from which they are taken for a pass's work; a trained weight has fewer by chance."""


def zeros_to_keep(weight: Tensor) -> Tensor | None:
    """Return a mask of the exact zeros of `weight`, where they are LEAST of it or more; else None: it is dense."""
    zeros = weight == 0
    return zeros if int(zeros.sum()) >= LEAST * zeros.numel() else None


def keep_zeros(levels: Tensor, gone: Tensor, zero_points: Tensor | None) -> None:
    """Set `levels` (changed in place) to what stands for zero where `gone`; all of one shape."""
    if zero_points is None:
        levels.masked_fill_(gone, 0)
    else:
        levels.copy_(zero_points.where(gone, levels))
