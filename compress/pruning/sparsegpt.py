"""SparseGPT: weights zeroed column by column, each error made up for by the weights not yet passed. Torch.

Frantar & Alistarh, SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot (2023, arXiv:2301.00774),
algorithm 1. Deviations: counts of zeros are rounded so that the whole weight has the share that was asked for; inputs
that were always zero are scored as if damping were all that is known of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compress.pruning.masks import lowest
from compress.pruning.sparsity import Sparsity
from compress.rounding.gptq import Hessian

BLOCK = 128
"""Inputs among which the zeros of a share are chosen, and whose updates reach the rest of the weight at once."""


def sparsegpt(weight: Tensor, hessians: Sequence[Hessian], sparsity: Sparsity, block: int = BLOCK) -> Tensor:
    """Return `weight` [groups, out, in] with zeros, float32; the others changed so that the outputs change little.

    `hessians`: one for each group, of `factor_hessian` without `act_order`. The zeros of a share are the lowest scores
    of each `block` inputs; those of a pattern, of each M inputs of a row.
    """
    left = weight.float().transpose(1, 2).clone(memory_format=torch.contiguous_format)  # [groups, in, out]
    carry = torch.stack([hessian.carry for hessian in hessians])  # [groups, in, in]
    costs = torch.stack([_find_costs(hessian) for hessian in hessians])[:, :, None]
    owed = torch.zeros_like(left)
    n, group = left.shape[1], sparsity.group
    size = max(block // group, 1) * group if group else block
    for start in range(0, n, size):
        stop = min(start + size, n)
        errors = left.new_zeros(len(left), stop - start, left.shape[2])
        for first in range(start, stop, group or size):
            last = min(first + (group or size), stop)
            done = first - start
            owed[:, first:last] += carry[:, start:first, first:last].mT @ errors[:, :done]
            among = carry[:, first:last, first:last].mT
            kept = torch.linalg.solve_triangular(among, owed[:, first:last], upper=False, unitriangular=True)
            scores = ((left[:, first:last] + kept) * costs[:, first:last]).square()  # as if none of these went
            drop = _choose_zeros(scores, first, sparsity)
            for column in range(first, last):
                k = column - start
                value = left[:, column] + owed[:, column]
                value += (carry[:, first:column, column, None].mT @ errors[:, done:k])[:, 0]
                value.masked_fill_(drop[:, column - first], 0.0)
                torch.sub(left[:, column], value, out=errors[:, k])
                left[:, column] = value
        owed[:, stop:] += carry[:, start:stop, stop:].mT @ errors
    return left.transpose(1, 2).contiguous()


def _choose_zeros(scores: Tensor, first: int, sparsity: Sparsity) -> Tensor:
    """Return a mask that is True where a weight goes, of the inputs from `first` on; `scores` [groups, in, out]."""
    groups, width, out = scores.shape
    if sparsity.group:
        rows = scores.transpose(1, 2).reshape(-1, width)
        return lowest(rows, width - sparsity.kept).reshape(groups, out, width).transpose(1, 2)
    each = groups * out
    k = sparsity.count(each * (first + width)) - sparsity.count(each * first)
    return lowest(scores.reshape(1, -1), k).reshape(scores.shape)


def _find_costs(hessian: Hessian) -> Tensor:
    """Return for each input [in] what a weight is multiplied by for its score: the factor's diagonal."""
    live = hessian.added[~hessian.dead]
    unknown = live.amin().sqrt() if len(live) else hessian.added.new_ones(())
    return torch.where(hessian.dead, unknown.float(), hessian.pivots)
