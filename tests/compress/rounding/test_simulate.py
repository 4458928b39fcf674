"""Int8 as it is simulated in torch, and the graph that is written: numbers to the bit, outputs, gradients, ranges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from graphs import context, makers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compress.graph.edit import initializer
from compress.graph.layers import constant, find_layers
from compress.graph.run import Feeds
from compress.passes import Int8
from compress.rounding.qdq import write_state
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.rounding.simulated import LearnedRange, LearnedScales, SimulatedGraph, fake_bias, fake_quantize
from compress.rounding.state import GraphState, Range, Variant
from compress.work import apply_pass

VARIANTS: tuple[Variant, ...] = ("u8s8", "s8s8")
VARIANT, SEEDS = st.sampled_from(VARIANTS), st.integers(0, 999)
CNN = graphs.residual_cnn(), graphs.images()


@st.composite
def small_graphs(draw: st.DrawFn) -> tuple[ir.Model, list[Feeds], dict[str, Any]]:
    """A graph, its inputs, and what an int8 pass may be told of such a graph."""
    kind, seed = draw(st.sampled_from(["layer", "layer", "cnn", "transformer"])), draw(SEEDS)
    config = {"placement": draw(st.sampled_from(["auto", "inputs", "all"]))}
    if kind == "layer":
        n_in, n_out = draw(st.integers(1, 64)), draw(st.integers(1, 16))
        layer = graphs.one_layer(n_in, n_out, draw(st.sampled_from(["MatMul", "Gemm", "Gemm transB"])), seed)
        return layer, graphs.vectors(n_in, seed=seed + 1), {}
    if kind == "cnn":
        ignored = draw(st.lists(st.sampled_from(["stem", "one.conv1", "two.conv2", "fc"]), max_size=2, unique=True))
        return graphs.residual_cnn(draw(st.booleans()), seed), graphs.images(), config | {"ignore": tuple(ignored)}
    if draw(st.booleans()):
        config = {"placement": "inputs", "attention": True}
    return graphs.transformer(draw(st.booleans()), seed=seed), graphs.tokens(), config


def int8_state(model: ir.Model, feeds: list[Feeds], **config: Any) -> GraphState:
    state: GraphState = apply_pass(Int8(bias_correction=False, **config), GraphState(model), context(feeds)).model
    return state


@torch.no_grad()
def trained(state: GraphState, variant: Variant, seed: int = 0) -> SimulatedGraph:
    """A simulation in which everything that can be learned has moved."""
    torch.manual_seed(seed)
    module = SimulatedGraph(state, variant)
    for one in (*module.ranges, *module.scales):
        one.growth.add_(0.1 * torch.rand_like(one.growth))
    for value in module.graph.values:
        value.mul_(1 + 0.05 * torch.randn_like(value))
    return module.eval()


@torch.no_grad()
def simulated(module: SimulatedGraph, batches: list[Feeds]) -> np.ndarray:
    """The first output, all batches one after another."""
    found = [module(**{name: torch.from_numpy(x) for name, x in feeds.items()}) for feeds in batches]
    return np.concatenate([next(iter(outputs.values())).numpy() for outputs in found])


@settings(max_examples=10)
@given(small_graphs(), VARIANT)
@example(given=(*CNN, {"ignore": ("stem", "two.conv2")}), variant="s8s8")
@example(given=(graphs.transformer(), graphs.tokens(), {"placement": "inputs", "attention": True}), variant="u8s8")
def test_what_is_simulated_is_what_is_written(
    given: tuple[ir.Model, list[Feeds], dict[str, Any]], variant: Variant
) -> None:
    """Up to float32 sums; one of them may send a value to the next level, which a few outputs then show."""
    model, feeds, config = given
    module = trained(int8_state(model, feeds, **config), variant)
    expected = graphs.written(module.decide(), feeds, variant)
    error = np.abs(simulated(module, feeds) - expected) / np.abs(expected).max()
    assert np.quantile(error, 0.8) < 2e-6 and error.max() < 0.05
    assert np.abs(np.concatenate(graphs.run(model, feeds)) - expected).max() > 1e-3  # it does round


def on_a_grid(state: GraphState) -> GraphState:
    """Scales that are powers of two, and biases on a coarse grid: every product and every sum is exact in float32."""
    ranges = {}
    for name, span in state.ranges.items():
        step, wide = (2.0 ** np.ceil(np.log2(x)) for x in ((span.high - span.low) / 255, span.peak / 127))
        low = np.round(span.low / step) * step
        ranges[name] = Range(low, low + 255 * step, 127 * wide)
    weights = {}
    for name, weight in state.weights.items():
        scales = (2.0 ** np.ceil(np.log2(weight.scales))).astype(np.float32)
        weights[name] = QuantizedWeight(weight.values, scales, None, 8, -1)
    for name, value in state.model.graph.initializers.items():
        if name.endswith(".bias"):
            initializer(state.model, name, np.round(constant(value) * 256) / np.float32(256))
    return replace(state, ranges=ranges, weights=weights)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("growth", [0.0, 1.0])
def test_outputs_are_equal_to_the_bit_where_sums_are_exact(variant: Variant, growth: float) -> None:
    feeds = graphs.images()
    module = SimulatedGraph(on_a_grid(int8_state(graphs.residual_cnn(), feeds)), variant)
    with torch.no_grad():
        for one in (*module.ranges, *module.scales):
            one.growth.fill_(growth)
    expected = graphs.written(module.decide(), feeds, variant)
    np.testing.assert_array_equal(simulated(module, feeds), expected)
    assert len(np.unique(expected)) > 20


ENDS = st.floats(1e-6, 1e6)


@given(ENDS | st.just(0.0), ENDS, st.floats(0.1, 1), st.lists(st.floats(-0.5, 2), min_size=2, max_size=2), VARIANT)
def test_stored_scales_and_zero_points_are_the_simulated_ones(
    below: float, high: float, share: float, growth: list[float], variant: Variant
) -> None:
    one = LearnedRange(Range(-below, high, max(below, high) * share), variant)
    with torch.no_grad():
        one.growth.copy_(torch.tensor(growth[: len(one.growth)]))
    scale, zero = one.decide().parameters(variant)
    found = one.numbers()
    assert found[0].item() == scale.item() and found[1].item() == zero.item()


def test_stored_integers_are_the_simulated_weight() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 4, 3, 3)
    one = LearnedScales(round_to_nearest(weight.numpy(), 8))
    with torch.no_grad():
        one.growth.uniform_(-0.6, 0.6)  # so that some weights lie outside
        rounded = one(weight, 0)
    decided = one.decide(weight)
    np.testing.assert_array_equal(decided.dequantize(), rounded.numpy())
    assert np.abs(decided.values).max() == 127 and not np.array_equal(decided.values, one.start.numpy())
    np.testing.assert_array_equal(one(weight.movedim(0, 1), 1).detach().movedim(1, 0).numpy(), rounded.numpy())


def test_a_stored_bias_is_the_simulated_one() -> None:
    feeds = graphs.images()
    module = trained(int8_state(graphs.residual_cnn(), feeds), "u8s8")
    model = write_state(module.decide(), "u8s8")
    held = model.graph.initializers
    for layer in find_layers(module.state.model):
        if layer.bias is None:
            continue
        source = layer.data_input.name or ""
        source = source if source in module.sources else "pooled"  # a Flatten shares its range
        bias = module.graph.parameter_of(layer.bias.name or "")
        step = module._get_range(source).numbers()[0], module._get_scales(layer.name).scales()
        stored = constant(held[f"{layer.name}/bias/int32"]).astype(np.float32)
        stored = stored * constant(held[f"{layer.name}/bias/scale"])
        np.testing.assert_array_equal(fake_bias(bias, *step).detach().numpy(), stored)


def test_ranges_that_tensors_share_are_one() -> None:
    module = SimulatedGraph(int8_state(*CNN), "u8s8")
    model = write_state(module.decide(), "u8s8")
    assert len(module.ranges) < sum(node.op_type == "QuantizeLinear" for node in model.graph)
    assert "DequantizeLinear" in makers(model, "pooled")


def slow_gradients(x: float, scale: float, zero: float, low: int, high: int) -> tuple[float, float, float, float]:
    """(value, its derivative by x, by scale, by zero), straight through rounding: LSQ (3), LSQ+ section 3."""
    level = round(x / scale) + zero
    if low <= level <= high:
        return (level - zero) * scale, 1.0, round(x / scale) - x / scale, 0.0
    level = low if level < low else high
    return (level - zero) * scale, 0.0, level - zero, -scale


def test_gradients_are_those_of_the_papers() -> None:
    xs, scale, zero = [-3.0, -0.26, 0.0, 0.13, 0.4, 1.9, 40.0], 0.1, 3.0
    x = torch.tensor(xs, requires_grad=True)
    s, z = torch.tensor(scale, requires_grad=True), torch.tensor(zero, requires_grad=True)
    upstream = torch.linspace(1, 2, len(xs))
    out = fake_quantize(x, s, z, 0, 255, count=4)
    (out * upstream).sum().backward()
    slow = np.array([slow_gradients(v, scale, zero, 0, 255) for v in xs])
    damp = 1 / np.sqrt(4 * 255)
    np.testing.assert_allclose(out.detach().numpy(), slow[:, 0], rtol=1e-5)
    np.testing.assert_allclose(_grad(x), upstream.numpy() * slow[:, 1], rtol=1e-5)
    np.testing.assert_allclose(_grad(s), (upstream.numpy() * slow[:, 2]).sum() * damp, rtol=1e-5)
    np.testing.assert_allclose(_grad(z), (upstream.numpy() * slow[:, 3]).sum() * damp, rtol=1e-5)


def test_gradients_of_scales_for_each_channel_are_those_of_each_alone() -> None:
    torch.manual_seed(0)
    weight, upstream = torch.randn(3, 5), torch.randn(3, 5)
    together = torch.tensor([[0.1], [0.2], [0.004]], requires_grad=True)
    (fake_quantize(weight, together, torch.zeros(()), -127, 127, 5) * upstream).sum().backward()
    for row in range(3):
        alone = together.detach()[row, 0].requires_grad_(True)
        (fake_quantize(weight[row], alone, torch.zeros(()), -127, 127, 5) * upstream[row]).sum().backward()
        np.testing.assert_allclose(_grad(together)[row, 0], _grad(alone), rtol=1e-5)


def _grad(tensor: Tensor) -> np.ndarray:
    assert tensor.grad is not None
    return tensor.grad.numpy()


def step(module: SimulatedGraph, optimizer: torch.optim.Optimizer, feeds: Feeds, frozen: bool) -> list[float]:
    """One step of training; what the ranges have grown to."""
    module.before_step(frozen)
    optimizer.zero_grad()
    outputs = module(**{name: torch.from_numpy(x) for name, x in feeds.items()})
    next(iter(outputs.values())).square().mean().backward()
    optimizer.step()
    module.after_step()
    return [value for one in module.learned_ranges() for value in one.growth.tolist()]


def test_ranges_move_until_they_are_frozen_and_then_stay() -> None:
    """The optimizer's momentum must not move them on."""
    model, feeds = CNN
    module = SimulatedGraph(int8_state(model, feeds), "u8s8")
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    first = step(module, optimizer, feeds[0], frozen=False)
    moving = step(module, optimizer, {"x": 3 * feeds[1]["x"]}, frozen=False)
    weight = module.graph.values[0].detach().clone()
    still = [step(module, optimizer, {"x": 3 * feeds[2]["x"]}, frozen=True) for _ in range(2)]
    assert any(first) and moving != first and still == [moving, moving]
    assert not torch.equal(module.graph.values[0], weight)


def test_bounds_keep_ranges_and_scales_from_vanishing() -> None:
    module = SimulatedGraph(int8_state(*CNN), "u8s8")
    with torch.no_grad():
        for one in (*module.ranges, *module.scales):
            one.growth.fill_(-3.0)
    module.before_step(frozen=False)
    module.after_step()
    assert all(float(one.growth.detach().min()) == pytest.approx(-0.9) for one in (*module.ranges, *module.scales))


def test_the_other_variant_gets_ranges_stretched_alike() -> None:
    for variant in VARIANTS:
        one = LearnedRange(Range(-1.0, 4.0, 3.5), variant)
        with torch.no_grad():
            one.growth.fill_(0.5)
        span = one.decide()
        assert (span.low, span.high, span.peak) == (-1.5, 6.0, 5.25)


def test_train_and_eval_mode_compute_the_same_and_the_state_stays() -> None:
    model, feeds = graphs.residual_cnn(batchnorm=True), graphs.images()
    state = int8_state(model, feeds)
    before = {name: constant(value).copy() for name, value in state.model.graph.initializers.items()}
    module = trained(state, "u8s8")
    np.testing.assert_array_equal(simulated(module, feeds), simulated(module.train(), feeds))
    module.decide()
    assert all(np.array_equal(before[name], constant(v)) for name, v in state.model.graph.initializers.items())


def test_corrected_biases_are_refused() -> None:
    state = apply_pass(Int8(), GraphState(graphs.residual_cnn()), context(graphs.images())).model
    with pytest.raises(ValueError, match="biases have been corrected"):
        SimulatedGraph(state, "u8s8")
