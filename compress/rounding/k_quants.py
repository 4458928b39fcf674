"""Rounding to llama.cpp's K formats and IQ4: groups whose scales are small integers below a half float for 256 weights.

A weight is d * s * q - m * t: q its level, s and t whole numbers of its group, d and m half floats of its super-block
of 256 inputs (ggml-quants.c of llama.cpp; Q3_K, Q6_K and IQ4_XS have no offsets, and a scale of either sign; IQ4_NL has
super-blocks of one group, whose s is 1). Levels of IQ4 are those of a table. Which numbers are chosen is ours: for each
group the scale and offset of least error weighted with its inputs' importance, then, in turn, the whole numbers nearest
to them that leave the least error with the levels rounded anew, and the least-squares d and m for these. `gptq_round_k`
keeps that grid and rounds on it as GPTQ does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compress.formats.schemes import PRESETS, WeightScheme
from compress.rounding.descent import descend
from compress.rounding.gptq import GptqRules, Hessian, RoundedWeight, output_error, round_columns
from compress.rounding.grid import CHUNK, Grid, finite
from compress.rounding.numbers import IQ4, Numbers
from compress.rounding.quantized_weight import SMALLEST_SCALE, QuantizedWeight

ROUNDS = 2
"""Of choosing the groups' whole numbers and the super-blocks' half floats in turn; two more gain 0.2 % of the error."""
STARTS = (1.0, 0.94, 1.06)
"""First half floats that are tried, as parts of what the largest group needs."""


@dataclass(frozen=True)
class _Format:
    """What one format holds. `scales`: least and greatest whole number of a group; `offset`: greatest, 0: none."""

    numbers: Numbers
    scales: tuple[int, int]
    offset: int = 0


_FORMATS = {
    PRESETS[name].weights: form
    for name, form in {
        "Q2_K": _Format(Numbers(0, 3), (0, 15), 15),
        "Q3_K": _Format(Numbers(-4, 3), (-32, 31)),
        "Q4_K": _Format(Numbers(0, 15), (0, 63), 63),
        "Q5_K": _Format(Numbers(0, 31), (0, 63), 63),
        "Q6_K": _Format(Numbers(-32, 31), (-128, 127)),
        "IQ4_NL": _Format(IQ4, (1, 1)),
        "IQ4_XS": _Format(IQ4, (-32, 31)),
    }.items()
}


class _Fit(NamedTuple):
    """`d`, `m` [blocks] (half floats in float32), `scales`, `offsets` [blocks, groups] (whole), `error` [blocks]."""

    d: Tensor
    m: Tensor
    scales: Tensor
    offsets: Tensor
    error: Tensor


class _Blocks:
    """Super-blocks `x` [blocks, groups, group] and the weights of their errors, of the same shape."""

    def __init__(self, x: Tensor, weighting: Tensor, form: _Format) -> None:
        self.x, self.weighting, self.form = x, weighting, form

    def quantize(self, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the nearest levels for real scales and offsets [blocks, groups]; of a scale of 0 that nearest to 0."""
        inverse = torch.where(scale == 0, 0.0, 1 / scale)
        shifted = self.x + offset[..., None] if self.form.offset else self.x
        return self.form.numbers.nearest_(shifted * inverse[..., None])

    def error(self, quantized: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the weighted squared error of each group [blocks, groups]."""
        rest = torch.addcmul(self.x, quantized, scale[..., None], value=-1)
        if self.form.offset:
            rest += offset[..., None]
        return rest.square_().mul_(self.weighting).sum(-1)

    def solve(self, quantized: Tensor) -> tuple[Tensor, Tensor]:
        """Return each group's least-squares scale and offset, not below 0, for these levels."""
        weighted = quantized * self.weighting
        qq, qx = (weighted * quantized).sum(-1), (weighted * self.x).sum(-1)
        alone = qx / qq.clamp_min(1e-30)
        if not self.form.offset:
            return alone, torch.zeros_like(alone)
        q, x, n = weighted.sum(-1), (self.weighting * self.x).sum(-1), self.weighting.sum(-1)
        determinant = qq * n - q * q
        scale = (qx * n - q * x) / determinant
        offset = (q * scale - x) / n
        apart = (determinant > 1e-6 * qq * n) & (offset > 0) & (scale > 0)
        return torch.where(apart, scale, alone.clamp_min(0)), torch.where(apart, offset, 0.0)


def round_to_k(weight: Tensor, scheme: WeightScheme, importance: Tensor | None = None) -> QuantizedWeight:
    """Round `weight` [out, in] to the nearest on the grid of least error, each input's weighted with `importance` [in].

    Raises ValueError where its block does not divide the inputs, or a value is not finite or beyond what half floats
    hold.
    """
    grid = _fit_grid(weight, scheme, importance)
    return grid.pack(grid.shift(weight.float()), scheme)


def gptq_round_k(weight: Tensor, hessian: Hessian, scheme: WeightScheme, rules: GptqRules) -> RoundedWeight:
    """Round as `gptq_round` does, on the grid of `round_to_k`, whose scales stay. ValueError as there."""
    weight = weight.float()
    grid = _fit_grid(weight, scheme, hessian.importance)
    shifted, levels_grid = grid.shift(weight), grid.levels_grid(scheme)
    nearest = levels_grid.quantize(shifted)
    quantized = round_columns(shifted, hessian, levels_grid, rules)
    if sweeps := rules.sweeps_at(scheme.bits):
        added, gram = hessian.added, hessian.gram
        quantized, _ = descend(shifted, gram, added, quantized, levels_grid, sweeps, rules.compute, rescale=False)
    errors = [
        output_error(weight, weight - (shifted - levels_grid.values(q)), hessian.gram) for q in (quantized, nearest)
    ]
    best = quantized if errors[0] <= errors[1] else nearest
    return RoundedWeight(grid.pack_levels(best, scheme), min(errors), errors[1])


@dataclass(frozen=True, eq=False)
class _KGrid:
    """The grid of a weight [out, in]: `d`, `m` [out, blocks] in float32, `scales`, `offsets` [out, groups]."""

    d: Tensor
    m: Tensor
    scales: Tensor
    offsets: Tensor

    def real(self) -> tuple[Tensor, Tensor]:
        """Return the groups' scales and offsets as real numbers, float32 [out, groups]."""
        n_groups = self.scales.shape[1] // self.d.shape[1]
        return (
            self.scales * self.d.repeat_interleave(n_groups, 1),
            self.offsets * self.m.repeat_interleave(n_groups, 1),
        )

    def shift(self, weight: Tensor) -> Tensor:
        """Return the weight plus its groups' offsets: what the levels times the scales are to be."""
        return weight + self.real()[1].repeat_interleave(weight.shape[1] // self.offsets.shape[1], 1)

    def levels_grid(self, scheme: WeightScheme) -> Grid:
        """Return the grid of a shifted weight; a scale of 0 is the smallest there is, so that it can divide."""
        scale = self.real()[0]
        return Grid(torch.where(scale == 0, SMALLEST_SCALE, scale), None, _FORMATS[scheme].numbers)

    def pack(self, shifted: Tensor, scheme: WeightScheme) -> QuantizedWeight:
        """Return the record of the nearest levels of a shifted weight."""
        return self.pack_levels(self.levels_grid(scheme).quantize(shifted), scheme)

    def pack_levels(self, quantized: Tensor, scheme: WeightScheme) -> QuantizedWeight:
        """Return the record of levels [out, in], whose `stored` holds d, scales and, with offsets, m and offsets."""
        scale, offset = self.real()
        form = _FORMATS[scheme]
        stored = {"d": self.d.half().numpy()}
        if form.scales[0] < form.scales[1]:
            stored["scales"] = self.scales.to(torch.int8).numpy()
        if form.offset:
            stored |= {"m": self.m.half().numpy(), "offsets": self.offsets.to(torch.int8).numpy()}
        return QuantizedWeight(
            quantized.to(torch.uint8 if form.offset else torch.int8).numpy(),
            scale.numpy(),
            None,
            scheme.bits,
            scheme.group_size,
            offset.numpy() if form.offset else None,
            {name: np.ascontiguousarray(array) for name, array in stored.items()},
        )


def _fit_grid(weight: Tensor, scheme: WeightScheme, importance: Tensor | None) -> _KGrid:
    """Fit the grid of a weight [out, in], some rows at a time."""
    rows, inputs = weight.shape
    if inputs % scheme.block:
        raise ValueError(f"the format has blocks of {scheme.block} inputs, which do not divide {inputs}")
    if not finite(weight):
        raise ValueError("the weight holds NaN or Inf")
    n_supers, n_groups = inputs // scheme.block, scheme.block // scheme.group_size
    shape = (-1, n_groups, scheme.group_size)
    weighting = torch.ones(inputs) if importance is None else importance.float()
    weighting = (weighting / weighting.mean().clamp_min(1e-30)).clamp_min(1e-6).reshape(shape)
    fits = []
    for part in weight.float().split(max(1, CHUNK // inputs)):
        x, weights = part.reshape(shape), weighting.repeat(len(part), 1, 1)
        if importance is not None:
            # Errors of large weights count more, as in llama.cpp: 0.005 nats at 4 bits, 0.002 at 3 (tinystories656k).
            weights = weights * (2 * x.square().mean((1, 2), keepdim=True) + x.square()).sqrt_()
        fits.append(_fit_blocks(_Blocks(x, weights, _FORMATS[scheme])))
    d, m, scales, offsets, _ = (torch.cat(parts) for parts in zip(*fits, strict=True))
    if not (finite(d) and finite(m)):
        raise ValueError("a weight is larger than the half floats of the format hold")
    grouped = (rows, n_supers * n_groups)
    return _KGrid(
        d.reshape(rows, n_supers), m.reshape(rows, n_supers), scales.reshape(grouped), offsets.reshape(grouped)
    )


def _fit_blocks(blocks: _Blocks) -> _Fit:
    """Fit super-blocks: real scales of each group first, whole ones below half floats then."""
    scale, offset = _fit_groups(blocks)
    fits = [_fit_whole(blocks, scale, offset, start) for start in STARTS]
    best = fits[0]
    for fit in fits[1:]:
        better = fit.error < best.error
        choose = [
            torch.where(better.reshape(-1, *[1] * (new.dim() - 1)), new, old)
            for new, old in zip(fit, best, strict=True)
        ]
        best = _Fit(*choose)
    return best


def _fit_groups(blocks: _Blocks) -> tuple[Tensor, Tensor]:
    """Return for each group the real scale and offset of least error among some ranges, each solved for its levels."""
    form, x = blocks.form, blocks.x
    if form.offset:
        low, high = x.amin(-1).clamp_max(0), x.amax(-1)
        first = (high - low).clamp_min(SMALLEST_SCALE) / form.numbers.high
        # parts of a range's scale and of its lower end: both alike, and each with the other whole
        some = (0.92, 0.8, 0.65)
        candidates = [
            (first * shrinkage, -low * share)
            for shrinkage, share in (
                [(s, min(s, 1.0)) for s in _SHRINKAGES]
                + [(s, 1.0) for s in some]
                + [(0.96 * s, s) for s in some]
                + [(0.9, 0.0)]
            )
        ]
    else:
        signed = torch.gather(x, -1, x.abs().argmax(-1, keepdim=True))[..., 0]
        first = torch.where(signed == 0, 1.0, signed) / form.numbers.low
        candidates = [
            (first * shrinkage * sign, torch.zeros_like(first)) for shrinkage in _SHRINKAGES for sign in (1, -1)
        ]
    best = (torch.full_like(first, torch.inf), first, torch.zeros_like(first))
    for scale, offset in candidates:
        for _ in range(2):
            quantized = blocks.quantize(scale, offset)
            scale, offset = blocks.solve(quantized)
            error = blocks.error(quantized, scale, offset)
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip((error, scale, offset), best, strict=True))  # type: ignore[assignment]
    return best[1], best[2]


_SHRINKAGES = (1.12, 1.06, 1.0, 0.96, 0.92, 0.88, 0.84, 0.78, 0.7, 0.6)
"""Scales that are tried, as parts of the one that reaches the group's largest weight."""


def _fit_whole(blocks: _Blocks, scale: Tensor, offset: Tensor, start: float) -> _Fit:
    """Choose whole numbers of the groups, beginning near real ones, and the half floats above them."""
    form = blocks.form
    d = _largest(scale, form.scales[0] if form.scales[0] else form.scales[1]) * start
    m = _largest(offset, form.offset) * start if form.offset else torch.zeros_like(d)
    d, m = _to_half(d), _to_half(m)
    best = None
    for _ in range(ROUNDS):
        whole, shift, quantized, error = _choose_whole(blocks, scale, offset, d, m)
        total = error.sum(-1)
        fit = _Fit(d, m, whole, shift, total)
        best = fit if best is None else _keep_better(best, fit)
        scale, offset = whole * d[:, None], shift * m[:, None]
        d, m = _solve_halves(blocks, quantized, whole, shift, d, m)
        scale, offset = _blend(blocks, quantized, whole * d[:, None], shift * m[:, None])
    whole, shift, _, error = _choose_whole(blocks, scale, offset, d, m)
    assert best is not None
    return _keep_better(best, _Fit(d, m, whole, shift, error.sum(-1)))


def _blend(blocks: _Blocks, quantized: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least-squares scales and offsets for the levels, where they are any better than those given."""
    new_scale, new_offset = blocks.solve(quantized)
    better = blocks.error(quantized, new_scale, new_offset) < blocks.error(quantized, scale, offset)
    return torch.where(better, new_scale, scale), torch.where(better, new_offset, offset)


def _keep_better(old: _Fit, new: _Fit) -> _Fit:
    better = new.error < old.error
    return _Fit(*(torch.where(better.reshape(-1, *[1] * (b.dim() - 1)), b, a) for a, b in zip(old, new, strict=True)))


def _choose_whole(
    blocks: _Blocks, scale: Tensor, offset: Tensor, d: Tensor, m: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return of each group the whole scale and offset near the real ones of least error, its levels and that error."""
    form, nearby = blocks.form, (0.0, -1.0, 1.0)
    steps = nearby if form.scales[0] < form.scales[1] else (0.0,)
    units = [_divide(scale, d), _divide(offset, m)]
    best: list[Tensor] = []
    for step in steps:
        whole = (units[0].round() + step).clamp(*form.scales)
        for shift_step in nearby if form.offset else (0.0,):
            shift = (units[1].round() + shift_step).clamp(0, form.offset)
            reals = whole * d[:, None], shift * m[:, None]
            quantized = blocks.quantize(*reals)
            error = blocks.error(quantized, *reals)
            if not best:
                best = [whole, shift, quantized, error]
                continue
            better = error < best[3]
            wide = better[..., None]
            new = [whole, shift, quantized, error]
            best = [torch.where(wide if a.dim() == 3 else better, a, b) for a, b in zip(new, best, strict=True)]
    return best[0], best[1], best[2], best[3]


def _solve_halves(
    blocks: _Blocks, quantized: Tensor, whole: Tensor, shift: Tensor, d: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the half floats of least squares for levels and whole numbers; what there is where they are not unique."""
    a = quantized * whole[..., None]
    weighted = a * blocks.weighting
    aa, ax = (weighted * a).sum((-1, -2)), (weighted * blocks.x).sum((-1, -2))
    if not blocks.form.offset:
        return torch.where(aa > 0, _to_half(ax / aa.clamp_min(1e-30)), d), m
    b = shift[..., None] * blocks.weighting
    ab, bb, bx = (a * b).sum((-1, -2)), (shift[..., None] * b).sum((-1, -2)), (b * blocks.x).sum((-1, -2))
    determinant = aa * bb - ab * ab
    unique = determinant > 1e-6 * aa * bb
    new_d, new_m = (ax * bb - ab * bx) / determinant, (ab * ax - aa * bx) / determinant
    usable = unique & (new_d > 0) & (new_m > 0)
    alone = torch.where(aa > 0, (ax + ab * m) / aa.clamp_min(1e-30), d)  # m as it is
    return _to_half(torch.where(usable, new_d, alone)), torch.where(usable, _to_half(new_m), m)


def _largest(values: Tensor, bound: int) -> Tensor:
    """Return the unit [blocks] in which the value of largest magnitude is `bound`."""
    return torch.gather(values, -1, values.abs().argmax(-1, keepdim=True))[:, 0] / bound


def _divide(values: Tensor, unit: Tensor) -> Tensor:
    return torch.where(unit == 0, 0.0, 1 / unit)[:, None] * values


def _to_half(values: Tensor) -> Tensor:
    """Round to half floats; what they do not hold becomes infinite, and is refused."""
    return values.half().float()
