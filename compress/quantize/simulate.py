"""Eight-bit rounding as the exported graph does it, with gradients: for weights and for what layers read. Torch.

Rounding lets gradients through as if it were not there (straight-through), and scales are learned: LSQ (Esser et al.
2019, arXiv:1902.08153, equation 3), for ranges with a zero point LSQ+ (Bhalgat et al. 2020, arXiv:2004.09576). A
deviation: what is learned are factors of the scales, and of the ends of ranges, that training starts with. A rate then
means the same for all of them, and an end at zero stays there, as it should after a Relu.

Apart from `fake`, whose weights are learned in levels of a grid by groups: here the float weight is the graph's own
parameter, which comes anew with each forward, and activations are rounded alike. Their scales' gradients are made
smaller (LSQ, section 2.2), and the gradient is one function of its own, so that a tensor the size of the activations is
kept once and not at each operation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.quantize.fake import pass_straight, straight_round
from compress.quantize.grid import nearest_levels
from compress.quantize.rounding import SMALLEST_SCALE, QuantizedWeight
from compress.quantize.state import Flavour, Range

LEVELS: dict[Flavour, tuple[int, int]] = {"u8s8": (0, 255), "s8s8": (-128, 127)}
"""The least and the greatest integer of an activation."""
TOP = 127
"""The greatest of a weight; the least is its negative, so that every kernel may negate it."""
LEAST_GROWTH, MOST_GROWTH = -0.9, 4.0
FOLLOWED = 0.02
"""The share of one step in the moving average of what is seen."""


class _FakeQuantize(torch.autograd.Function):
    """(clamp(round(x / scale) + zero, low, high) - zero) * scale, in float32: QuantizeLinear, then DequantizeLinear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, damp: float) -> Tensor:
        ctx.save_for_backward(x, scale, zero)
        ctx.low, ctx.high, ctx.damp = low, high, damp
        return nearest_levels(x, scale, zero, low, high).sub_(zero).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero = ctx.saved_tensors
        (gradient,) = gradients
        position = x / scale
        rounded = position.round().add_(zero)
        levels = rounded.clamp(ctx.low, ctx.high)
        outside = levels != rounded
        to_x = gradient.masked_fill(outside, 0.0)
        to_scale = to_zero = None
        if ctx.needs_input_grad[1]:
            slope = levels.sub_(zero).sub_(position.masked_fill_(outside, 0.0))
            to_scale = slope.mul_(gradient).sum_to_size(scale.shape) * ctx.damp
        if ctx.needs_input_grad[2]:
            to_zero = ((to_x - gradient) * scale).sum_to_size(zero.shape) * ctx.damp
        return to_x, to_scale, to_zero, None, None, None


def fake_quantize(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, count: int) -> Tensor:
    """Round `x` in float32 to (q - zero) * scale, q whole, from `low` to `high`; scale and zero broadcast over x.

    `count`: numbers that share a scale; its gradient is divided by sqrt(count * high), as in LSQ, section 2.2.
    """
    rounded: Tensor = _FakeQuantize.apply(x.float(), scale, zero, low, high, 1 / math.sqrt(max(count * high, 1)))
    return rounded


class LearnedRange(nn.Module):
    """The range of one activation, of which `growth` is learned: by gradients (`learn`), or by what is seen.

    Not learned, both ends follow the mean magnitude of what passes while `observing`, as a moving average. Where
    `frozen`, nothing follows any more. `growth` float32: [2] for u8s8 (low, high), [1] for s8s8 (peak).
    """

    start: Tensor
    held: Tensor
    magnitude: Tensor

    def __init__(self, start: Range, flavour: Flavour, learn: bool) -> None:
        super().__init__()
        self.range, self.flavour = start, flavour
        ends = [start.low, start.high] if flavour == "u8s8" else [start.peak]
        self.register_buffer("start", torch.tensor(ends, dtype=torch.float32), persistent=False)
        self.growth = nn.Parameter(torch.zeros(len(ends)), requires_grad=learn)
        self.learn, self.observing, self.frozen = learn, False, False
        self.register_buffer("held", torch.zeros(len(ends)))
        self.register_buffer("magnitude", torch.zeros(2))  # at the first step, and its moving average
        self.seen = torch.zeros(2, dtype=torch.float64)  # of this step: sum of magnitudes, count

    def forward(self, x: Tensor) -> Tensor:
        if self.observing and not self.learn and not self.frozen:
            self._add_magnitudes(x.detach())
        scale, zero = self.numbers()
        return fake_quantize(x, scale, zero, *LEVELS[self.flavour], x[0].numel())

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero point as float32), exactly those of `decided()`."""
        growth = self.growth.detach() if self.frozen else self.growth
        ends = self.start * (1 + growth)
        if self.flavour == "s8s8":
            scale = (ends[0].double().clamp_min(1e-12) / 127).float()
            return scale, torch.zeros_like(scale)
        low, high = ends.unbind()
        scale = ((high.double() - low.double()).clamp_min(1e-12) / 255).float()
        return scale, straight_round(-low / scale).clamp(0, 255)

    def _add_magnitudes(self, x: Tensor) -> None:
        self.seen += torch.tensor([float(x.abs().sum(dtype=torch.float64)), x.numel()], dtype=torch.float64)

    @torch.no_grad()
    def follow(self, seen: Tensor) -> None:
        """Follow `seen`, what all processes saw of a step; keep learned ends in bounds, frozen ones in place."""
        if self.frozen:
            self.growth.copy_(self.held)  # an optimizer's momentum would go on
            return
        if not self.learn and float(seen[1]):
            self._update_average(seen[0] / seen[1])
        self.growth.clamp_(LEAST_GROWTH, MOST_GROWTH)
        self.held.copy_(self.growth)

    def _update_average(self, magnitude: Tensor) -> None:
        first, mean = self.magnitude.tolist()
        now = float(magnitude)
        first, mean = (first, mean + FOLLOWED * (now - mean)) if first else (now, now)
        self.magnitude.copy_(torch.tensor([first, mean]))
        self.growth.fill_(mean / first - 1 if first else 0.0)

    def decide(self) -> Range:
        """Return the range as it is now. The other flavour's, which nothing was trained for, is stretched alike."""
        ends = (self.start * (1 + self.growth.detach())).cpu().tolist()
        if self.flavour == "u8s8":
            stretch = max(-ends[0], ends[1]) / max(-self.range.low, self.range.high, 1e-30)
            return Range(ends[0], ends[1], self.range.peak * stretch)
        stretch = ends[0] / max(self.range.peak, 1e-30)
        return Range(self.range.low * stretch, self.range.high * stretch, ends[0])


class LearnedScales(nn.Module):
    """The scales of one weight, one for each output channel; symmetric. `growth` float32 [out] is learned."""

    start: Tensor

    def __init__(self, start: QuantizedWeight, learn: bool) -> None:
        super().__init__()
        self.register_buffer("start", torch.from_numpy(start.scales[:, 0].astype(np.float32)), persistent=False)
        self.growth = nn.Parameter(torch.zeros(len(start.scales)), requires_grad=learn)

    def scales(self) -> Tensor:
        """Return the scales as they are now, float32 [out]."""
        return (self.start * (1 + self.growth)).clamp_min(SMALLEST_SCALE)

    def forward(self, weight: Tensor, axis: int) -> Tensor:
        """Round `weight` with its output channels along `axis`, or what a table gave of it."""
        shape = [1] * weight.dim()
        shape[axis] = -1
        scales = self.scales()
        zero = torch.zeros((), device=weight.device)
        return fake_quantize(weight, scales.view(shape), zero, -TOP, TOP, weight.numel() // len(scales))

    @torch.no_grad()
    def confine(self) -> None:
        """Keep scales in bounds; after each step."""
        self.growth.clamp_(LEAST_GROWTH, MOST_GROWTH)

    @torch.no_grad()
    def decide(self, weight: Tensor) -> QuantizedWeight:
        """Return the integers of `weight` [out, in, ...]; their `dequantize()` equals what `forward` gives, exactly."""
        scales = self.scales()
        shape = (-1, *[1] * (weight.dim() - 1))
        values = nearest_levels(weight, scales.view(shape), None, -TOP, TOP).to(torch.int8)
        return QuantizedWeight(values.cpu().numpy(), scales.cpu().numpy()[:, None].copy(), None, 8, -1)


def fake_bias(bias: Tensor, input_scale: Tensor, weight_scales: Tensor) -> Tensor:
    """Round `bias` [out] to int32 steps of input scale x weight scale, as integer kernels add it."""
    step = input_scale.detach() * weight_scales.detach()
    levels = (bias.detach().double() / step.double()).round_().clamp_(-(2**31) + 1, 2**31 - 1)
    return pass_straight(bias, levels.float() * step)
