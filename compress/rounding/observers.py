"""Observe the activations of a graph over calibration data, and choose a quantization range from what was kept.

An `Observer` holds a histogram over [-m, m], m a power of two that grows with what it sees (bins merge in pairs), so
one pass over the data serves every method. `choose_range` turns it into the real interval [low, high] that 256 levels
will cover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from compress.graph.run import TAPPED, Feeds, cut_batches, open_session, run_tokens, take_each, tap

Method = Literal["minmax", "percentile", "entropy", "mse"]
HALF_BINS = 4096
"""Bins of a histogram on either side of zero, which doubles its range by merging pairs of them."""
Score = Callable[[np.ndarray, np.ndarray, float, float], float]
"""(centres, counts, low, high) -> the error of that interval."""


@dataclass(eq=False)
class Observer:
    """Running statistics of one tensor. `channel_sum` and `channel_peak` are kept along `axis` (None: not at all)."""

    axis: int | None = None
    low: float = np.inf
    high: float = -np.inf
    bound: float = 0.0
    counts: np.ndarray = field(default_factory=lambda: np.zeros(2 * HALF_BINS))
    n_values: int = 0
    n_rows: int = 0
    """Values seen for each channel."""
    finite: bool = True
    """Whether all that came was; of an array with NaN or Inf nothing else is taken in."""
    channel_sum: np.ndarray | None = None
    channel_peak: np.ndarray | None = None

    def update(self, values: np.ndarray) -> None:
        """Take in one float array of any shape, none of an empty one or of one that holds NaN or Inf."""
        if not values.size:
            return
        low, high = float(values.min()), float(values.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            self.finite = False
            return
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.widen(max(abs(low), abs(high)))
        if self.bound:
            scaled = values.ravel() * np.float32(HALF_BINS / self.bound) + np.float32(HALF_BINS)
            self.counts += np.bincount(np.clip(scaled, 0, 2 * HALF_BINS - 1).astype(np.int32), minlength=2 * HALF_BINS)
        else:
            self.counts[HALF_BINS] += values.size  # nothing but zeros so far
        self.n_values += values.size
        if self.axis is not None:
            assert self.axis is not None
            other = tuple(i for i in range(values.ndim) if i != self.axis % values.ndim)
            total, peak = values.sum(axis=other, dtype=np.float64), np.abs(values).max(axis=other)
            self.channel_sum = total if self.channel_sum is None else self.channel_sum + total
            self.channel_peak = peak if self.channel_peak is None else np.maximum(self.channel_peak, peak)
            self.n_rows += values.size // values.shape[self.axis]

    def widen(self, peak: float) -> None:
        if peak <= self.bound or peak == 0.0:
            return
        # so that the number of bins for each unit stays a float32
        bound = 2.0 ** max(np.ceil(np.log2(peak * (1 + 1e-6))), -100)
        while self.bound and self.bound < bound:
            merged = self.counts.reshape(-1, 2).sum(axis=1)  # [HALF_BINS]
            self.counts = np.concatenate([np.zeros(HALF_BINS // 2), merged, np.zeros(HALF_BINS // 2)])
            self.bound *= 2
        self.bound = bound

    @property
    def trouble(self) -> str:
        """Return why there is no range of what was seen; "" where there is one."""
        if not self.finite:
            return "NaN or Inf on the calibration data"
        return "" if self.low <= self.high else "no values on the calibration data"

    @property
    def channel_mean(self) -> np.ndarray:
        """Return the mean of each channel, float64 [channels]."""
        assert self.channel_sum is not None
        return self.channel_sum / self.n_rows

    @property
    def centres(self) -> np.ndarray:
        return (np.arange(2 * HALF_BINS) - HALF_BINS + 0.5) * (self.bound / HALF_BINS)

    def quantile(self, q: float) -> float:
        """Return the value below which a fraction `q` of what was seen lies, to one bin."""
        index = int(np.searchsorted(np.cumsum(self.counts), q * self.counts.sum()))
        return float(np.clip(self.centres[min(index, 2 * HALF_BINS - 1)], self.low, self.high))

    def absolute_median(self) -> float:
        """Return the median magnitude, to one bin."""
        folded = self.counts[HALF_BINS:] + self.counts[HALF_BINS - 1 :: -1]
        return float(self.centres[HALF_BINS:][np.searchsorted(np.cumsum(folded), folded.sum() / 2)])


def choose_range(
    seen: Observer, method: Method, percentile: float = 99.99, symmetric: bool = False
) -> tuple[float, float]:
    """Choose the interval to quantize, always holding zero; symmetric ones are (-m, m).

    minmax: all that was seen. percentile: the central `percentile` percent. mse: the interval that minimises the
    expected squared rounding and clipping error at 256 levels (a grid of 96 shrinkages of each end). entropy: the one
    that minimises the Kullback-Leibler divergence of the quantized histogram (Migacz, 8-bit inference with TensorRT,
    2017), on the same grid.
    """
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)
    if symmetric:
        low, high = -max(-low, high), max(-low, high)
    if low == high:
        return low, low + 1e-6
    if method == "percentile":
        tail = (1 - percentile / 100) / 2
        low, high = max(low, min(seen.quantile(tail), 0.0)), min(high, max(seen.quantile(1 - tail), 0.0))
        low, high = (-max(-low, high), max(-low, high)) if symmetric else (low, high)
        return low, high if low < high else low + 1e-6
    if method in ("mse", "entropy"):
        score = _squared_error if method == "mse" else _divergence
        return _search_shrinkage(seen, low, high, score, symmetric)
    return low, high


def _search_shrinkage(seen: Observer, low: float, high: float, score: Score, symmetric: bool) -> tuple[float, float]:
    """Shrink both ends alike, then each alone: an outlier on one side must not cost the other (Gelu has a floor)."""
    used = np.flatnonzero(seen.counts)
    centres, counts = seen.centres[used], seen.counts[used]
    grid = np.concatenate([np.linspace(1.0, 0.3, 64), np.geomspace(0.29, 0.01, 32)])

    def best_of(spans: list[tuple[float, float]]) -> tuple[float, float]:
        return min(spans, key=lambda span: score(centres, counts, *span))

    best = best_of([(low * g, high * g) for g in grid])
    if symmetric or low == 0 or high == 0:
        return best
    best = best_of([best, *((best[0], high * g) for g in grid)])
    return best_of([best, *((low * g, best[1]) for g in grid)])


def _round_to_levels(centres: np.ndarray, low: float, high: float) -> tuple[np.ndarray, float]:
    scale = (high - low) / 255
    return np.clip(np.round((centres - low) / scale), 0, 255), scale


def _squared_error(centres: np.ndarray, counts: np.ndarray, low: float, high: float) -> float:
    quantized, scale = _round_to_levels(centres, low, high)
    error = centres - (quantized * scale + low)
    rounding = np.where((centres >= low) & (centres <= high), scale**2 / 12, 0.0)
    inside = np.where(rounding > 0, rounding, error**2)
    return float(counts @ inside)


def _divergence(centres: np.ndarray, counts: np.ndarray, low: float, high: float) -> float:
    """Return KL(p || q): p, the histogram, clipped values in its edge bins; q, its counts evened out in each level."""
    inside = (centres >= low) & (centres <= high)
    if not inside.any():
        return np.inf
    p = counts[inside].copy()
    p[0] += counts[centres < low].sum()
    p[-1] += counts[centres > high].sum()
    quantized = _round_to_levels(centres[inside], low, high)[0].astype(np.int64)
    occupied = np.maximum(np.bincount(quantized, minlength=256), 1)
    q = (np.bincount(quantized, counts[inside], minlength=256) / occupied)[quantized]
    p, q = p / p.sum(), q / q.sum()
    return float(np.sum(p * np.log(p / q)))


def observe(
    model: ir.Model, axes: Mapping[str, int | None], batches: Iterable[Feeds], threads: int = 0
) -> dict[str, Observer]:
    """Run `batches` and watch the tensors named in `axes` (name -> channel axis, None: no channel statistics).

    Padding does not count.

    Returns one Observer for each, whose `trouble` says where no range can be chosen. Raises ValueError when there is no
    batch.
    """
    seen = {name: Observer(axis) for name, axis in axes.items()}
    if not seen:
        return {}
    session = open_session(tap(model, list(axes)), threads)
    n_batches = 0
    for outputs in run_tokens(session, cut_batches(session, batches)):
        n_batches += 1
        for name, values in take_each(outputs):
            seen[name.removesuffix(TAPPED)].update(values)
    if n_batches == 0:
        raise ValueError("there is no calibration data")
    return seen


def collect_rows(
    model: ir.Model, names: Iterable[str], batches: Iterable[Feeds], n_rows: int, seed: int, threads: int = 0
) -> dict[str, np.ndarray]:
    """Return at most `n_rows` random rows [n, channels] of each tensor, channels last, spread over all batches."""
    rng = np.random.default_rng(seed)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in names}
    batches = list(batches)
    if not kept or not batches:
        return {}
    share = -(-n_rows // len(batches))
    session = open_session(tap(model, list(kept)), threads)
    for outputs in run_tokens(session, batches):
        for name, values in outputs.items():
            rows = values.reshape(-1, values.shape[-1])
            chosen = rng.choice(len(rows), min(share, len(rows)), replace=False)
            kept[name.removesuffix(TAPPED)].append(rows[chosen])
    rows_of = {name: np.concatenate(parts) for name, parts in kept.items()}
    return {name: rows[rng.permutation(len(rows))[:n_rows]] for name, rows in rows_of.items()}
