"""The grid a weight is rounded to: a scale, perhaps negative, and a zero point for each group of inputs. Torch.

A symmetric grid of integers holds -2^(b-1) ... 2^(b-1) - 1: one level more on one side, and a negative scale gives it
to the other. One of floats (FP4, FP8) holds those of its type, and its scales are searched among those that a file can
hold: each E4M3 scale around the one of the range and with them the one float above them (NVFP4), the two powers of two
around it (MX). FP8 below scales of float32 takes the range: its rounding is relative, so that the scale of least
squared error leaves 1.5 % less of it for 128 x 128 weights, and a story teller lost more by it (3.3556 nats per token
against 3.3540).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.formats.schemes import WeightScheme
from compress.rounding.numbers import ANY_FLOAT, E2M1, E4M3, EXPONENT_BITS, FLOATS, Numbers, ScaleRule
from compress.rounding.quantized_weight import SMALLEST_SCALE, QuantizedWeight

CHUNK = 1 << 18
"""Weights worked on at once: few enough for a cache, so many that what an operation costs to begin is not seen."""
MOST_EXPONENT = 126
"""The largest exponent of a power of two that is a float32, and 1 over which is."""
FITS = 2
"""Least-squares fits of a scale to its levels after the search."""
E4M3_STEPS = range(-7, 8)
"""What is tried for an E4M3 scale: its code minus that of the range's; 8 double it. 4/6 of the range are 4 or 5 up."""
GLOBALS = 8
"""Scales of a whole NVFP4 tensor that are tried, over one octave: others have the same E4M3 scales."""
GLOBAL_REACH = 2.0**100
"""Largest scale of a whole NVFP4 tensor, and one over the smallest."""


@dataclass(frozen=True, eq=False)
class Grid:
    """`scales` float32 [out, groups], `zeros` the same shape, or None when symmetric; levels are some of `numbers`.

    `rule`: which scales a file can hold; these obey it.
    """

    scales: Tensor
    zeros: Tensor | None
    numbers: Numbers
    rule: ScaleRule = ANY_FLOAT

    def sampled(self, stride: int) -> Grid:
        """Return the grid of each `stride`-th output."""
        zeros = None if self.zeros is None else self.zeros[::stride]
        return replace(self, scales=self.scales[::stride], zeros=zeros)

    def quantize(self, weight: Tensor) -> Tensor:
        """Return the nearest levels of a weight, numbers in float32 [out, in]."""
        grouped = weight.reshape(*self.scales.shape, -1)  # [out, groups, group]
        zeros = None if self.zeros is None else self.zeros[:, :, None]
        return self.numbers.nearest_(grouped / self.scales[:, :, None], zeros).reshape(weight.shape)

    def values(self, quantized: Tensor) -> Tensor:
        """Return the numbers that levels stand for, float32 in the levels' shape, with gradients."""
        grouped = quantized.reshape(*self.scales.shape, -1)
        if self.zeros is not None:
            grouped = grouped - self.zeros[:, :, None]
        return (grouped * self.scales[:, :, None]).reshape(quantized.shape)

    def pack(self, quantized: Tensor, scheme: WeightScheme) -> QuantizedWeight:
        """Return the record of levels [out, in] on this grid; FP4's numbers are held as the same ones of FP8."""
        scales = self.scales[:1] if self.rule.rows == 0 else self.scales  # [1, 1]: one for the whole tensor
        stored = {name: array.cpu().numpy() for name, array in self.rule.encode(scales).items()}
        if self.numbers.mantissa is not None:
            bytes_ = quantized.to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy()
            values, zeros = bytes_.view(ml_dtypes.float8_e4m3fn), None
        else:
            values = quantized.to(torch.int8 if self.zeros is None else torch.uint8).cpu().numpy()
            zeros = None if self.zeros is None else self.zeros.to(torch.uint8).cpu().numpy()
        return QuantizedWeight(values, scales.cpu().numpy(), zeros, scheme.bits, scheme.group_size, stored=stored)

    def multiply(self, powers: Tensor) -> Grid:
        """Return the grid of a weight times powers of two [out, 1], or one [1, 1] where outputs share scales."""
        rule = self.rule if self.rule.kind != "e4m3" else self.rule.divide(1 / float(powers.reshape(-1)[0]))
        return replace(self, scales=multiply_scales(self.scales, powers), rule=rule)


def fit_grid(
    weight: Tensor,
    scheme: WeightScheme,
    importance: Tensor | None = None,
    signed: bool = True,
    every: int = 1,
    shared: float | None = None,
) -> Grid:
    """Find the scales (and zero points) that leave `weight` [out, in] the least squared error, each input's weighted.

    `importance` [in], 1 where it is not given. `signed`: scales may be negative and symmetric levels go down to
    -2^(b-1); otherwise they keep to -(2^(b-1) - 1), so that every kernel may negate them. `every`: of the candidates
    one in so many, for a rough answer; 0: the range. `shared`: what `fit_shared` found for this weight and others.
    Raises ValueError when the groups do not divide the inputs, or a weight is not finite.
    """
    rows, inputs = weight.shape
    size = (
        inputs if scheme.group_size == -1 or (scheme.kind == "float" and not scheme.group_size) else scheme.group_size
    )
    if size < 1 or inputs % size:
        raise ValueError(f"group_size {size} does not divide {inputs} inputs")
    if not finite(weight):
        raise ValueError("the weight holds NaN or Inf")
    if scheme.kind == "float":
        return _fit_floats(weight.float(), scheme, importance, every, shared)
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
    return Grid(scales, None if scheme.symmetric else torch.cat([zeros for _, zeros in parts]), Numbers(low, high))


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
    shared: float | None = None,
) -> QuantizedWeight:
    """Round `weight` [out, in] to the nearest on the grid that `fit_grid` finds."""
    grid = fit_grid(weight, scheme, importance, signed, shared=shared)
    return grid.pack(grid.quantize(weight.float()), scheme)


def shrinkages(bits: int) -> list[float]:
    """Return the fractions of the range that are tried: fewer bits gain by cutting off more of it."""
    least, count = {2: (0.35, 24), 3: (0.4, 20), 4: (0.5, 12)}.get(bits, (0.7, 8))
    return torch.linspace(1.0, least, count).tolist()


class _BestGrid:
    """For each group the candidate of least weighted error so far."""

    def __init__(self, grouped: Tensor, weighting: Tensor | None, numbers: Numbers) -> None:
        self.grouped, self.weighting, self.numbers = grouped, weighting, numbers
        self.error = grouped.new_full(grouped.shape[:2], torch.inf)
        self.scales = grouped.new_ones(grouped.shape[:2])
        self.zeros = grouped.new_zeros(grouped.shape[:2])

    def quantize(self, scales: Tensor, zeros: Tensor | None) -> Tensor:
        nearest = self.grouped * (1 / scales)[:, :, None]
        if zeros is None:
            return self.numbers.nearest_(nearest)
        return self.numbers.nearest_(nearest, zeros[:, :, None]).sub_(zeros[:, :, None])

    def offer(self, scales: Tensor, zeros: Tensor | None = None) -> None:
        """Take `scales`, `zeros` [out, groups] for the groups in which they leave less error."""
        error = torch.addcmul(self.grouped, self.quantize(scales, zeros), scales[:, :, None], value=-1).square_()
        if self.weighting is not None:
            error *= self.weighting
        total = error.sum(2)
        better = total < self.error
        self.error = torch.where(better, total, self.error)
        self.scales = torch.where(better, scales, self.scales)
        if zeros is not None:
            self.zeros = torch.where(better, zeros, self.zeros)

    def refit(self, zeros: Tensor | None = None) -> None:
        """Offer the least-squares scale of the best candidate's levels, which any float may be."""
        quantized = self.quantize(self.scales, zeros)
        weighted = quantized if self.weighting is None else quantized * self.weighting
        energy = (weighted * quantized).sum(2)
        scales = (weighted * self.grouped).sum(2) / energy.clamp_min(1e-30)
        self.offer(torch.where(scales.abs() > SMALLEST_SCALE, scales, self.scales), zeros)


def _fit_symmetric(
    grouped: Tensor, bits: int, weighting: Tensor | None, signed: bool, tried: list[float], fits: int
) -> tuple[Tensor, Tensor]:
    half = 2 ** (bits - 1)
    peak = grouped.abs().amax(2)
    widest = torch.where(peak > 0, peak, 1.0) / (half - 1)
    best = _BestGrid(grouped, weighting, Numbers(-half if signed else 1 - half, half - 1))
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
    best = _BestGrid(grouped, weighting, Numbers(0, top))
    # both ends alike, and each of a few with each
    few = tried[:: max(1, len(tried) // 5)]
    for below, above in [(both, both) for both in tried] + [(a, b) for a in few for b in few if a != b]:
        scales = ((high * above - low * below) / top).clamp_min(SMALLEST_SCALE)
        best.offer(scales, (-low * below / scales).round_().clamp_(0, top))
    for _ in range(fits):
        best.refit(best.zeros)
    return best.scales, best.zeros


def fit_shared(
    weights: Sequence[Tensor], scheme: WeightScheme, importance: Tensor | None = None, every: int = 1
) -> float | None:
    """Find what weights [out, in] that an engine computes as one must have in common; None where that is nothing.

    Of NVFP4 the scale of the whole tensor (as files hold it: scales are divided by it), which is judged on some rows;
    of FP8 with one scale that one. Both make room for the largest weight. `importance` [in], `every`: as of `fit_grid`.
    """
    rule = ScaleRule.of(scheme)
    if scheme.kind != "float" or not rule.spans_tensor:
        return None
    peak = torch.stack([weight.abs().amax() for weight in weights]).amax().float()
    if rule.kind == "e4m3":
        power, size = power_of_two(peak), scheme.group_size
        weighting = None if importance is None else importance.float().reshape(-1, size)
        # 64 rows, evenly spaced, tell
        rows = torch.cat([weight[:: -(-len(weight) // 64)].float() for weight in weights]) / power
        grouped = rows.reshape(len(rows), -1, size)
        rules = _list_globals(rule, peak / power, power, GLOBALS if every == 1 else 1)
        fits = [_fit_float_scales(grouped, E2M1, weighting, tried, every) for tried in rules]
        best = int(torch.stack([fit.error.sum() for fit in fits]).argmin())
        return rules[best].divide(1 / float(power)).global_scale
    return float(torch.where(peak > 0, peak / FLOATS[scheme.bits].high, 1.0).clamp_min(SMALLEST_SCALE))


def _fit_floats(
    weight: Tensor, scheme: WeightScheme, importance: Tensor | None, every: int, shared: float | None
) -> Grid:
    """Find the grid of a scheme of floats for `weight` [out, in], float32, as `fit_grid` says."""
    rows, inputs = weight.shape
    numbers, rule = FLOATS[scheme.bits], ScaleRule.of(scheme)
    shared = fit_shared([weight], scheme, importance, every) if shared is None else shared
    if rule.rows == 0 and shared is not None:
        return Grid(weight.new_full((rows, 1), shared), None, numbers, rule)
    power = power_of_two(weight.abs().amax())
    size = scheme.group_size if scheme.group_size > 0 else inputs
    blocks = pad(weight / power, (0, 0, 0, -rows % rule.rows))  # rows of zeros change no error
    grouped = blocks.reshape(-1, rule.rows, inputs // size, size).transpose(1, 2).flatten(2)
    weighting = None if importance is None else importance.float().reshape(-1, size).repeat(1, rule.rows)
    if shared is not None:
        rule = replace(rule, global_scale=shared * float(power))
    parts = grouped.split(max(1, CHUNK // (inputs * rule.rows)))  # [blocks, groups, rows of a block * group]
    scales = torch.cat([_fit_float_scales(part, numbers, weighting, rule, every).scales for part in parts])
    scales = scales.repeat_interleave(rule.rows, 0)[:rows].contiguous()
    return Grid(scales, None, numbers, rule).multiply(power.reshape(1, 1))


def _list_globals(rule: ScaleRule, peak: Tensor, power: Tensor, count: int) -> list[ScaleRule]:
    """Return rules with scales of a whole NVFP4 tensor, whose largest weight is `peak` after dividing by `power`."""
    # An E4M3 scale is at most its type's largest where the largest weight is 4, FP4's second largest number.
    most = E4M3.high * 4.0 / (float(peak) or 1.0)
    least, largest = float(power) / GLOBAL_REACH, float(power) * GLOBAL_REACH
    scales = torch.tensor([min(max(most * 2 ** (-k / GLOBALS), least), largest) for k in range(count)])
    return [replace(rule, global_scale=scale) for scale in scales.tolist()]


def _fit_float_scales(
    grouped: Tensor,
    numbers: Numbers,
    weighting: Tensor | None,
    rule: ScaleRule,
    every: int,
) -> _BestGrid:
    """Return the best of the scales that a file can hold, each group's [out, groups, group] for itself."""
    peak = grouped.abs().amax(2)
    peak = torch.where(peak > 0, peak, peak.amax().clamp_min(SMALLEST_SCALE))
    best = _BestGrid(grouped, weighting, numbers)
    for scales in _list_float_scales(peak / numbers.high, rule, every):
        best.offer(scales)
    return best


def _list_float_scales(widest: Tensor, rule: ScaleRule, every: int) -> Iterator[Tensor]:
    """Yield scales to try around those of the range [out, groups]."""
    if rule.kind == "float":
        yield widest.clamp_min(SMALLEST_SCALE)
    elif rule.kind == "e4m3":
        unit = torch.tensor(rule.global_scale, dtype=torch.float32)
        code = E4M3.place((widest * unit).clamp_max(E4M3.high)).round_()
        for steps in E4M3_STEPS[::every] if every else [0]:
            yield rule.nearest(E4M3.value((code + steps).clamp_(1, E4M3.ends[1])) / unit)
    else:
        below = (widest.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
        for power in (2.0, 1.0) if every else (2.0,):
            yield rule.nearest(below * power)
