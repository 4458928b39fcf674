"""Round weights: symmetric or asymmetric, per output channel or per group of inputs, zeros of an earlier pass kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Fitted = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""(values [out, groups, group], scales [out, groups], zero points [out, groups] or None)."""
ROWS = 2**13
"""Rows of a tall weight (a vocabulary's) that are worked on at once."""
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LEAST_ZEROS = 0.05
"""Share of exact zeros from which they are taken for a pass's work; a trained weight has fewer by chance."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """Weights in few bits and what turns them back: `dequantize()` = (values - zero_points) * scales - offsets.

    `values` has the weight's shape, int8 whatever the bits (uint8 when asymmetric), or a float type of ml_dtypes.
    `scales`, `zero_points` and `offsets` (float32, of formats whose zero is no whole level) are [out, groups]; groups
    is 1 for per-channel weights. `stored`: what a format with scales of its own writes in their place, by name;
    `scales` and `offsets` are what these arrays stand for, in float32.
    """

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    bits: int
    group_size: int
    offsets: np.ndarray | None = None
    stored: Mapping[str, np.ndarray] = field(default_factory=dict)

    def rows(self, chosen: slice | np.ndarray) -> QuantizedWeight:
        """Return the weight's chosen rows; what a format stores in place of the scales is left out."""

        def take(array: np.ndarray | None) -> np.ndarray | None:
            return array if array is None or len(array) != len(self.values) else array[chosen]

        scales = self.scales if len(self.scales) != len(self.values) else self.scales[chosen]
        return QuantizedWeight(
            self.values[chosen], scales, take(self.zero_points), self.bits, self.group_size, take(self.offsets)
        )

    def with_parts(self, scales: np.ndarray, zero_points: np.ndarray | None, group_size: int) -> QuantizedWeight:
        """Return the same values with other scales and zero points, [out, groups], of groups of that size."""
        return QuantizedWeight(self.values, scales, zero_points, self.bits, group_size)

    def dequantize(self) -> np.ndarray:
        """Return the weight in float32, its own shape."""
        if len(self.values) <= ROWS or self.values.ndim != 2:
            return self._dequantize_at_once()
        weight = np.empty(self.values.shape, np.float32)
        for start in range(0, len(weight), ROWS):  # three copies of 128,256 rows at once would be gigabytes
            weight[start : start + ROWS] = self.rows(slice(start, start + ROWS))._dequantize_at_once()
        return weight

    def _dequantize_at_once(self) -> np.ndarray:
        rows = self.values.shape[0]
        grouped = self.values.reshape(rows, self.scales.shape[1], -1).astype(np.float32)  # [out, groups, group]
        if self.zero_points is not None:
            grouped = grouped - self.zero_points[:, :, None].astype(np.float32)
        weight: np.ndarray = grouped * self.scales[:, :, None]
        if self.offsets is not None:
            weight = weight - self.offsets[:, :, None]
        return weight.reshape(self.values.shape)


class UnreadWeight(QuantizedWeight):
    """A quantized weight whose `values` are read from their file each time that they are asked for, and not held.

    `read`: gives the weight whole; its other parts are taken from it once.
    """

    def __init__(self, read: Callable[[], QuantizedWeight]) -> None:
        whole = read()
        for part in fields(whole):
            value = getattr(whole, part.name)
            if part.name != "values":
                object.__setattr__(self, part.name, value.copy() if isinstance(value, np.ndarray) else value)
        object.__setattr__(self, "_read", read)

    @property
    def values(self) -> np.ndarray:
        """Return the values as `QuantizedWeight` has them."""
        return self._read().values  # type: ignore[attr-defined]

    def with_parts(self, scales: np.ndarray, zero_points: np.ndarray | None, group_size: int) -> UnreadWeight:
        """Return the same values, unread, with other scales and zero points."""
        other = copy(self)
        parts = {"scales": scales, "zero_points": zero_points, "group_size": group_size}
        for name, value in parts.items():
            object.__setattr__(other, name, value)
        return other


def round_to_nearest(weight: np.ndarray, bits: int, group_size: int = -1, symmetric: bool = True) -> QuantizedWeight:
    """Quantize `weight` [out, in, ...] by the range of each output channel, or of each `group_size` of its inputs.

    Symmetric integers lie in [-(2^(b-1) - 1), 2^(b-1) - 1], so that every kernel may negate them. `fit_grid` searches
    for the scales of least error; these are as quick as speed, which hangs on no scale, and a first look ask for.
    Raises ValueError when `group_size` does not divide the inputs, or a weight is not finite.
    """
    rows = weight.shape[0]
    if rows > ROWS:
        parts = np.split(weight, range(ROWS, rows, ROWS))
        return join_rows([round_to_nearest(part, bits, group_size, symmetric) for part in parts])
    n_inputs = weight.size // rows
    size = n_inputs if group_size == -1 else group_size
    if size < 1 or n_inputs % size:
        raise ValueError(f"group_size {size} does not divide {n_inputs} inputs")
    if not np.isfinite(weight).all():
        raise ValueError("the weight holds NaN or Inf")
    grouped = weight.astype(np.float32).reshape(rows, -1, size)  # [out, groups, group]
    # Those of which no span over all levels is a float32 are exact, near 1.
    power = np.exp2(np.clip(np.frexp(np.abs(grouped).max(axis=2))[1], -126, 126)).astype(np.float32)  # [out, groups]
    values, scales, zero_points = (_fit_symmetric if symmetric else _fit_asymmetric)(grouped / power[:, :, None], bits)
    scales = np.maximum(scales * power, np.float32(SMALLEST_SCALE))
    return QuantizedWeight(values.reshape(weight.shape), scales, zero_points, bits, group_size)


def _fit_symmetric(grouped: np.ndarray, bits: int) -> Fitted:
    top = 2 ** (bits - 1) - 1
    peak = np.abs(grouped).max(axis=2)  # [out, groups]
    scales = np.maximum(np.where(peak > 0, peak, 1.0) / top, SMALLEST_SCALE).astype(np.float32)
    values = np.clip(np.round(grouped / scales[:, :, None]), -top, top).astype(np.int8)
    return values, scales, None


def _fit_asymmetric(grouped: np.ndarray, bits: int) -> Fitted:
    top = 2**bits - 1
    low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
    scales = np.maximum(np.where(high > low, high - low, 1.0) / top, SMALLEST_SCALE).astype(np.float32)
    zero_points = np.clip(np.round(-low / scales), 0, top).astype(np.uint8)
    values = np.round(grouped / scales[:, :, None]) + zero_points[:, :, None]
    return np.clip(values, 0, top).astype(np.uint8), scales, zero_points


def by_rows(weight: Tensor, round_rows: Callable[[Tensor], QuantizedWeight]) -> QuantizedWeight:
    """Round a weight [out, in], a tall one by ROWS rows at a time: for methods to which rows are nothing to each other.

    `round_rows` gets rows as they lie in `weight`, in its type.
    """
    parts = [round_rows(part) for part in weight.split(ROWS)]
    return parts[0] if len(parts) == 1 else join_rows(parts)


def join_rows(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join weights of the same format, each with scales of its own for each row, one below the other."""
    first = parts[0]

    def join(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
        held = [array for array in arrays if array is not None]
        return np.concatenate(held) if held else None

    return QuantizedWeight(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.scales for part in parts]),
        join([part.zero_points for part in parts]),
        first.bits,
        first.group_size,
        join([part.offsets for part in parts]),
        {name: np.concatenate([part.stored[name] for part in parts]) for name in first.stored},
    )


def zeros_to_keep(weight: Tensor) -> Tensor | None:
    """Return a mask of the exact zeros of `weight`, where they are LEAST_ZEROS of it or more; None: it is dense."""
    zeros = weight == 0
    return zeros if int(zeros.sum()) >= LEAST_ZEROS * zeros.numel() else None


def keep_zeros(quantized: Tensor, zero_mask: Tensor, zero_points: Tensor | None) -> None:
    """Set `quantized` (changed in place) to what stands for zero where `zero_mask`; all of one shape."""
    if zero_points is None:
        quantized.masked_fill_(zero_mask, 0)
    else:
        quantized.copy_(zero_points.where(zero_mask, quantized))
