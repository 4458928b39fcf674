"""SmoothQuant's scales, with the migration strength chosen for each group by the error it leaves.

Xiao et al., SmoothQuant (2022, arXiv:2211.10438), equation 4: s = max|X|^alpha / max|W|^(1 - alpha) for each input
channel; X / s and W * s give the same product. A fixed alpha of 0.5 ruins layers whose activations carry a few huge
channels (the second feed-forward product of BERT-like encoders), so alpha is searched, and "leave it alone" is among
the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compress.quantize.observers import Observer, choose_range
from compress.quantize.rounding import round_to_nearest

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FREE, COSTLY = 0.9, 0.6
"""Part of the old error that the new one must be below: if a smoothing folds, and if it costs a multiplication."""


@dataclass(frozen=True)
class Smoothing:
    """The outcome for one group of layers that read one tensor. `scales` float32 [in], or None when nothing was gained.

    `error_before`, `error_after`: squared error of the int8 products relative to their energy.
    """

    alpha: float | None
    scales: np.ndarray | None
    error_before: float
    error_after: float


def smoothing_scales(input_peak: np.ndarray, weight_peak: np.ndarray, alpha: float) -> np.ndarray:
    """Return the scales of equation 4, float32 [in], normalised to a geometric mean of 1. Dead channels get 1."""
    alive = (input_peak > 0) & (weight_peak > 0)
    x, w = np.where(alive, input_peak, 1.0), np.where(alive, weight_peak, 1.0)
    logs = np.where(alive, alpha * np.log(x) - (1 - alpha) * np.log(w), 0.0)
    if alive.any():
        logs = np.where(alive, logs - logs[alive].mean(), 0.0)
    scales: np.ndarray = np.exp(np.clip(logs, -16, 16))
    return scales.astype(np.float32)


def search_smoothing(
    rows: np.ndarray,
    input_peak: np.ndarray,
    weights: Sequence[np.ndarray],
    alphas: Sequence[float] = ALPHAS,
    gain: float = FREE,
    tied: Callable[[np.ndarray], np.ndarray] = lambda scales: scales,
    by_row: bool = False,
) -> Smoothing:
    """Try each alpha on sampled input rows [n, in] and the group's weights [out, in]; keep the best.

    An alpha is taken only if the error falls below `gain` of what it was: a smoothing that cannot be folded into the
    layer before costs a multiplication at run time. `tied` brings scales into the form that can be folded. `by_row`:
    each row has a symmetric scale of its own, found at run time (W8A8), instead of all sharing one range.
    """
    weight = np.concatenate([w.astype(np.float32) for w in weights])  # [sum of out, in]
    exact = rows @ weight.T
    energy = max(float(np.square(exact).sum()), 1e-30)
    before = _measure_product_error(rows, weight, exact, np.ones(rows.shape[1], np.float32), by_row) / energy
    weight_peak = np.abs(weight).max(axis=0)
    best = Smoothing(None, None, before, before)
    for alpha in alphas:
        scales = tied(smoothing_scales(input_peak, weight_peak, alpha))
        error = _measure_product_error(rows, weight, exact, scales, by_row) / energy
        if error < gain * before and (best.scales is None or error < best.error_after):
            best = Smoothing(alpha, scales, before, error)
    return best


def _measure_product_error(
    rows: np.ndarray, weight: np.ndarray, exact: np.ndarray, scales: np.ndarray, by_row: bool
) -> float:
    """Return the squared error of the product in int8, inputs by row or per tensor, weights per output channel."""
    x = _round_by_row(rows / scales) if by_row else _round_by_tensor(rows / scales)
    w = round_to_nearest(weight * scales, 8, search=False).dequantize()
    return float(np.square(x @ w.T - exact).sum())


def _round_by_tensor(rows: np.ndarray) -> np.ndarray:
    seen = Observer()
    seen.update(rows)
    low, high = choose_range(seen, "mse")
    step = np.float32((high - low) / 255)
    rounded: np.ndarray = np.clip(np.round((rows - np.float32(low)) / step), 0, 255) * step + np.float32(low)
    return rounded


def _round_by_row(rows: np.ndarray) -> np.ndarray:
    peak = np.abs(rows).max(axis=1, keepdims=True)
    step = np.where(peak > 0, peak, 1.0).astype(np.float32) / np.float32(127)
    rounded: np.ndarray = np.round(rows / step) * step
    return rounded
