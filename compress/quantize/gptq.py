"""GPTQ: rounding a weight column by column, each column's error made up for by those not yet rounded.

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (2022), algorithm 1,
with static groups and activation order as its authors' code has them. Deviations: each group's scale is not the one of
its range but the one of least error weighted with the Hessian's diagonal, because that is the error that counts; and
inputs that were always zero are rounded to the nearest rather than set to zero, because serving may use them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.graph.run import Feeds, open_session, run_batches, tap
from compress.quantize.rounding import QuantizedWeight, round_to_nearest

BLOCK = 128
"""Columns whose updates are applied to the rest of the weight at once."""
MOST_DAMPING = 1.0
SMALL = 1e-3


@dataclass(frozen=True, eq=False)
class Hessian:
    """`gram` is X^T X / n, [in, in] float64. `order` [in]: the inputs in the order in which they are rounded.

    `factor`: the upper Cholesky factor of the inverse of the damped Hessian, rows and columns in that order.
    `dead` [in]: inputs that were always zero. `damp_percent`: what the factorization needed.
    """

    gram: np.ndarray
    order: np.ndarray
    factor: np.ndarray
    dead: np.ndarray
    damp_percent: float


def gram_matrix(model: ir.Model, tensor: str, batches: Iterable[Feeds]) -> np.ndarray:
    """X^T X / n over the rows of a tensor [..., in], all batches together; float64 [in, in].

    Raises ValueError when there is no batch or a value is not finite.
    """
    session = open_session(tap(model, [tensor]))
    total: np.ndarray | None = None
    n_rows = 0
    for outputs in run_batches(session, batches):
        values = next(iter(outputs.values()))
        rows = values.reshape(-1, values.shape[-1])
        product = (rows.T @ rows).astype(np.float64)
        total = product if total is None else total + product
        n_rows += len(rows)
    if total is None:
        raise ValueError("there is no calibration data")
    if not np.isfinite(total).all():
        raise ValueError(f"tensor {tensor!r}: NaN or Inf on the calibration data")
    return total / n_rows


def invert_hessian(gram: np.ndarray, damp_percent: float, act_order: bool = True) -> Hessian:
    """Order (by falling diagonal with `act_order`), damp and factor.

    Damping is raised tenfold until the factorization succeeds; ValueError if it never does.
    """
    diagonal = np.diag(gram)
    dead = diagonal == 0
    order = np.argsort(-diagonal, kind="stable") if act_order else np.arange(len(gram))
    damp = damp_percent
    while damp <= MOST_DAMPING:
        added = np.where(dead, 1.0, damp * diagonal.sum() / max(int((~dead).sum()), 1))
        try:
            return Hessian(gram, order, _upper_factor((gram + np.diag(added))[np.ix_(order, order)]), dead, damp)
        except np.linalg.LinAlgError:
            damp *= 10
    raise ValueError(f"the Hessian of its inputs cannot be inverted, not even with damp_percent {damp / 10:g}")


def gptq_round(
    weight: np.ndarray, hessian: Hessian, bits: int, group_size: int, symmetric: bool
) -> tuple[QuantizedWeight, float, float]:
    """Quantize `weight` [out, in]: (the result, its relative output error, that of rounding to the nearest).

    The output error is E|(W - Q) x|^2 / E|W x|^2 over the calibration inputs. Never worse than the nearest: where the
    column order leaves a larger error, the nearest is what is returned. Raises ValueError as `round_to_nearest` does.
    """
    diagonal = np.diag(hessian.gram)
    importance = diagonal + SMALL * max(diagonal.mean(), 1e-30)  # inputs that were always zero still count a little
    nearest = round_to_nearest(weight, bits, group_size, symmetric, importance=importance)
    order = hessian.order
    groups = order // (len(order) if group_size == -1 else group_size)  # [in]: each column's group, in order of work
    scales = nearest.scales[:, groups].astype(np.float64)  # [out, in]
    zeros = np.zeros_like(scales) if nearest.zero_points is None else nearest.zero_points[:, groups].astype(np.float64)
    low, high = (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    left = weight.astype(np.float64)[:, order]
    levels = _round_columns(left, hessian.factor, scales, zeros, low, high)
    values = np.empty_like(nearest.values)
    values[:, order] = levels.astype(nearest.values.dtype)
    found = QuantizedWeight(values, nearest.scales, nearest.zero_points, bits, group_size)
    error, plain = (output_error(weight, q.dequantize(), hessian.gram) for q in (found, nearest))
    return (found, error, plain) if error <= plain else (nearest, plain, plain)


def output_error(weight: np.ndarray, rounded: np.ndarray, gram: np.ndarray) -> float:
    """E|(W - Q) x|^2 / E|W x|^2 for inputs with this Gram matrix."""
    difference = weight.astype(np.float64) - rounded
    energy = float(np.sum((weight @ gram) * weight))
    return float(np.sum((difference @ gram) * difference)) / max(energy, 1e-30)


def _round_columns(
    left: np.ndarray, factor: np.ndarray, scales: np.ndarray, zeros: np.ndarray, low: int, high: int
) -> np.ndarray:
    """Algorithm 1 on columns in their order of work; `left` [out, in] is used up. Returns integer levels [out, in]."""
    levels = np.empty_like(left)
    n = left.shape[1]
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        errors = np.empty((len(left), stop - start))
        for column in range(start, stop):
            q = np.clip(np.round(left[:, column] / scales[:, column]) + zeros[:, column], low, high)
            levels[:, column] = q
            rounded = (q - zeros[:, column]) * scales[:, column]
            error = (left[:, column] - rounded) / factor[column, column]  # [out]
            left[:, column:stop] -= np.outer(error, factor[column, column:stop])
            errors[:, column - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    return levels


def _upper_factor(matrix: np.ndarray) -> np.ndarray:
    """U, upper triangular, with U^T U = the inverse of a symmetric positive definite matrix."""
    flipped = np.linalg.cholesky(matrix[::-1, ::-1])[::-1, ::-1]  # upper R with R R^T = the matrix
    return np.linalg.solve(flipped, np.eye(len(matrix)))
