"""Iterative magnitude pruning: how much is zero after each round, and which weights that is. Torch.

As the lottery ticket is found (Frankle & Carbin 2019, arXiv:1803.03635, section 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from compress.prune.masks import global_counts, lowest

Within = Literal["layer", "global"]


def round_shares(sparsity: float, rounds: int) -> tuple[float, ...]:
    """Return the share of zeros after each round; each takes the same part of what is left, the last is `sparsity`."""
    return tuple(1 - (1 - sparsity) ** (number / rounds) for number in range(1, rounds + 1))


def smallest(weights: Mapping[str, Tensor], share: float, within: Within) -> dict[str, Tensor]:
    """Return layer -> mask, True at the weights of least magnitude; of equal ones the first.

    `share`: of each layer's weights or of all. What is zero already is among them.
    """
    sizes = {name: weight.numel() for name, weight in weights.items()}
    if within == "global":
        counts = global_counts(lambda name: weights[name].detach(), sizes, share)
    else:
        counts = {name: round(share * size) for name, size in sizes.items()}
    return {
        name: lowest(weight.detach().abs().reshape(1, -1), counts[name]).reshape(weight.shape)
        for name, weight in weights.items()
    }


def set_to_zero(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Set weights to zero where a mask is True, in place."""
    with torch.no_grad():
        for name, mask in masks.items():
            weights[name].masked_fill_(mask, 0.0)
