"""GPTQ: rounding a weight column by column, each column's error made up for by those not yet rounded. Torch.

Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (2022), algorithm 1,
with static groups and activation order as its authors' code has them. Deviations: what a column makes up for is taken
by the Cholesky factor of the Hessian itself when that column is rounded, as of Babai's nearest plane, which gives the
same levels (Chen et al. 2025, arXiv:2507.18553) and inverts nothing; each group's scale is not the one of its range but
the one of least error weighted with the Hessian's diagonal, because that is the error that counts; inputs that were
always zero are rounded to the nearest rather than set to zero, because serving may use them; weights that a pass set to
zero stay zero, and their errors are made up for like those of rounding (as SparseGPT does both at once); and after the
loop sweeps of coordinate descent over levels and scales (as QuantEase, Behdin et al. 2023, arXiv:2309.01885) lower the
same error further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from compress.formats.schemes import WeightScheme
from compress.rounding.descent import descend
from compress.rounding.grid import Grid, finite, fit_grid, power_of_two
from compress.rounding.products import Compute, add_product
from compress.rounding.quantized_weight import ROWS, QuantizedWeight, join_rows, keep_zeros, zeros_to_keep

BLOCK = 128
"""Columns whose updates are applied to the rest of the weight at once."""
NEAR = 32
"""Columns whose updates are applied to the rest of their block at once."""
SMALL = 1e-3
"""Of the mean diagonal, added to each entry: an input that is never there still weighs something."""
JUDGED_ROWS = 128
"""Rows of a weight, evenly spaced, on which its output error is measured."""


class RoundedWeight(NamedTuple):
    """A weight, its relative output error, and that of rounding to the nearest on a grid fitted to the same inputs."""

    weight: QuantizedWeight
    error: float
    nearest_error: float


@dataclass(frozen=True, eq=False)
class Hessian:
    """`gram` [in, in]: E[x x^T] as the data tell it. `order` [in]: the inputs in the order in which they are rounded.

    `carry` [in, in], unit upper triangular, in that order: how much of an input's error each later one makes up for.
    `pivots` [in], in that order: the root of what is left to pay for an error of 1 once the later ones have done so.
    carry @ diag(pivots) is the Cholesky factor R, R R^T the damped Hessian; both float32. `dead` [in]: inputs that were
    always zero. `added` [in]: what damping put on the diagonal.
    """

    gram: Tensor
    order: Tensor
    carry: Tensor
    pivots: Tensor
    dead: Tensor
    added: Tensor

    @property
    def importance(self) -> Tensor:
        """Return the Hessian's diagonal [in]; inputs that were always zero still count a little."""
        diagonal = self.gram.diagonal()
        return diagonal + SMALL * diagonal.mean().clamp_min(1e-30)


def factor_hessian(gram: Tensor, damp_percent: float, act_order: bool = True) -> Hessian:
    """Order (by falling diagonal with `act_order`), damp and factor E[x x^T], float32 or float64.

    float32 is factored in float64 where it fails; ValueError if that does, or the matrix is not finite.
    """
    if not finite(gram):
        raise ValueError("NaN or Inf among its inputs on the calibration data")
    diagonal = gram.diagonal()
    dead = diagonal == 0
    order = (
        torch.argsort(diagonal, descending=True, stable=True)
        if act_order
        else torch.arange(len(gram), device=gram.device)
    )
    unit = power_of_two(diagonal.amax()).to(gram.dtype)  # what an input that was never seen weighs: about the largest
    added = torch.where(dead, unit, damp_percent * diagonal.sum() / max(int((~dead).sum()), 1))
    factor = _factor_damped(gram, order, added, gram.dtype)
    if factor is None:
        factor = _factor_damped(gram, order, added, torch.float64)
    if factor is None:
        raise ValueError(f"the Hessian of its inputs has no inverse at damp_percent {damp_percent:g}; give more")
    pivots = factor.diagonal().clone()
    return Hessian(gram, order, factor.div_(pivots).float(), pivots.float(), dead, added)


@dataclass(frozen=True)
class GptqRules:
    """How a weight is rounded. `signed`: scales may be negative (see `fit_grid`).

    `sweeps` of coordinate descent follow the loop; None: 1 with 4 bits and more, 3 with fewer, where they gain most (in
    2 bits 0.61 % of error became 0.41 %: notebooks/03_inside_gptq.ipynb). `block`: columns whose updates are applied to
    the rest of the weight at once. `compute`: the type of the large products.
    """

    signed: bool = True
    sweeps: int | None = None
    block: int = BLOCK
    compute: Compute = "float32"

    def sweeps_at(self, bits: int) -> int:
        return self.sweeps if self.sweeps is not None else 1 if bits >= 4 else 3


PUBLISHED = GptqRules(sweeps=0)
"""The loop alone."""


def gptq_round(weight: Tensor, hessian: Hessian, scheme: WeightScheme, rules: GptqRules = GptqRules()) -> RoundedWeight:
    """Quantize one weight [out, in], as `gptq_round_together` does several; a tall one by ROWS rows at a time.

    Rows are nothing to each other but in the choice of the nearest, which then falls for each part of them.
    """
    if len(weight) <= ROWS or not scheme.has_separate_rows:
        return gptq_round_together([weight], hessian, scheme, rules)[0]
    parts = weight.split(ROWS)
    rounded = [gptq_round_together([part], hessian, scheme, rules)[0] for part in parts]
    energies = torch.tensor(_measure_energies([part[::JUDGED_ROWS].float() for part in parts], hessian.gram))
    shares = (energies / energies.sum().clamp_min(1e-30)).tolist()
    errors = sum(share * part.error for share, part in zip(shares, rounded, strict=True))
    nearest = sum(share * part.nearest_error for share, part in zip(shares, rounded, strict=True))
    return RoundedWeight(join_rows([part.weight for part in rounded]), errors, nearest)


def gptq_round_together(
    weights: Sequence[Tensor], hessian: Hessian, scheme: WeightScheme, rules: GptqRules = GptqRules()
) -> list[RoundedWeight]:
    """Quantize weights [out, in] that read the same inputs, in one loop over those.

    The output error is E|(W - Q) x|^2 / E|W x|^2 by the Hessian's matrix, on up to JUDGED_ROWS outputs. Never worse
    than the nearest: where the column order leaves a larger error, the nearest is what is returned. Raises ValueError
    as `fit_grid` does.
    """
    if scheme.rows > 1 and any(len(part) % scheme.rows for part in weights[:-1]):
        return [gptq_round(part, hessian, scheme, rules) for part in weights]  # blocks of rows that end with a weight
    weight = torch.cat([part.float() for part in weights])
    power = power_of_two(weight.abs().amax(1, keepdim=True))  # [out, 1]
    if scheme.scales == "e4m3" or scheme.rows > 1 or scheme.group_size == 0:
        power = power.amax().expand_as(power)  # outputs share what scales are made of
    weight /= power
    plain = fit_grid(weight, scheme, hessian.importance, rules.signed)
    zero_mask = _concat_zero_masks(weights)
    quantized, grid = round_columns(weight, hessian, plain, rules, zero_mask), plain
    if sweeps := rules.sweeps_at(scheme.bits):
        quantized, grid = descend(
            weight, hessian.gram, hessian.added, quantized, grid, sweeps, rules.compute, zero_mask
        )
    grid, plain = grid.multiply(power), plain.multiply(power)
    if scheme.group_size == 0:  # one scale for all of these weights, whichever levels each of them gets
        plain = replace(plain, scales=grid.scales)
    sizes = [len(part) for part in weights]
    parts = zip(weights, quantized.split(sizes), _split_grid(grid, sizes), _split_grid(plain, sizes), strict=True)
    return [_choose_better(part.float(), lv, new, old, hessian.gram, scheme) for part, lv, new, old in parts]


def _concat_zero_masks(weights: Sequence[Tensor]) -> Tensor | None:
    """Return a mask over the rows of all weights, True where one is to stay zero; None if all are dense."""
    masks = [zeros_to_keep(weight) for weight in weights]
    if all(mask is None for mask in masks):
        return None
    return torch.cat(
        [
            torch.zeros_like(weight, dtype=torch.bool) if mask is None else mask
            for weight, mask in zip(weights, masks, strict=True)
        ]
    )


def _choose_better(
    weight: Tensor, quantized: Tensor, grid: Grid, plain: Grid, gram: Tensor, scheme: WeightScheme
) -> RoundedWeight:
    """Return the record of the levels found, or of the nearest ones where their output error is less."""
    stride = -(-len(weight) // JUDGED_ROWS)
    rows, sample = weight[::stride], plain.sampled(stride)
    nearest = sample.values(sample.quantize(rows))
    total, error, other = _measure_energies(
        [rows, rows - grid.sampled(stride).values(quantized[::stride]), rows - nearest], gram
    )
    total = max(total, 1e-30)  # a unit's smallest part: only rows that read nothing have less
    if error <= other:
        return RoundedWeight(grid.pack(quantized, scheme), error / total, other / total)
    return RoundedWeight(plain.pack(plain.quantize(weight), scheme), other / total, other / total)


def output_error(weight: Tensor, rounded: Tensor, gram: Tensor) -> float:
    """Return E|(W - Q) x|^2 / E|W x|^2 for inputs with this Gram matrix."""
    total, error = _measure_energies([weight, weight - rounded], gram)
    return error / max(total, 1e-30)


def _measure_energies(matrices: Sequence[Tensor], gram: Tensor) -> list[float]:
    """Return E|M x|^2 of each matrix in one unit that is left open: only their ratios mean anything."""
    power = power_of_two(torch.stack([matrix.abs().amax() for matrix in matrices]).amax())
    gram = gram / power_of_two(gram.diagonal().amax())
    matrices = [(matrix / power).to(gram.dtype) for matrix in matrices]
    return [float(((matrix @ gram) * matrix).sum(dtype=torch.float64)) for matrix in matrices]


def round_columns(
    weight: Tensor, hessian: Hessian, grid: Grid, rules: GptqRules = PUBLISHED, zero_mask: Tensor | None = None
) -> Tensor:
    """Return levels [out, in] of `weight` [out, in] on `grid` by algorithm 1: later columns make up for earlier errors.

    `zero_mask` [out, in]: True where the level stays that of zero, whatever came to the weight from earlier columns.
    """
    order, carry = hessian.order, hessian.carry
    n, size = weight.shape[1], weight.shape[1] // grid.scales.shape[1]
    group = (order // size).tolist()
    quantized = weight.T[order].contiguous()  # [in, out], in order of work: weights, and levels once they are rounded
    owed = torch.zeros_like(quantized)  # what each weight makes up for of the errors before it
    scales = grid.scales.T.contiguous()  # [groups, out]
    inverse = 1 / scales
    zeros = None if grid.zeros is None else grid.zeros.T.contiguous()
    zero_mask = None if zero_mask is None else zero_mask.T[order].contiguous()
    for start in range(0, n, rules.block):
        stop = min(start + rules.block, n)
        errors = quantized.new_empty(stop - start, quantized.shape[1])  # [block, out]
        near = start
        for column in range(start, stop):
            k, g = column - start, group[column]
            if column == near + NEAR:
                owed[column:stop] += carry[near:column, column:stop].T @ errors[near - start : k]
                near = column
            value = quantized[column]
            level = torch.addmv(owed[column], errors[near - start : k].T, carry[near:column, column])
            level.add_(value).mul_(inverse[g])
            grid.numbers.nearest_(level, None if zeros is None else zeros[g])
            if zero_mask is not None:
                keep_zeros(level, zero_mask[column], None if zeros is None else zeros[g])
            torch.addcmul(value, level if zeros is None else level - zeros[g], scales[g], value=-1, out=errors[k])
            quantized[column] = level
        add_product(owed[stop:], carry[start:stop, stop:].T, errors, rules.compute)
    placed = torch.empty_like(quantized)
    placed[order] = quantized
    return placed.T.contiguous()


def _split_grid(grid: Grid, sizes: list[int]) -> list[Grid]:
    zeros = [None] * len(sizes) if grid.zeros is None else list(grid.zeros.split(sizes))
    parts = zip(grid.scales.split(sizes), zeros, strict=True)
    return [replace(grid, scales=scales.contiguous(), zeros=some) for scales, some in parts]


def _factor_damped(gram: Tensor, order: Tensor, added: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return R, upper triangular, with R R^T = `gram` damped, in `order`; None unless that is positive."""
    backward = order.flip(0)
    matrix = gram[backward[:, None], backward].to(dtype)
    matrix.diagonal().add_(added[backward])
    lower, failed = torch.linalg.cholesky_ex(matrix)
    del matrix
    return None if failed or not finite(lower) else lower.flip(0, 1)
