"""Coordinate descent on the error that GPTQ lowers: levels column by column, then each group's scale. Torch.

As QuantEase (Behdin et al. 2023, arXiv:2309.01885), with the scales among the coordinates: given all else, the best
level of one input is the nearest to a closed form, and the best scale of one group a quotient. The error
tr((W - Q) G (W - Q)^T) never rises.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from compress.rounding.grid import Grid, power_of_two
from compress.rounding.products import Compute, multiply
from compress.rounding.quantized_weight import keep_zeros

BLOCK = 128
"""Columns whose residual is taken in one product."""
NEAR = 32
"""Columns whose changes are taken off the others' residuals in one product."""


def descend(
    weight: Tensor,
    gram: Tensor,
    added: Tensor,
    quantized: Tensor,
    grid: Grid,
    sweeps: int,
    compute: Compute = "float32",
    zero_mask: Tensor | None = None,
    rescale: bool = True,
) -> tuple[Tensor, Grid]:
    """Return better levels [out, in] and scales for `weight` [out, in] than those given, under a damped Gram matrix.

    That is `gram`, float32 [in, in], with `added` [in] on its diagonal, which makes that positive. Nothing given is
    changed. `compute`: the type of the large products; in bfloat16 a level may come out one beside the best.
    `zero_mask` [out, in]: True where the level stays that of zero, which it is in `quantized`. `rescale`: scales may
    change.
    """
    work = _Descent(weight, gram, added, quantized, grid, compute, zero_mask, rescale)
    for _ in range(sweeps):
        work.sweep()
    return work.quantized.T.contiguous(), replace(grid, scales=work.scales.T.contiguous())


class _Descent:
    """The state of a descent, all transposed, [in, out], so that a column is contiguous. `left` = W - Q."""

    def __init__(
        self,
        weight: Tensor,
        gram: Tensor,
        added: Tensor,
        quantized: Tensor,
        grid: Grid,
        compute: Compute,
        zero_mask: Tensor | None,
        rescale: bool = True,
    ) -> None:
        self.rescale = rescale
        power = power_of_two(gram.diagonal().amax())  # 1 over the pivots of tiny inputs is no float32
        self.gram, self.added = gram.float() / power, added.float() / power
        self.numbers, self.rule = grid.numbers, grid.rule
        self.pivots = (self.gram.diagonal() + self.added).tolist()
        self.quantized = quantized.T.clone(memory_format=torch.contiguous_format)
        self.scales = grid.scales.T.clone(memory_format=torch.contiguous_format)  # [groups, out]
        self.zeros = None if grid.zeros is None else grid.zeros.T.contiguous()
        self.zero_mask = None if zero_mask is None else zero_mask.T.contiguous()
        self.size = weight.shape[1] // len(self.scales)
        self.left = (weight - grid.values(quantized)).T.contiguous()
        self.compute = compute

    def sweep(self) -> None:
        """Update every level once, and every scale."""
        n = len(self.left)
        width = max(1, BLOCK // self.size) * self.size if self.size <= BLOCK else BLOCK
        for start in range(0, n, width):
            stop = min(start + width, n)
            residual = self._relevel(start, stop, self._compute_residual(start, stop))
            if self.rescale and self.size <= BLOCK:
                for first in range(start, stop, self.size):
                    self._rescale(first, start, stop, residual)
        if self.rescale and self.size > BLOCK:
            for first in range(0, n, self.size):
                stop = first + self.size
                self._rescale(first, first, stop, self._compute_residual(first, stop))

    def _compute_damped_gram(self, start: int, stop: int) -> Tensor:
        """Return the damped Gram matrix of the columns [start, stop) among themselves."""
        block = self.gram[start:stop, start:stop].clone()
        block.diagonal().add_(self.added[start:stop])
        return block

    def _compute_residual(self, start: int, stop: int) -> Tensor:
        """Return the residual of the columns [start, stop) as they are now, float32 [block, out]."""
        rows = self.gram[start:stop].clone()
        rows[:, start:stop].diagonal().add_(self.added[start:stop])
        residual: Tensor = multiply(rows, self.left, self.compute)
        return residual

    def _relevel(self, start: int, stop: int, residual: Tensor) -> Tensor:
        """Set the best levels of the columns [start, stop), one after the other; return the residual afterwards."""
        block = self._compute_damped_gram(start, stop)
        changes = torch.empty_like(residual)
        near = 0
        for k in range(stop - start):
            column, g = start + k, (start + k) // self.size
            if k == near + NEAR:
                residual.addmm_(block[:, near:k], changes[near:k], alpha=-1)
                near = k
            pull = torch.addmv(residual[k], changes[near:k].T, block[near:k, k], alpha=-1)
            level = self.quantized[column]
            # Q + pull / G_jj, in levels, is the level itself plus what the residual asks for.
            best = torch.addcdiv(level, pull, self.scales[g], value=1 / self.pivots[column])
            self.numbers.nearest_(best)
            if self.zero_mask is not None:
                keep_zeros(best, self.zero_mask[column], None if self.zeros is None else self.zeros[g])
            torch.mul(best - level, self.scales[g], out=changes[k])
            self.quantized[column] = best
        self.left[start:stop] -= changes
        return residual.addmm_(block[:, near:], changes[near:], alpha=-1)

    def _rescale(self, first: int, start: int, stop: int, residual: Tensor) -> None:
        """Set the best scale of the group that begins at `first`; keep `residual` of [start, stop) up to date."""
        g, end = first // self.size, first + self.size
        quantized = self.quantized[first:end]
        values = (quantized if self.zeros is None else quantized - self.zeros[g]) * self.scales[g]  # [group, out]
        gain = (values * residual[first - start : end - start]).sum(0)
        energy = (values * (self._compute_damped_gram(first, end) @ values)).sum(0)
        gain, energy = self.rule.pool(gain), self.rule.pool(energy)
        factor = torch.where(energy > 0, gain / energy.clamp_min(1e-30), 0.0).clamp_min(-0.9)
        if not self.rule.free:
            # The error is a parabola of the scale: the nearest to its lowest point that a file holds is the best one.
            factor = self.rule.nearest(self.scales[g] * (1 + factor)) / self.scales[g] - 1
        changes = values * factor
        self.scales[g] *= 1 + factor
        if not self.rule.free:
            self.scales[g] = self.rule.nearest(self.scales[g])
        self.left[first:end] -= changes
        if stop > end:
            residual[end - start :].addmm_(self.gram[end:stop, first:end], changes, alpha=-1)
