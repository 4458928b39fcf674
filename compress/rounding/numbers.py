"""The numbers that a weight's scale multiplies, whole or floats of few bits, and scales that files can hold. Torch.

E2M1 (FP4) and E4M3 (FP8) are those of the OCP Microscaling Formats specification 1.0 (2023), section 5.3; ties go to
the even mantissa, as hardware and compressed-tensors round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from compress.formats.schemes import IQ4_NUMBERS, ScaleType, WeightScheme

EXPONENT_BITS = 0x7F800000
"""Of a float32: with them alone it is the power of two at or below it (0 for numbers below all normal ones)."""
MANTISSA_BITS, BIAS = 23, 127


@dataclass(frozen=True)
class Numbers:
    """The whole numbers from `low` to `high`; or floats with so many bits of `mantissa`, or those of a `table`, between
    these ends.

    `least`: the exponent of the smallest normal float. A number's *place* counts the numbers from 0 to it: whole
    numbers are their own places, and a float's is its code without the sign, so that learned rounding moves by steps
    that are alike everywhere. Tables, which nothing learns on, have no places.
    """

    low: float
    high: float
    mantissa: int | None = None
    least: int = 0
    table: tuple[int, ...] | None = None

    def nearest_(self, x: Tensor, zeros: Tensor | None = None) -> Tensor:
        """Set `x` (float32, changed in place) to the nearest numbers; `zeros` are added to whole ones after rounding.

        As QuantizeLinear and as kernels do it. `zeros` broadcasts over `x`.
        """
        if self.table is not None:
            # bucketize takes 15 times as long; NaN, of 0 by a scale that has no inverse, has no place
            halves = (2 * x).floor_().nan_to_num_(0.0).clamp_(2 * self.low, 2 * self.high).sub_(2 * self.low)
            nearest = _list_nearest(self.table).to(x.device)
            return x.copy_(nearest.index_select(0, halves.to(torch.int32).reshape(-1)).reshape(x.shape))
        if self.mantissa is None:
            x.round_()
            if zeros is not None:
                x += zeros
            return x.clamp_(self.low, self.high)
        step = self._find_binade(x.clamp_(self.low, self.high)).mul_(2.0**-self.mantissa)
        return x.div_(step).round_().mul_(step)

    def place(self, x: Tensor) -> Tensor:
        """Return places of real numbers, between those of their neighbours, with gradients."""
        if self.mantissa is None:
            return x
        binade = self._find_binade(x.detach())
        exponent = (binade.view(torch.int32) >> MANTISSA_BITS) - BIAS
        steps = 2**self.mantissa
        return x / binade * steps + x.detach().sign() * ((exponent - self.least) * steps)

    def value(self, places: Tensor) -> Tensor:
        """Return the numbers at places, straight lines between them, with gradients: the inverse of `place`."""
        if self.mantissa is None:
            return places
        steps = 2**self.mantissa
        above = (places.detach().abs() / steps).floor_().sub_(1).clamp_min_(0)  # binades above the smallest
        unit = torch.exp2(above + (self.least - self.mantissa))
        return (places - places.detach().sign() * above * steps) * unit

    @property
    def ends(self) -> tuple[int, int]:
        """Return the places of the least and the greatest number."""
        low, high = self.place(torch.tensor([self.low, self.high])).tolist()
        return int(low), int(high)

    def _find_binade(self, x: Tensor) -> Tensor:
        """Return the power of two at or below each magnitude, that of the smallest normal number at least."""
        return (x.view(torch.int32) & EXPONENT_BITS).view(torch.float32).clamp_min_(2.0**self.least)


@cache
def _list_nearest(table: tuple[int, ...]) -> Tensor:
    """Return the nearest of whole numbers to each half from the least to the greatest; of two as near the larger."""
    numbers = torch.tensor(table, dtype=torch.float32)
    halves = torch.arange(2 * table[0], 2 * table[-1] + 1) / 2
    return numbers[torch.bucketize(halves, (numbers[1:] + numbers[:-1]) / 2, right=True)]


E2M1 = Numbers(-6.0, 6.0, mantissa=1, least=0)
E4M3 = Numbers(-448.0, 448.0, mantissa=3, least=-6)
IQ4 = Numbers(IQ4_NUMBERS[0], IQ4_NUMBERS[-1], table=IQ4_NUMBERS)
FLOATS = {4: E2M1, 8: E4M3}
"""Bits -> the floats of a scheme of kind "float"."""
LEAST_E4M3 = 2.0**-9
LEAST_POWER, MOST_POWER = 2.0**-126, 2.0**127
"""Of two, that E8M0 and float32 both hold as a normal number."""


@dataclass(frozen=True)
class ScaleRule:
    """Which scales a file can hold. `kind`: as of `WeightScheme.scales`; `rows`: outputs that share one, 0: all.

    `global_scale`: a float32; an E4M3 scale stands for its value divided by it.
    """

    kind: ScaleType = "float"
    rows: int = 1
    global_scale: float = 1.0

    @classmethod
    def of(cls, scheme: WeightScheme, global_scale: float = 1.0) -> ScaleRule:
        return cls(scheme.scales, 0 if scheme.group_size == 0 else scheme.rows, global_scale)

    @property
    def free(self) -> bool:
        """Return whether each scale is any float of its own."""
        return self.kind == "float" and self.rows == 1

    @property
    def spans_tensor(self) -> bool:
        """Return whether one number of the file stands above all scales of a weight, or is the only one."""
        return self.kind == "e4m3" or self.rows == 0

    def nearest(self, scales: Tensor) -> Tensor:
        """Return the scales [...] that a file can hold nearest to these, which are float32 and positive."""
        if self.kind == "e4m3":
            unit = torch.tensor(self.global_scale, dtype=torch.float32)
            return E4M3.nearest_((scales * unit).clamp_(LEAST_E4M3, E4M3.high)) / unit
        if self.kind == "e8m0":
            below = (scales.view(torch.int32) & EXPONENT_BITS).view(torch.float32).clamp_(LEAST_POWER, MOST_POWER / 2)
            return torch.where(scales > 1.5 * below, 2 * below, below)
        return scales

    def divide(self, power: float) -> ScaleRule:
        """Return the rule for a weight that was divided by a power of two."""
        return replace(self, global_scale=self.global_scale * power) if self.kind == "e4m3" else self

    def pool(self, sums: Tensor) -> Tensor:
        """Return for each output [out] the sum over those that share its scale."""
        if self.rows == 1:
            return sums
        if self.rows == 0:
            return sums.sum().expand_as(sums)
        block = torch.arange(len(sums), device=sums.device) // self.rows
        pooled = torch.zeros(int(block[-1]) + 1, dtype=sums.dtype, device=sums.device).index_add_(0, block, sums)
        return pooled[block]

    def encode(self, scales: Tensor) -> dict[str, Tensor]:
        """Return what a file holds in place of scales [out, groups] that obey the rule; empty: the scales themselves.

        e4m3: `scales` (the bytes of E4M3) and `global_scale` float32 [1]; e8m0: `exponents`, uint8 with a bias of 127.
        """
        if self.kind == "e4m3":
            unit = torch.tensor(self.global_scale, dtype=torch.float32)
            codes = (scales * unit).to(torch.float8_e4m3fn).view(torch.uint8)
            return {"scales": codes, "global_scale": unit.reshape(1)}
        if self.kind == "e8m0":
            return {"exponents": (scales.view(torch.int32) >> MANTISSA_BITS).to(torch.uint8)}
        return {}


ANY_FLOAT = ScaleRule()
