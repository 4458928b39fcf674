"""The `fp8` pass: float8 on both sides of a product, one scale for each tensor, and what it refuses."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from graphs import context, facts_of

from compress.context import PassResult
from compress.errors import PassError
from compress.formats.targets import TARGETS
from compress.graph.edit import initializer
from compress.graph.layers import constant, find_layers
from compress.passes import Fp8, Int8
from compress.rounding.measure import output_cosine
from compress.rounding.qdq import write_state
from compress.rounding.state import FLOAT8, GraphState, restore_state
from compress.work import apply_pass


def apply(model: ir.Model, feeds: list[Any], **config: Any) -> PassResult:
    return apply_pass(Fp8(**config), GraphState(model), context(feeds, "tensorrt"))


@pytest.mark.parametrize("kind", ["transformer", "residual_cnn"])
def test_outputs_stay_close_and_products_read_float8(kind: str) -> None:
    model = getattr(graphs, kind)()
    feeds = graphs.tokens() if kind == "transformer" else graphs.images()
    result = apply(model, feeds)
    written = write_state(result.model, "s8s8")
    assert output_cosine(graphs.run(model, feeds), graphs.run(written, feeds)) > 0.995
    taken = {decision.layer for decision in result.decisions if decision.action == "fp8"}
    assert taken == {layer.name for layer in find_layers(model) if layer.op != "Gather"}
    products = [node for node in written.graph if node.op_type in ("Conv", "MatMul", "Gemm")]
    both = 0
    for node in products:
        stored = [one.producer() for one in node.inputs[:2] if one is not None]
        kinds = [n.inputs[0].dtype for n in stored if n is not None and n.op_type == "DequantizeLinear" and n.inputs[0]]
        both += kinds == [ir.DataType.FLOAT8E4M3FN] * 2
    assert both == len(taken)


def test_scales_are_one_number_for_each_tensor_and_the_largest_value_is_448() -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    state = apply(model, feeds).model
    layers = {layer.name: layer for layer in find_layers(model)}
    for name, weight in state.weights.items():
        layer = layers[name]
        assert weight.values.dtype == FLOAT8 and weight.scales.shape == (1, 1)
        assert np.isclose(float(weight.scales[0, 0]) * 448, np.abs(layer.matrix()).max())
        error = np.abs(weight.dequantize() - layer.matrix())
        assert (error <= np.maximum(np.abs(layer.matrix()) / 16, weight.scales[0, 0] * 2**-10)).all()
    written = write_state(state, "s8s8")
    for node in written.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale = node.inputs[1]
            assert scale is not None and scale.shape is not None and len(scale.shape) == 0


def test_kept_results_give_the_same_graph() -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    state = apply(model, feeds).model
    again = restore_state(model, state.record(), state.arrays())
    one, other = (graphs.run(write_state(each, "s8s8"), feeds) for each in (state, again))
    assert again.in_float8 and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_int8_and_float8_do_not_mix_in_one_graph() -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    state = apply_pass(Int8(targets=("up",), placement="inputs"), GraphState(model), context(feeds, "tensorrt")).model
    with pytest.raises(PassError, match="fp8: a pass before computes other layers in another type of eight bits"):
        apply_pass(Fp8(ignore=("up",)), state, context(feeds, "tensorrt"))


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = graphs.transformer()
    layer = next(layer for layer in find_layers(model) if layer.name == "up")
    broken = constant(layer.weight).copy()
    broken[0, 0] = np.nan
    initializer(model, layer.weight.name or "", broken)
    with pytest.raises(PassError, match=r"fp8: .*(up|NaN)"):
        apply(model, graphs.tokens())


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino", "onnxruntime-cuda", "vllm"])
def test_targets_without_float8_products_refuse_it(target: str) -> None:
    plan = Fp8().check(facts_of(graphs.transformer()), TARGETS[target])
    assert len(plan.problems) == 1 and target in plan.problems[0]
    assert not Fp8().check(facts_of(graphs.transformer()), TARGETS["tensorrt"]).problems
