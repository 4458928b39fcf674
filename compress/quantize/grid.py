"""The grid a weight is rounded to: a scale, perhaps negative, and a zero point for each group of inputs. Torch.

A symmetric grid holds -2^(b-1) ... 2^(b-1) - 1: one level more on one side, and a negative scale gives it to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.formats.schemes import WeightScheme
from compress.quantize.rounding import SMALLEST_SCALE, QuantizedWeight

CHUNK = 1 << 18
"""Weights worked on at once: few enough for a cache, so many that what an operation costs to begin is not seen."""
MOST_EXPONENT = 126
"""The largest exponent of a power of two that is a float32, and 1 over which is."""
FITS = 2
"""Least-squares fits of a scale to its levels after the search."""


@dataclass(frozen=True, eq=False)
class Grid:
    """`scales` float32 [out, groups], `zeros` the same shape, or None when symmetric; levels from `low` to `high`."""

    scales: Tensor
    zeros: Tensor | None
    low: int
    high: int

    def sampled(self, stride: int) -> Grid:
        """Return the grid of each `stride`-th output."""
        zeros = None if self.zeros is None else self.zeros[::stride]
        return Grid(self.scales[::stride], zeros, self.low, self.high)

    def levels(self, weight: Tensor) -> Tensor:
        """Return the nearest levels of a weight, whole numbers in float32 [out, in]."""
        grouped = weight.reshape(*self.scales.shape, -1)  # [out, groups, group]
        zeros = None if self.zeros is None else self.zeros[:, :, None]
        return nearest_levels(grouped, self.scales[:, :, None], zeros, self.low, self.high).reshape(weight.shape)

    def values(self, levels: Tensor) -> Tensor:
        """Return the numbers that levels stand for, float32 in the levels' shape, with gradients."""
        grouped = levels.reshape(*self.scales.shape, -1)
        if self.zeros is not None:
            grouped = grouped - self.zeros[:, :, None]
        return (grouped * self.scales[:, :, None]).reshape(levels.shape)

    def pack(self, levels: Tensor, scheme: WeightScheme) -> QuantizedWeight:
        """Return the record of levels [out, in] on this grid."""
        stored = torch.int8 if self.zeros is None else torch.uint8
        zeros = None if self.zeros is None else self.zeros.to(torch.uint8).cpu().numpy()
        values, scales = levels.to(stored).cpu().numpy(), self.scales.cpu().numpy()
        return QuantizedWeight(values, scales, zeros, scheme.bits, scheme.group_size)


def nearest_levels(x: Tensor, scales: Tensor, zeros: Tensor | None, low: int, high: int) -> Tensor:
    """Return the nearest levels of `x`, whole numbers in its type; scales and zero points broadcast over it.

    As QuantizeLinear and as kernels do it: the zero point is added after rounding.
    """
    levels = (x / scales).round_()
    if zeros is not None:
        levels += zeros
    return levels.clamp_(low, high)


def fit_grid(
    weight: Tensor, scheme: WeightScheme, importance: Tensor | None = None, signed: bool = True, every: int = 1
) -> Grid:
    """Find the scales (and zero points) that leave `weight` [out, in] the least squared error, each input's weighted.

    `importance` [in], 1 where it is not given. `signed`: scales may be negative and symmetric levels go down to
    -2^(b-1); otherwise they keep to -(2^(b-1) - 1), so that every kernel may negate them. `every`: of the candidates
    one in so many, for a rough answer; 0: the range. Raises ValueError when the groups do not divide the inputs, or a
    weight is not finite.
    """
    rows, inputs = weight.shape
    size = inputs if scheme.group_size == -1 else scheme.group_size
    if size < 1 or inputs % size:
        raise ValueError(f"group_size {size} does not divide {inputs} inputs")
    if not finite(weight):
        raise ValueError("the weight holds NaN or Inf")
    grouped = weight.float().reshape(rows, -1, size)  # [out, groups, group]
    weighting = None if importance is None else importance.float().reshape(-1, size)  # [groups, group]
    fit = _fit_symmetric if scheme.symmetric else _fit_asymmetric
    step = max(1, CHUNK // inputs)
    tried = shrinkages(scheme.bits)[::every] if every else [1.0]
    fits = FITS if every == 1 else 0
    parts = []
    for part in grouped.split(step):
        power = power_of_two(part.abs().amax(2))  # [out, groups]
        scales, zeros = fit(part / power[:, :, None], scheme.bits, weighting, signed, tried, fits)
        parts.append((multiply_scales(scales, power), zeros))
    half = 2 ** (scheme.bits - 1)
    low, high = (-half if signed else 1 - half, half - 1) if scheme.symmetric else (0, 2 * half - 1)
    scales = torch.cat([scales for scales, _ in parts])
    return Grid(scales, None if scheme.symmetric else torch.cat([zeros for _, zeros in parts]), low, high)


def power_of_two(peak: Tensor) -> Tensor:
    """Return the power of two above each magnitude, float32, 1 for 0: dividing by it is exact and brings it near 1.

    Errors are squares, and those of weights below 1e-19 or above 1e19 are none in float32.
    """
    return torch.exp2(torch.frexp(peak.float()).exponent.clamp(-MOST_EXPONENT, MOST_EXPONENT).float())


def multiply_scales(scales: Tensor, factors: Tensor) -> Tensor:
    """Return scales times powers of two, of each sign at least SMALLEST_SCALE: a smaller one would divide to Inf."""
    product = scales * factors
    return torch.where(
        product.abs() < SMALLEST_SCALE, torch.copysign(product.new_full((), SMALLEST_SCALE), product), product
    )


def finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or Inf, as the extremes would be: no copy, 10x faster than `torch.isfinite`."""
    return not tensor.numel() or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def round_to_grid(
    weight: Tensor,
    scheme: WeightScheme,
    importance: Tensor | None = None,
    signed: bool = True,
) -> QuantizedWeight:
    """Round `weight` [out, in] to the nearest on the grid that `fit_grid` finds."""
    grid = fit_grid(weight, scheme, importance, signed)
    return grid.pack(grid.levels(weight.float()), scheme)


def shrinkages(bits: int) -> list[float]:
    """Return the fractions of the range that are tried: fewer bits gain by cutting off more of it."""
    least, count = {2: (0.35, 24), 3: (0.4, 20), 4: (0.5, 12)}.get(bits, (0.7, 8))
    return torch.linspace(1.0, least, count).tolist()


class _BestGrid:
    """For each group the candidate of least weighted error so far."""

    def __init__(self, grouped: Tensor, weighting: Tensor | None, low: int, high: int) -> None:
        self.grouped, self.weighting, self.low, self.high = grouped, weighting, low, high
        self.error = grouped.new_full(grouped.shape[:2], torch.inf)
        self.scales = grouped.new_ones(grouped.shape[:2])
        self.zeros = grouped.new_zeros(grouped.shape[:2])

    def levels(self, scales: Tensor, zeros: Tensor | None) -> Tensor:
        nearest = (self.grouped * (1 / scales)[:, :, None]).round_()
        if zeros is None:
            return nearest.clamp_(self.low, self.high)
        return nearest.add_(zeros[:, :, None]).clamp_(self.low, self.high).sub_(zeros[:, :, None])

    def offer(self, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Take `scales`, `zeros` [out, groups] for the groups in which they leave less error."""
        error = torch.addcmul(self.grouped, self.levels(scales, zeros), scales[:, :, None], value=-1).square_()
        if self.weighting is not None:
            error *= self.weighting
        total = error.sum(2)
        better = total < self.error
        self.error = torch.where(better, total, self.error)
        self.scales = torch.where(better, scales, self.scales)
        if zeros is not None:
            self.zeros = torch.where(better, zeros, self.zeros)

    def refit(self, zeros: Tensor | None = None) -> None:
        """Offer the least-squares scale of the best candidate's levels."""
        levels = self.levels(self.scales, zeros)
        weighted = levels if self.weighting is None else levels * self.weighting
        energy = (weighted * levels).sum(2)
        scales = (weighted * self.grouped).sum(2) / energy.clamp_min(1e-30)
        self.offer(torch.where(scales.abs() > SMALLEST_SCALE, scales, self.scales), zeros)


def _fit_symmetric(
    grouped: Tensor, bits: int, weighting: Tensor | None, signed: bool, tried: list[float], fits: int
) -> tuple[Tensor, Tensor]:
    half = 2 ** (bits - 1)
    peak = grouped.abs().amax(2)
    widest = torch.where(peak > 0, peak, 1.0) / (half - 1)
    best = _BestGrid(grouped, weighting, -half if signed else 1 - half, half - 1)
    sides = _list_signs(grouped, bits) if signed and len(tried) > 1 else [torch.ones_like(peak)]
    for shrinkage in tried:
        scales = (widest * shrinkage).clamp_min(SMALLEST_SCALE)
        for side in sides:
            best.offer(scales * side)
    for _ in range(fits):
        best.refit()
    return best.scales, best.zeros


def _list_signs(grouped: Tensor, bits: int) -> list[Tensor]:
    """Return signs [out, groups] to try: with few bits both, else the one that gives the larger side a level more."""
    if bits < 4:
        ones = grouped.new_ones(grouped.shape[:2])
        return [ones, -ones]
    return [torch.where(grouped.amax(2) > -grouped.amin(2), -1.0, 1.0)]


def _fit_asymmetric(
    grouped: Tensor, bits: int, weighting: Tensor | None, signed: bool, tried: list[float], fits: int
) -> tuple[Tensor, Tensor]:
    top = 2**bits - 1
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    high = torch.where(high > low, high, low + 1)
    best = _BestGrid(grouped, weighting, 0, top)
    for below, above in _list_corners(tried):
        scales = ((high * above - low * below) / top).clamp_min(SMALLEST_SCALE)
        best.offer(scales, (-low * below / scales).round_().clamp_(0, top))
    for _ in range(fits):
        best.refit(best.zeros)
    return best.scales, best.zeros


def _list_corners(alike: list[float]) -> list[tuple[float, float]]:
    """Return fractions of the range's lower and upper part to try: both alike, and each of a few with each."""
    few = alike[:: max(1, len(alike) // 5)]
    return [(both, both) for both in alike] + [(a, b) for a in few for b in few if a != b]
