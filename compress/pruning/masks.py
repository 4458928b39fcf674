"""Choose which weights become zero, by a score for each, and fit those that stay again. Torch.

The lowest of each row, of a layer, or of each M inputs become zero, at once or in rounds. Magnitude: |w| (Han et al.
2015, arXiv:1506.02626). Wanda: |w| times the norm of the input that it multiplies (Sun et al. 2023, arXiv:2306.11695,
equation 1). Weights are [groups, out, in], as `compress.pruning.matrix` gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from compress.pruning.sparsity import Sparsity

Scope = Literal["row", "layer"]
"""Within what the share is taken: of each output's weights, or of all."""
TINY = 1e-30
"""Keeps a division by the length of a direction that is all zero finite."""
REFIT_STEPS = 10
"""With 2:4 tinystories656k has 4.084 nats per token without any, 3.953 after 3, 3.937 after 10, 3.939 after 30."""


def lowest(scores: Tensor, k: int) -> Tensor:
    """Return a mask that is True at the `k` lowest of each row [rows, n]; of equal ones the first."""
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    edge = scores.kthvalue(k, dim=1, keepdim=True).values
    below, equal = scores < edge, scores == edge
    missing = k - below.sum(1, keepdim=True)
    return below | (equal & (equal.cumsum(1) <= missing))


def choose_zeros(scores: Tensor, sparsity: Sparsity, scope: Scope) -> Tensor:
    """Return a mask that is True where a weight becomes zero, for scores [groups, out, in]; M divides `in`."""
    width = sparsity.group or (scores.shape[-1] if scope == "row" else scores.numel())
    rows = scores.reshape(-1, width)
    k = sparsity.group - sparsity.kept if sparsity.group else sparsity.count(width)
    return lowest(rows, k).reshape(scores.shape)


def wanda_scores(weight: Tensor, gram: Tensor) -> Tensor:
    """Return |W_ij| |x_j|: `weight` [groups, out, in], `gram` [groups, in, in] is X^T X / n."""
    return weight.abs() * gram.diagonal(dim1=1, dim2=2).sqrt()[:, None]


def round_shares(sparsity: float, rounds: int) -> tuple[float, ...]:
    """Return the share of zeros after each round; each takes the same part of what is left, the last is `sparsity`.

    As the lottery ticket is found (Frankle & Carbin 2019, arXiv:1803.03635, section 1).
    """
    return tuple(1 - (1 - sparsity) ** (number / rounds) for number in range(1, rounds + 1))


def smallest(weights: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Return layer -> mask, True at the `share` of all weights of least magnitude; of equal ones the first.

    What is zero already is among them.
    """
    magnitudes = torch.cat([weight.detach().abs().reshape(-1) for weight in weights.values()])
    mask = lowest(magnitudes[None], round(share * len(magnitudes)))[0]
    parts = mask.split([weight.numel() for weight in weights.values()])
    return {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}


def set_to_zero(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """Set weights to zero where a mask is True, in place."""
    with torch.no_grad():
        for name, mask in masks.items():
            weights[name].masked_fill_(mask, 0.0)


def refit(weight: Tensor, sparse: Tensor, gram: Tensor, steps: int = REFIT_STEPS) -> Tensor:
    """Return `sparse` [groups, out, in] after `steps` steps; its zeros stay, the error never rises.

    `weight`: what it was made from. `gram` [groups, in, in]: X^T X / n, damped so that it is positive.

    Conjugate gradients on tr((W - S) G (W - S)^T) over the weights that are not zero, all rows at once, each
    preconditioned with the diagonal of G (Hestenes & Stiefel 1952; Saad 2003, algorithm 9.1).
    """
    stays = sparse != 0
    diagonal = gram.diagonal(dim1=1, dim2=2)[:, None]  # [groups, 1, in]
    solution = sparse.clone()
    residual = ((weight - sparse) @ gram).mul_(stays)
    direction = residual / diagonal
    power = (residual * direction).sum(-1, keepdim=True)  # [groups, out, 1]
    for _ in range(steps):
        image = (direction @ gram).mul_(stays)
        length = power / (direction * image).sum(-1, keepdim=True).clamp_min(TINY)
        solution += length * direction
        residual -= length * image
        scaled = residual / diagonal
        last, power = power, (residual * scaled).sum(-1, keepdim=True)
        direction = scaled + power / last.clamp_min(TINY) * direction
    return torch.where(stays, solution, 0.0)
