"""The weights that stay, fitted again so that a layer's outputs change least: least squares, row by row. Torch.

Conjugate gradients on tr((W - S) G (W - S)^T) over the weights that are not zero, all rows at once, each preconditioned
with the diagonal of G (Hestenes & Stiefel 1952; Saad 2003, algorithm 9.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-30


def refit(weight: Tensor, sparse: Tensor, gram: Tensor, steps: int) -> Tensor:
    """Return `sparse` [groups, out, in] after `steps` steps; its zeros stay, the error never rises.

    `weight`: what it was made from. `gram` [groups, in, in]: X^T X / n, damped so that it is positive.
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
