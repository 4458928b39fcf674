"""Weights on a grid whose rounding and scales are learned: what they stand for, with gradients, and their integers.

Rounding passes gradients on as if it were not there (the straight-through estimator), so that what is learned with is
at every moment what would be stored, exactly. Weights in floats of few bits are learned by their places among these
(`Numbers.place`), which are whole numbers as integers are. One forward and one way back to integers for all
(`FakeWeight`); what differs is what is learned: a position among the levels (`LearnedWeight`, for `tune`), the float
weight itself (`ScaledWeight`, for `qat`) or an offset and the ends of the range (`ShiftedWeight`, for `autoround`).
Torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.formats.schemes import WeightScheme
from compress.rounding.grid import Grid
from compress.rounding.numbers import FLOATS, Numbers, ScaleRule
from compress.rounding.quantized_weight import QuantizedWeight, zeros_to_keep

REACH = 0.45
"""How far from its integer, in levels, a float weight may pull the place where learning starts; below a half."""
MOST_SHIFT = 0.5
MOST_STRETCH = 0.5
"""A learned scale stays between half and one and a half of the start's, a range's end within half a level."""


class FakeWeight(nn.Module):
    """A weight that starts as a `QuantizedWeight` and is learned; `forward()` gives it in the shape of its integers.

    What is kept of the start: integers, or places of floats, as float32 levels [out, groups, group], scales [out,
    groups], zero points the same or None. The levels stay in the range of the bits; a symmetric start that never uses
    the lowest one and has no negative scale stays without it (kernels may have to negate it). `weight`: the values
    before rounding; where a pass set them to zero, they stay zero. `scheme`: what the start is stored as, which floats
    need to be given. Their scales are learned where they are any floats of the layer's own. ValueError: the start is
    not made of the numbers of its scheme.
    """

    quantized: Tensor
    scales: Tensor
    zeros: Tensor | None
    zero_mask: Tensor | None

    def __init__(
        self, start: QuantizedWeight, weight: Tensor | None = None, scheme: WeightScheme | None = None
    ) -> None:
        super().__init__()
        whole = scheme is None or scheme.kind == "int"
        if whole != (start.values.dtype in (np.int8, np.uint8)) or start.offsets is not None:
            kind = str(start.values.dtype) + ("" if start.offsets is None else " with offsets")
            raise ValueError(f"{kind} weights are not the numbers of its scheme, so their rounding is not learned")
        self.start, self.scheme, self.device = start, scheme, None if weight is None else weight.device
        self.rule = ScaleRule() if scheme is None or whole else _find_rule(start, scheme)
        self._register_fixed("scales", torch.from_numpy(np.ascontiguousarray(start.scales, dtype=np.float32)))
        zeros = start.zero_points
        self._register_fixed("zeros", None if zeros is None else torch.from_numpy(zeros.astype(np.float32)))
        self.numbers = FLOATS[start.bits] if not whole else Numbers(*level_range(start))
        values = self.numbers.place(torch.from_numpy(start.values.astype(np.float32)))
        self._register_fixed("quantized", values.reshape(len(values), self.scales.shape[1], -1))  # [out, groups, group]
        self.low, self.high = self.numbers.ends
        zero_mask = None if weight is None else zeros_to_keep(weight.detach())
        self._register_fixed("zero_mask", None if zero_mask is None else zero_mask.reshape(self.quantized.shape))

    def _register_fixed(self, name: str, value: Tensor | None) -> None:
        """Register an attribute that moves with the module but is not in its saved state: the start decides it."""
        self.register_buffer(name, None if value is None else value.to(self.device), persistent=False)

    def rounding(self) -> list[nn.Parameter]:
        """Return the parameters that decide the integers."""
        raise NotImplementedError

    def scaling(self) -> list[nn.Parameter]:
        """Return the parameters that decide the scales."""
        raise NotImplementedError

    def confine(self) -> None:
        """Bring what was learned back into its bounds; after each step."""
        raise NotImplementedError

    def grid(self) -> tuple[Tensor, Grid]:
        """Return the levels [out, groups, group] as they are now and the grid they are on, with gradients."""
        raise NotImplementedError

    def forward(self) -> Tensor:
        quantized, grid = self.grid()
        return grid.values(self.numbers.value(quantized)).reshape(self.start.values.shape)

    @torch.no_grad()
    def freeze(self) -> QuantizedWeight:
        """Return what was learned as a record, whose `dequantize()` equals `forward()` exactly."""
        quantized, grid = self.grid()
        values = (
            self.numbers.value(quantized).reshape(self.start.values.shape).cpu().numpy().astype(self.start.values.dtype)
        )
        points = self.start.zero_points
        if points is not None and grid.zeros is not None:
            points = grid.zeros.cpu().numpy().astype(points.dtype)
        scales = grid.scales.contiguous()
        stored = {name: array.cpu().numpy() for name, array in self.rule.encode(scales).items()}
        return replace(self.start, values=values, scales=scales.cpu().numpy().copy(), zero_points=points, stored=stored)

    def on_grid(self, quantized: Tensor, scales: Tensor, zeros: Tensor | None) -> tuple[Tensor, Grid]:
        """Return `quantized` and their grid; where a weight is to stay zero it is zero's level, without a gradient."""
        if self.zero_mask is not None:
            quantized = torch.where(
                self.zero_mask, quantized.new_zeros(()) if zeros is None else zeros[:, :, None], quantized
            )
        return quantized, Grid(scales, zeros, self.numbers, self.rule)

    def grow(self, growth: Tensor) -> Tensor:
        """Return scales [out, groups] grown by a part of the start's, with gradients."""
        if self.rule.rows > 1:
            growth = growth.repeat_interleave(self.rule.rows, 0)[: len(self.scales)]
        return self.scales * (1 + growth)

    def _make_growth(self) -> nn.Parameter:
        """Return what `grow` takes, none of it grown yet: for each scale, once where rows share it.

        It is not learned where a scale is one of few numbers: a step of E4M3 is 6 to 12 %, and steps of the gradient's
        sign moved all scales by one at once (NVFP4, a layer of low-rank inputs: 0.93 of the loss left against 0.63).
        """
        shown = self.scales[:: self.rule.rows] if self.rule.rows > 1 else self.scales
        return nn.Parameter(torch.zeros_like(shown), self.rule.kind == "float" and self.rule.rows != 0)

    def places(self, weight: Tensor | None) -> Tensor:
        """Return positions in levels [out, groups, group], each of which rounds to the start's integer.

        Where `weight` ([out, in, ...], the values before rounding) lies in its integer's cell, its own position; beyond
        that REACH from the integer; without it the integer itself.
        """
        if weight is None:
            return self.quantized.clone()
        exact = self.numbers.place(weight.detach().float().reshape(self.quantized.shape) / self.scales[:, :, None])
        if self.zeros is not None:
            exact = exact + self.zeros[:, :, None]
        return self.quantized + (exact - self.quantized).nan_to_num(0.0).clamp_(-REACH, REACH)


class LearnedWeight(FakeWeight):
    """Each weight's position between the levels is learned for itself, and each scale as a factor of the start's.

    As LSQ (Esser et al. 2019, arXiv:1902.08153) with the position counted in levels, so that a scale that changes
    moves no weight to another level. Zero points stay.
    """

    def __init__(
        self,
        start: QuantizedWeight,
        weight: Tensor | None = None,
        learn_rounding: bool = True,
        scheme: WeightScheme | None = None,
    ) -> None:
        super().__init__(start, weight, scheme)
        self.learn_rounding = learn_rounding
        places = self.places(weight) if learn_rounding else self.quantized
        self.position = nn.Parameter(places, requires_grad=learn_rounding)
        self.growth = self._make_growth()

    def rounding(self) -> list[nn.Parameter]:
        return [self.position] if self.learn_rounding else []

    def scaling(self) -> list[nn.Parameter]:
        return [self.growth]

    @torch.no_grad()
    def confine(self) -> None:
        """Keep positions within half a level of the range, scales between half and one and a half of the start's."""
        self.position.clamp_(self.low - MOST_SHIFT, self.high + MOST_SHIFT)
        self.growth.clamp_(-MOST_STRETCH, MOST_STRETCH)

    def grid(self) -> tuple[Tensor, Grid]:
        quantized = to_level(self.position, self.low, self.high)
        return self.on_grid(quantized, self.grow(self.growth), self.zeros)


class ScaledWeight(FakeWeight):
    """LSQ (Esser et al. 2019, arXiv:1902.08153): a float weight and its scale are learned, and what is used is rounded.

    The weight is counted in the start's scales, so that one rate fits all layers, and a scale as a factor of its own.
    Beyond the range a weight gets no gradient and is not brought back: what lies far out stays where it is, while the
    others find their places. Gradients of scales are not made smaller, as in the paper: Adam's steps are of one size.
    """

    def __init__(self, start: QuantizedWeight, weight: Tensor) -> None:
        super().__init__(start, weight)
        grouped = weight.detach().float().reshape(self.quantized.shape)
        self.position = nn.Parameter(grouped / self.scales[:, :, None])
        self.growth = nn.Parameter(torch.zeros_like(self.scales))

    def rounding(self) -> list[nn.Parameter]:
        return [self.position]

    def scaling(self) -> list[nn.Parameter]:
        return [self.growth]

    @torch.no_grad()
    def confine(self) -> None:
        """Keep scales between half and one and a half of the start's."""
        self.growth.clamp_(-MOST_STRETCH, MOST_STRETCH)

    def grid(self) -> tuple[Tensor, Grid]:
        factor = 1 + self.growth
        position = self.position / factor[:, :, None]
        if self.zeros is not None:
            position = position + self.zeros[:, :, None]
        quantized = straight_round(position).clamp(self.low, self.high)
        return self.on_grid(quantized, self.scales * factor, self.zeros)


class ShiftedWeight(FakeWeight):
    """SignRound (Cheng et al. 2023, arXiv:2309.05516, equation 3): round(W / s + V), V and the range's ends learned.

    V within half a level. The ends are factors of those of the start's grid, between 0.5 and 1.5 (the paper's alpha and
    beta, of the whole range, end at 1: here the start may be cut already). A symmetric grid has one for both ends.
    """

    weight: Tensor

    def __init__(
        self, start: QuantizedWeight, weight: Tensor | None = None, scheme: WeightScheme | None = None
    ) -> None:
        super().__init__(start, weight, scheme)
        offset = 0.0 if self.zeros is None else self.zeros[:, :, None]
        self._register_fixed("weight", self.numbers.value(self.places(weight) - offset) * self.scales[:, :, None])
        self.shift = nn.Parameter(torch.zeros_like(self.quantized))
        self.upper = self._make_growth()
        self.lower = None if self.zeros is None else nn.Parameter(torch.zeros_like(self.scales))

    def rounding(self) -> list[nn.Parameter]:
        return [self.shift]

    def scaling(self) -> list[nn.Parameter]:
        return [self.upper] if self.lower is None else [self.upper, self.lower]

    @torch.no_grad()
    def confine(self) -> None:
        self.shift.clamp_(-MOST_SHIFT, MOST_SHIFT)
        for end in self.scaling():
            end.clamp_(-MOST_STRETCH, MOST_STRETCH)

    def grid(self) -> tuple[Tensor, Grid]:
        scales, zeros = self._compute_scales()
        position = self.numbers.place(self.weight / scales[:, :, None]) + self.shift
        if zeros is not None:
            position = position + zeros[:, :, None]
        return self.on_grid(straight_round(position).clamp(self.low, self.high), scales, zeros)

    def _compute_scales(self) -> tuple[Tensor, Tensor | None]:
        """Return scales and zero points of the range between the learned ends; exactly the start's where unchanged."""
        if self.zeros is None or self.lower is None:
            return self.grow(self.upper), None
        above, below = self.high - self.zeros, self.zeros - self.low
        growth = (above * self.upper + below * self.lower) / (self.high - self.low)
        scales = self.scales * (1 + growth)
        zeros = straight_round(self.low + below * (1 + self.lower) / (1 + growth))
        return scales, zeros.clamp(self.low, self.high)


def _find_rule(weight: QuantizedWeight, scheme: WeightScheme) -> ScaleRule:
    """Return which scales a weight of this scheme may have; an NVFP4 tensor's own scale stays as it is."""
    return ScaleRule.of(scheme, float(weight.stored["global_scale"][0]) if scheme.scales == "e4m3" else 1.0)


def level_range(weight: QuantizedWeight) -> tuple[int, int]:
    """Return the least and the greatest integer that `weight` may take, as `FakeWeight` says."""
    half = 2 ** (weight.bits - 1)
    if weight.zero_points is not None:
        return 0, 2 * half - 1
    whole = bool((weight.scales < 0).any()) or int(weight.values.min()) == -half
    return (-half if whole else 1 - half), half - 1


def straight_round(x: Tensor) -> Tensor:
    """Round to the nearest integers, with the gradient of `x`."""
    return pass_straight(x, x.detach().round())


def to_level(x: Tensor, low: int, high: int) -> Tensor:
    """Round to the nearest of the integers from `low` to `high`, with the gradient of `x` also beyond them."""
    return pass_straight(x, x.detach().round().clamp_(low, high))


def pass_straight(x: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the gradient of `x`: the straight-through estimator."""
    given: Tensor = _Straight.apply(x, rounded)
    return given


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
