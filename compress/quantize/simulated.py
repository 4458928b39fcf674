"""A decided int8 graph as a torch module that is trained: it computes what the exported graph will compute. Torch.

The module runs the state's own float graph with rounding put where `qdq.write_state` puts its pairs, so that nothing
has to be matched by name between two models. Sums are torch's: outputs equal those of the exported graph up to float32
summation, which now and then sends a value to the neighbouring level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compress.graph.edit import append, initializer, reroute, take_over, tidy
from compress.graph.layers import GraphLayer, find_layers, int_attribute, text_attribute
from compress.graph.run import clone
from compress.graph.torch_graph import TorchGraph, trainable
from compress.graph.torch_ops import Compute
from compress.quantize.qdq import find_rounded_tensors, integer_bias
from compress.quantize.simulate import LearnedRange, LearnedScales, fake_bias
from compress.quantize.state import Flavour, GraphState

DOMAIN = "compress.simulated"
ACTIVATION, WEIGHT, BIAS = "RoundActivation", "RoundWeight", "RoundBias"


class SimulatedGraph(nn.Module):
    """`state`'s graph as it computes in `flavour`; `forward` takes and gives tensors by the graph's names.

    Parameters: what `trainable` names, and, with `learn`, the growth of ranges and scales. `state` is left as it is.
    ValueError for an operator that cannot be trained through, and where biases have been corrected: they are learned.
    """

    def __init__(self, state: GraphState, flavour: Flavour, learn: bool) -> None:
        super().__init__()
        if state.biases:
            raise ValueError("biases have been corrected for rounding already; train with bias_correction: false")
        self.state = state
        model, sources = make_simulated_graph(state, flavour)
        self.sources = {name: i for i, name in enumerate(sources)}
        self.ranges = nn.ModuleList(LearnedRange(state.ranges[name], flavour, learn) for name in sources)
        self.layers = {name: i for i, name in enumerate(state.weights)}
        self.scales = nn.ModuleList(LearnedScales(weight, learn) for weight in state.weights.values())
        special = {ACTIVATION: self._make_activation, WEIGHT: self._make_weight, BIAS: self._make_bias}
        self.graph = TorchGraph(model, trainable(state.model), special)

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.graph(**feeds)
        return outputs

    def learned_ranges(self) -> list[LearnedRange]:
        return [learned for learned in self.ranges if isinstance(learned, LearnedRange)]

    def before_step(self, frozen: bool) -> None:
        """Let ranges follow what this step brings, unless frozen; in training only."""
        for learned in self.learned_ranges():
            learned.observing, learned.frozen = True, frozen
            learned.seen.zero_()

    def after_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """Let ranges follow what was seen, and confine scales. `total`: the sum of a tensor over all processes."""
        ranges = self.learned_ranges()
        seen = total(torch.stack([learned.seen for learned in ranges])) if ranges else torch.zeros(0, 2)
        for learned, row in zip(ranges, seen, strict=True):
            learned.follow(row)
            learned.observing = False
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


def make_simulated_graph(state: GraphState, flavour: Flavour) -> tuple[ir.Model, list[str]]:
    """Return (a copy of the state's graph with rounding nodes in it, the tensors whose ranges those have)."""
    model = clone(state.model)
    layers = {layer.name: layer for layer in find_layers(model)}
    integer = [layers[name] for name in state.integer]
    read: dict[ir.Node, str] = {}
    sources: dict[str, None] = {}
    for value, source, uses in find_rounded_tensors(model, integer, state, flavour):
        sources[source] = None
        read |= {node: source for node, index in uses if index == 0}
        rounded = append(model, ACTIVATION, [value], f"{value.name}/rounded", {"source": source}, DOMAIN)
        reroute(uses, rounded)
    for layer in integer:
        _round_weight(model, layer)
        if integer_bias(layer, flavour) and layer.node in read:
            _round_bias(model, layer, read[layer.node])
    for name in state.weight_only:
        _round_lookup(model, layers[name])
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
