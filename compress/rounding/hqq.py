"""HQQ: scales and zero points that leave the weights few large errors; needs no data. Torch.

Badri & Shaji, Half-Quadratic Quantization of Large Machine Learning Models (2023): minimise sum |W - Q|^p, p < 1, by
splitting the error: its sparse part E by a shrinkage, then the grid by least squares of W - E. Deviations: errors are
shrunk in units of the scale, so that the result does not depend on the weights' size; zero points are whole numbers, as
files store them, and symmetric weights learn the scale alone; the start is the grid of least squared error, and each
group keeps the best grid that it saw.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.formats.schemes import WeightScheme
from compress.rounding.grid import CHUNK, Grid, fit_grid, power_of_two
from compress.rounding.numbers import Numbers
from compress.rounding.quantized_weight import SMALLEST_SCALE, QuantizedWeight

POWER, BETA, GROWTH, STEPS = 0.7, 10.0, 1.01, 20
"""As in the authors' code."""


@dataclass
class _State:
    """Weights and levels [out, groups, group] of some rows, their scales and zero points [out, groups, 1]."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor
    numbers: Numbers

    def quantize(self) -> Tensor:
        return self.numbers.nearest_(self.weight / self.scales, self.zeros)

    def error(self) -> Tensor:
        """Return sum |W - Q|^0.7 of each group, [out, groups, 1]."""
        difference = self.weight - (self.quantize() - self.zeros) * self.scales
        return difference.abs_().pow_(POWER).sum(2, keepdim=True)


def hqq_round(weight: Tensor, scheme: WeightScheme, signed: bool = True, steps: int = STEPS) -> QuantizedWeight:
    """Quantize `weight` [out, in]; sum |W - Q|^0.7 is at most that of rounding to the grid of least squared error.

    Raises ValueError as `fit_grid` does.
    """
    weight = weight.float()
    power = power_of_two(weight.abs().amax(1, keepdim=True))  # [out, 1]
    weight = weight / power
    grid = fit_grid(weight, scheme, signed=signed)
    rows = max(1, CHUNK // weight.shape[1])
    parts = [_improve_rows(weight[i : i + rows], grid, i, scheme.symmetric, steps) for i in range(0, len(weight), rows)]
    scales, zeros = (torch.cat([part[k] for part in parts]) for k in (0, 1))
    grid = replace(grid, scales=scales, zeros=None if grid.zeros is None else zeros)
    quantized = grid.quantize(weight)
    return grid.multiply(power).pack(quantized, scheme)


def _improve_rows(rows: Tensor, grid: Grid, first: int, symmetric: bool, steps: int) -> tuple[Tensor, Tensor]:
    """Return better (scales, zero points) [out, groups] for `rows`, which begin at row `first` of the grid."""
    scales = grid.scales[first : first + len(rows), :, None]  # [out, groups, 1]
    zeros = torch.zeros_like(scales) if grid.zeros is None else grid.zeros[first : first + len(rows), :, None]
    state = _State(rows.reshape(len(rows), scales.shape[1], -1), scales, zeros, grid.numbers)
    best, least, beta = (state.scales, state.zeros), state.error(), BETA
    for _ in range(steps):
        _update_grid(state, beta, symmetric)
        beta *= GROWTH
        error = state.error()
        better = error < least
        best = torch.where(better, state.scales, best[0]), torch.where(better, state.zeros, best[1])
        least = torch.where(better, error, least)
    return best[0][:, :, 0], best[1][:, :, 0]


def _update_grid(state: _State, beta: float, symmetric: bool) -> None:
    """Shrink the errors, then fit the grid to the weights without them."""
    quantized = state.quantize()
    error = (state.weight - (quantized - state.zeros) * state.scales) / state.scales
    sparse = error.sign() * (error.abs() - error.abs().clamp_min(1e-6) ** (POWER - 1) / beta).clamp_min(0)
    clean = state.weight - sparse * state.scales
    if not symmetric:
        state.zeros = (
            (quantized - clean / state.scales)
            .mean(2, keepdim=True)
            .round_()
            .clamp_(state.numbers.low, state.numbers.high)
        )
    centred = quantized - state.zeros
    energy = centred.square().sum(2, keepdim=True)
    scales = (centred * clean).sum(2, keepdim=True) / energy.clamp_min(1e-30)
    usable = (scales.abs() > SMALLEST_SCALE) & (scales.sign() == state.scales.sign())
    state.scales = torch.where(usable, scales, state.scales)
