"""Least squares of a layer on what it now reads, against what it should give; the ridge is chosen on other rows.

He, Zhang and Sun, "Channel Pruning for Accelerating Very Deep Neural Networks" (2017, arXiv:1707.06168), section 3.1,
reconstruct a layer's output from the inputs that are left, as those now are. What is solved for here is the change of
the weight, so that the ridge draws towards the weight as it stands and not towards zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.prune.obs import factor_of
from compress.prune.statistics import Sums

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Tried on the rows held out, times the mean diagonal of the Gram matrix."""
RIDGE = 1e-2
"""Where nothing is held out."""


@dataclass(frozen=True, eq=False)
class Fit:
    """The change that brings outputs nearer to their targets: y is about x @ weight^T + bias.

    `weight` float64 [groups, out / groups, features], `bias` float64 [groups, out / groups], zeros for a layer that can
    have none. `before`, `after`: mean over rows of the squared distance, summed over outputs; on the rows held out
    where there are some. `ridge` 0: no change was better than none.
    """

    weight: Tensor
    bias: Tensor
    before: float
    after: float
    ridge: float


def fit(learned: Sums, held: Sums | None, free_bias: bool, ridges: Sequence[float] = RIDGES) -> Fit:
    """Return the least squares change for targets y (what the output still lacks), from the rows of both sets.

    The ridge is the one of `ridges` whose solution on `learned` is nearest on `held`, whose rows then join in; RIDGE
    without `held`. A solution that is no better than no change on `held` is not used.
    """
    if held is None or held.n == 0:
        weight, bias = solve(learned, RIDGE, free_bias)
        return Fit(weight, bias, distance(learned), distance(learned, weight, bias), RIDGE)
    tried = [(distance(held, *solve(learned, ridge, free_bias)), ridge) for ridge in ridges]
    after, ridge = min(tried)
    before = distance(held)
    weight, bias = solve(learned + held, ridge, free_bias)
    if after >= before:
        return Fit(torch.zeros_like(weight), torch.zeros_like(bias), before, before, 0.0)
    return Fit(weight, bias, before, after, ridge)


def solve(sums: Sums, ridge: float, free_bias: bool) -> tuple[Tensor, Tensor]:
    """Return (weight [groups, outputs, features], bias [groups, outputs]) of the ridge solution, float64."""
    xx, xy, _ = sums.without_means() if free_bias else sums.plain()
    factors = torch.stack([factor_of(gram, ridge) for gram in xx])
    weight = torch.cholesky_solve(xy, factors).mT
    n = max(sums.n, 1)
    bias = (sums.y - (weight @ sums.x[:, :, None])[:, :, 0]) / n
    return weight, bias if free_bias else torch.zeros_like(bias)


def distance(sums: Sums, weight: Tensor | None = None, bias: Tensor | None = None) -> float:
    """Return the mean over rows of |y - weight x - bias|^2, from the sums alone; without weight that of |y|^2."""
    n = max(sums.n, 1)
    total = sums.yy.sum()
    if weight is not None and bias is not None:
        wx = (weight @ sums.x[:, :, None])[:, :, 0]  # [groups, outputs]
        total = total + ((weight @ sums.xx) * weight).sum() - 2 * (weight * sums.xy.mT).sum()
        total = total + (2 * bias * (wx - sums.y) + sums.n * bias.square()).sum()
    return max(float(total) / n, 0.0)
