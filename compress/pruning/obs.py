"""Which units to remove, one after another, so that least squares on the rest lose least. Float64 tensors.

Hassibi and Stork, "Second order derivatives for network pruning: Optimal Brain Surgeon" (1993), on the layer's own
squared error as in Optimal BERT Surgeon (Kurtic et al. 2022, arXiv:2203.07259, equation 3), a unit being a block of
columns: removing unit u of W [out, features] with H = X^T X / n costs tr(W_u (H^-1_uu)^-1 W_u^T) when the other columns
make up for it by - W_u (H^-1_uu)^-1 H^-1_u,: .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compress.errors import PassError

DAMPING = 1e-5
"""Added to the Gram matrix's diagonal, times its mean: a feature that never varies must not be worth anything."""

MOST_DAMPING = 1e-2
"""Rounding beyond that leaves nothing to fit."""


@dataclass(frozen=True, eq=False)
class ReadingLayer:
    """A layer that reads the units: `weight` [out, features], `gram` [features, features] = E[x x^T], or without means
    where a bias can follow; `features` int64 [n_units, k], those that each unit is."""

    weight: Tensor
    gram: Tensor
    features: np.ndarray


@dataclass(frozen=True, eq=False)
class Elimination:
    """`order`: units in the order of their removal, int64. `errors[j]`: what the outputs are off after the first j + 1,
    the squares summed over outputs and averaged over rows, the rest re-fitted; float64, rising."""

    order: np.ndarray
    errors: np.ndarray

    def error_at(self, n_kept: int, n_units: int) -> float:
        """Return the error with `n_kept` of the units left."""
        return 0.0 if n_kept >= n_units else float(self.errors[n_units - n_kept - 1])

    def choose_kept(self, n_kept: int, n_units: int) -> np.ndarray:
        """Return the units that remain, in rising order, int64."""
        return np.setdiff1d(np.arange(n_units), self.order[: n_units - n_kept])


def eliminate(reading_layers: Sequence[ReadingLayer], n_left: int = 1, share: float = 0.01) -> Elimination:
    """Remove units until `n_left` are left, each time those whose loss, summed over all input groups, is least.

    `share` of the remaining units (rounded down, at least one) go at a time, which wide layers need: the inverse is
    updated once for them all. What they cost together is exact; how it falls on each of them is in proportion to their
    own cost. PassError where `n_left` is below 1 or input groups differ in their number of units.
    """
    n_units = len(reading_layers[0].features)
    if n_left < 1 or any(len(reading_layer.features) != n_units for reading_layer in reading_layers):
        raise PassError(f"eliminate: {n_left} of {[len(r.features) for r in reading_layers]} units cannot be left")
    work = [_LayerElimination(reading_layer) for reading_layer in reading_layers]
    remaining = np.arange(n_units)
    order: list[int] = []
    errors: list[float] = []
    while len(remaining) > n_left:
        scores = torch.stack([one.scores(remaining) for one in work]).sum(0).numpy()
        n = min(max(1, int(share * len(remaining))), len(remaining) - n_left)
        least = np.sort(np.argsort(scores, kind="stable")[:n])
        least = least[np.argsort(scores[least], kind="stable")]
        cost = sum(one.remove(remaining[least]) for one in work)
        shares = np.cumsum(scores[least]) / max(scores[least].sum(), 1e-300)
        errors += [*((errors[-1] if errors else 0.0) + cost * shares)]
        order += [int(unit) for unit in remaining[least]]
        remaining = np.delete(remaining, least)
    return Elimination(np.array(order, np.int64), np.array(errors, np.float64))


class _LayerElimination:
    """One layer whose inputs are eliminated: the weight and the inverse, both brought up to date after each removal."""

    def __init__(self, reading_layer: ReadingLayer) -> None:
        self.features = torch.from_numpy(np.ascontiguousarray(reading_layer.features))
        self.weight = reading_layer.weight.double().clone()
        self.inverse = torch.cholesky_inverse(factor_of(reading_layer.gram, DAMPING))

    def scores(self, units: np.ndarray) -> Tensor:
        """Return what removing each of the units alone would cost, [len(units)]."""
        features = self.features[torch.from_numpy(units)]  # [u, k]
        blocks = self.inverse[features[:, :, None], features[:, None, :]]  # [u, k, k]
        columns = self.weight[:, features].permute(1, 2, 0)  # [u, k, out]
        return (columns * _solve(blocks, columns)).sum((1, 2))

    def remove(self, units: np.ndarray) -> float:
        """Remove units together, the others making up for them; return what that costs."""
        features = self.features[torch.from_numpy(units)].reshape(-1)
        columns = self.weight[:, features].T  # [k, out]
        rows = self.inverse[features]  # [k, features]
        factors = _solve(rows[:, features], torch.cat([columns, rows], 1))
        n_out = len(self.weight)
        cost = float((columns * factors[:, :n_out]).sum())
        self.weight -= columns.T @ factors[:, n_out:]
        self.inverse -= rows.T @ factors[:, n_out:]
        self.weight[:, features] = 0
        return max(cost, 0.0)


def factor_of(gram: Tensor, damping: float) -> Tensor:
    """Return the damped Gram matrix's Cholesky factor, float64.

    Where rounding has made it indefinite the damping is raised above the rounding; PassError beyond MOST_DAMPING.
    """
    while True:
        factor, failed = torch.linalg.cholesky_ex(damp_diagonal(gram, damping))
        if not int(failed):
            return factor
        if damping >= MOST_DAMPING:
            raise PassError(
                f"least squares: inputs that hardly vary against their mean cannot be told from rounding (feature "
                f"{int(failed) - 1} of {len(gram)}, damping {damping:g}); give more calibration data, or choose "
                "importance: l2 with compensate: false"
            )
        damping *= 10


def damp_diagonal(gram: Tensor, damping: float = DAMPING) -> Tensor:
    """Return a float64 copy with `damping` times its mean diagonal added to the diagonal; the identity for zeros."""
    matrix = gram.double().clone()
    diagonal = matrix.diagonal()
    mean = float(diagonal.mean())
    diagonal += damping * mean if mean > 0 else 1.0
    return matrix


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Return matrix^-1 right for symmetric positive definite matrices."""
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrix))


def compensate_weight(reading_layer: ReadingLayer, units: np.ndarray) -> Tensor:
    """Return the weight [out, features], float64, with zeros for `units`, and the others making up for them."""
    features = np.arange(reading_layer.weight.shape[1])
    kept = torch.from_numpy(np.setdiff1d(features, reading_layer.features[units].reshape(-1)))
    gram = damp_diagonal(reading_layer.gram)
    weight = reading_layer.weight.double()
    compensated = torch.zeros_like(weight)
    compensated[:, kept] = _solve(gram[kept][:, kept], gram[kept] @ weight.T).T
    return compensated
