"""A decided int8 graph as a torch module that is trained: it computes what the exported graph will compute. Torch.

The module runs the state's own float graph with rounding put where `qdq.write_state` puts its pairs, so that nothing
has to be matched by name between two models. Sums are torch's: outputs equal those of the exported graph up to float32
summation, which now and then sends a value to the neighbouring level.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compress.graph.edit import append, initializer, reroute, take_over, tidy
from compress.graph.layers import GraphLayer, find_layers, int_attribute, text_attribute
from compress.graph.run import clone
from compress.graph.torch_graph import TorchGraph, trainable
from compress.graph.torch_ops import Compute
from compress.rounding.fake import pass_straight, straight_round
from compress.rounding.numbers import Numbers
from compress.rounding.qdq import find_rounded_tensors, integer_bias
from compress.rounding.quantized_weight import SMALLEST_SCALE, QuantizedWeight
from compress.rounding.state import GraphState, Range, Variant

DOMAIN = "compress.simulated"
ACTIVATION, WEIGHT, BIAS = "RoundActivation", "RoundWeight", "RoundBias"
LEVELS: dict[Variant, tuple[int, int]] = {"u8s8": (0, 255), "s8s8": (-128, 127)}
"""The least and the greatest integer of an activation."""
TOP = 127
"""The greatest of a weight; the least is its negative, so that every kernel may negate it."""
LEAST_GROWTH, MOST_GROWTH = -0.9, 4.0
"""A range's learned end stays between a tenth of the start's and five times it."""


class SimulatedGraph(nn.Module):
    """`state`'s graph as it computes in `variant`; `forward` takes and gives tensors by the graph's names.

    Parameters: what `trainable` names, and the growth of ranges and scales. `state` is left as it is.
    ValueError for an operator that cannot be trained through, and where biases have been corrected: they are learned.
    """

    def __init__(self, state: GraphState, variant: Variant) -> None:
        super().__init__()
        if state.biases:
            raise ValueError("biases have been corrected for rounding already; train with bias_correction: false")
        self.state = state
        model, sources = make_simulated_graph(state, variant)
        self.sources = {name: i for i, name in enumerate(sources)}
        self.ranges = nn.ModuleList(LearnedRange(state.ranges[name], variant) for name in sources)
        self.layers = {name: i for i, name in enumerate(state.weights)}
        self.scales = nn.ModuleList(LearnedScales(weight) for weight in state.weights.values())
        special = {ACTIVATION: self._make_activation, WEIGHT: self._make_weight, BIAS: self._make_bias}
        self.graph = TorchGraph(model, trainable(state.model), special)

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.graph(**feeds)
        return outputs

    def learned_ranges(self) -> list[LearnedRange]:
        return [learned for learned in self.ranges if isinstance(learned, LearnedRange)]

    def before_step(self, frozen: bool) -> None:
        """Let this step move ranges, unless frozen."""
        for learned in self.learned_ranges():
            learned.frozen = frozen

    def after_step(self) -> None:
        """Keep ranges and scales in bounds."""
        for learned in self.learned_ranges():
            learned.confine()
        for scales in self.scales:
            assert isinstance(scales, LearnedScales)
            scales.confine()

    @torch.no_grad()
    def decide(self) -> GraphState:
        """Return the state with what was learned: float values in a new graph; integers, scales, ranges beside it."""
        model = clone(self.state.model)
        for name in self.graph.numbers:
            initializer(model, name, self.graph.parameter_of(name).detach().cpu().numpy().copy())
        layers = {layer.name: layer for layer in find_layers(model)}
        weights = {name: self._get_scales(name).decide(_get_matrix(layers[name])) for name in self.layers}
        ranges = {name: self._get_range(name).decide() for name in self.sources}
        return replace(self.state, model=model, weights=weights, ranges={**self.state.ranges, **ranges})

    def _get_range(self, source: str) -> LearnedRange:
        learned = self.ranges[self.sources[source]]
        assert isinstance(learned, LearnedRange)
        return learned

    def _get_scales(self, layer: str) -> LearnedScales:
        learned = self.scales[self.layers[layer]]
        assert isinstance(learned, LearnedScales)
        return learned

    def _make_activation(self, node: ir.Node) -> Compute:
        learned = self._get_range(text_attribute(node, "source", ""))
        return lambda x: learned(x)

    def _make_weight(self, node: ir.Node) -> Compute:
        scales, axis = self._get_scales(text_attribute(node, "layer", "")), int_attribute(node, "axis", 0)
        return lambda weight: scales(weight, axis)

    def _make_bias(self, node: ir.Node) -> Compute:
        read = self._get_range(text_attribute(node, "source", ""))
        scales = self._get_scales(text_attribute(node, "layer", ""))
        return lambda bias: fake_bias(bias, read.numbers()[0], scales.scales())


def make_simulated_graph(state: GraphState, variant: Variant) -> tuple[ir.Model, list[str]]:
    """Return (a copy of the state's graph with rounding nodes in it, the tensors whose ranges those have)."""
    model = clone(state.model)
    layers = {layer.name: layer for layer in find_layers(model)}
    integer = [layers[name] for name in state.integer]
    read: dict[ir.Node, str] = {}
    sources: dict[str, None] = {}
    for value, source, uses in find_rounded_tensors(model, integer, state, variant):
        sources[source] = None
        read |= {node: source for node, index in uses if index == 0}
        rounded = append(model, ACTIVATION, [value], f"{value.name}/rounded", {"source": source}, DOMAIN)
        reroute(uses, rounded)
    for layer in integer:
        _round_weight(model, layer)
        if integer_bias(layer, variant) and layer.node in read:
            _round_bias(model, layer, read[layer.node])
    for name in state.weight_only:
        if layers[name].op == "Gather":
            _round_lookup(model, layers[name])
        else:
            _round_weight(model, layers[name])
    tidy(model)
    return model, list(sources)


def _round_weight(model: ir.Model, layer: GraphLayer) -> None:
    about = {"layer": layer.name, "axis": layer.axis}
    rounded = append(model, WEIGHT, [layer.weight], f"{layer.name}/weight/rounded", about, DOMAIN)
    layer.node.replace_input_with(layer.weight_input, rounded)


def _round_bias(model: ir.Model, layer: GraphLayer, source: str) -> None:
    about = {"layer": layer.name, "source": source}
    rounded = append(model, BIAS, [layer.bias], f"{layer.name}/bias/rounded", about, DOMAIN)
    layer.node.replace_input_with(2, rounded)


def _round_lookup(model: ir.Model, layer: GraphLayer) -> None:
    """Round what a table gives, each column with its own scale: the same numbers as those of the rounded table."""
    output = layer.node.outputs[0]
    about = {"layer": layer.name, "axis": -1}
    rounded = append(model, WEIGHT, [output], f"{layer.name}/rounded", about, DOMAIN)
    take_over(model, output, rounded)


def _get_matrix(layer: GraphLayer) -> Tensor:
    """Return a layer's weight as `state.weights` has it: [out, in, ...], of a table its transpose."""
    matrix = layer.matrix().T if layer.op == "Gather" else layer.matrix()
    return torch.from_numpy(np.ascontiguousarray(matrix))


class _FakeQuantize(torch.autograd.Function):
    """(clamp(round(x / scale) + zero, low, high) - zero) * scale, in float32: QuantizeLinear, then DequantizeLinear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, damp: float) -> Tensor:
        ctx.save_for_backward(x, scale, zero)
        ctx.low, ctx.high, ctx.damp = low, high, damp
        return Numbers(low, high).nearest_(x / scale, zero).sub_(zero).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero = ctx.saved_tensors
        (gradient,) = gradients
        position = x / scale
        rounded = position.round().add_(zero)
        quantized = rounded.clamp(ctx.low, ctx.high)
        outside = quantized != rounded
        to_x = gradient.masked_fill(outside, 0.0)
        to_scale = to_zero = None
        if ctx.needs_input_grad[1]:
            slope = quantized.sub_(zero).sub_(position.masked_fill_(outside, 0.0))
            to_scale = slope.mul_(gradient).sum_to_size(scale.shape) * ctx.damp
        if ctx.needs_input_grad[2]:
            to_zero = ((to_x - gradient) * scale).sum_to_size(zero.shape) * ctx.damp
        return to_x, to_scale, to_zero, None, None, None


def fake_quantize(x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int, count: int) -> Tensor:
    """Round `x` in float32 to (q - zero) * scale, q whole, from `low` to `high`; scale and zero broadcast over x.

    `count`: numbers that share a scale; its gradient is divided by sqrt(count * high), as in LSQ, section 2.2.

    Rounding lets gradients through as if it were not there (straight-through), and scales are learned: LSQ (Esser et
    al. 2019, arXiv:1902.08153, equation 3), for ranges with a zero point LSQ+ (Bhalgat et al. 2020, arXiv:2004.09576).
    A deviation: what is learned are factors of the scales, and of the ends of ranges, that training starts with. A rate
    then means the same for all of them, and an end at zero stays there, as it should after a Relu.
    """
    rounded: Tensor = _FakeQuantize.apply(x.float(), scale, zero, low, high, 1 / math.sqrt(max(count * high, 1)))
    return rounded


class LearnedRange(nn.Module):
    """The range of one activation, of which `growth` is learned; not where it is `frozen`.

    `growth` float32: [2] for u8s8 (low, high), [1] for s8s8 (peak).
    """

    start: Tensor
    held: Tensor

    def __init__(self, start: Range, variant: Variant) -> None:
        super().__init__()
        self.range, self.variant = start, variant
        ends = [start.low, start.high] if variant == "u8s8" else [start.peak]
        self.register_buffer("start", torch.tensor(ends, dtype=torch.float32), persistent=False)
        self.growth = nn.Parameter(torch.zeros(len(ends)))
        self.frozen = False
        self.register_buffer("held", torch.zeros(len(ends)))

    def forward(self, x: Tensor) -> Tensor:
        scale, zero = self.numbers()
        return fake_quantize(x, scale, zero, *LEVELS[self.variant], x[0].numel())

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero point as float32), exactly those of `decided()`."""
        growth = self.growth.detach() if self.frozen else self.growth
        ends = self.start * (1 + growth)
        if self.variant == "s8s8":
            scale = (ends[0].double().clamp_min(1e-12) / 127).float()
            return scale, torch.zeros_like(scale)
        low, high = ends.unbind()
        scale = ((high.double() - low.double()).clamp_min(1e-12) / 255).float()
        return scale, straight_round(-low / scale).clamp(0, 255)

    @torch.no_grad()
    def confine(self) -> None:
        """Keep ends in bounds, and frozen ones in place; after each step."""
        if self.frozen:
            self.growth.copy_(self.held)  # an optimizer's momentum would go on
            return
        self.growth.clamp_(LEAST_GROWTH, MOST_GROWTH)
        self.held.copy_(self.growth)

    def decide(self) -> Range:
        """Return the range as it is now. The other variant's, which nothing was trained for, is stretched alike."""
        ends = (self.start * (1 + self.growth.detach())).cpu().tolist()
        if self.variant == "u8s8":
            stretch = max(-ends[0], ends[1]) / max(-self.range.low, self.range.high, 1e-30)
            return Range(ends[0], ends[1], self.range.peak * stretch)
        stretch = ends[0] / max(self.range.peak, 1e-30)
        return Range(self.range.low * stretch, self.range.high * stretch, ends[0])


class LearnedScales(nn.Module):
    """The scales of one weight, one for each output channel; symmetric. `growth` float32 [out] is learned."""

    start: Tensor

    def __init__(self, start: QuantizedWeight) -> None:
        super().__init__()
        self.register_buffer("start", torch.from_numpy(start.scales[:, 0].astype(np.float32)), persistent=False)
        self.growth = nn.Parameter(torch.zeros(len(start.scales)))

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
        values = Numbers(-TOP, TOP).nearest_(weight / scales.view(shape)).to(torch.int8)
        return QuantizedWeight(values.cpu().numpy(), scales.cpu().numpy()[:, None].copy(), None, 8, -1)


def fake_bias(bias: Tensor, input_scale: Tensor, weight_scales: Tensor) -> Tensor:
    """Round `bias` [out] to int32 steps of input scale x weight scale, as integer kernels add it."""
    step = input_scale.detach() * weight_scales.detach()
    quantized = (bias.detach().double() / step.double()).round_().clamp_(-(2**31) + 1, 2**31 - 1)
    return pass_straight(bias, quantized.float() * step)
