"""The `rtn` pass: presets, groups, exceptions, what the kernels have, what is refused."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import pytest
from graphs import context, facts_of, written
from pydantic import ValidationError

from compress.errors import PassError
from compress.formats.schemes import WeightScheme
from compress.formats.targets import TARGETS
from compress.graph.edit import initializer
from compress.graph.layers import constant, find_layers
from compress.passes import Rtn
from compress.passes.layer_schemes import find_width
from compress.rounding.measure import output_cosine
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState
from compress.work import apply_pass

CPU = TARGETS["onnxruntime-cpu"]
OPEN = TARGETS["openvino"]


def state_of(**config: Any) -> GraphState:
    state: GraphState = apply_pass(Rtn(**config), GraphState(graphs.transformer()), context([])).model
    return state


@pytest.mark.parametrize(
    ("config", "bits", "symmetric"),
    [
        ({}, 4, True),
        ({"scheme": "W4A16", "group_size": 32}, 4, True),
        ({"scheme": "w4a16_asym", "group_size": 32}, 4, False),
        ({"scheme": "W8A16", "group_size": 32}, 8, True),
        ({"bits": 8, "symmetric": False}, 8, False),
    ],
)
def test_presets_stand_for_their_settings(config: dict[str, Any], bits: int, symmetric: bool) -> None:
    weight = state_of(**config).weights["up"]
    assert (weight.bits, weight.zero_points is None, weight.group_size) == (bits, symmetric, 32)


def test_more_bits_and_smaller_groups_are_closer() -> None:
    feeds = graphs.tokens()
    exact = graphs.run(graphs.transformer(), feeds)

    def cosine(**config: Any) -> float:
        return output_cosine(exact, np.split(written(state_of(**config), feeds), len(feeds)))

    def weight_error(**config: Any) -> float:
        layers = {layer.name: layer.matrix() for layer in find_layers(graphs.transformer())}
        return sum(float(np.square(w.dequantize() - layers[n]).sum()) for n, w in state_of(**config).weights.items())

    assert cosine(bits=8) > cosine(bits=4, group_size=16) > 0.95
    assert cosine(bits=8) > 0.9999
    errors = [weight_error(bits=bits, group_size=size) for bits, size in ((8, 32), (4, 16), (4, -1), (3, 16), (2, 16))]
    assert errors == sorted(errors)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_negative_scales_come_out_of_the_fused_product(size: int) -> None:
    """MatMulNBits computes with 8-bit inputs, so that its products differ from a float product's by a little."""
    state = apply_pass(Rtn(group_size=size), GraphState(graphs.one_layer(64, 32)), context([])).model
    feeds = graphs.vectors(64, 4)
    assert (state.weights["fc"].scales < 0).any()
    plain = written(state, feeds)
    rows = np.concatenate([batch["x"] for batch in feeds])
    bias = np.concatenate(graphs.run(graphs.one_layer(64, 32), feeds)) - rows @ find_layers(state.model)[0].matrix().T
    np.testing.assert_allclose(plain, rows @ state.weights["fc"].dequantize().T + bias, atol=1e-4)
    fused = written(state, feeds, optimize=True)
    assert np.linalg.norm(fused - plain) < 0.02 * np.linalg.norm(plain)


def test_only_matrix_products_are_rounded_and_the_rest_says_why() -> None:
    result = apply_pass(Rtn(ignore=("down",)), GraphState(graphs.transformer()), context([]))
    decided = {decision.layer: decision for decision in result.decisions}
    assert result.model.weight_only == ["query", "key", "value", "projection", "up"]
    assert decided["embedding"].reason == "not a matrix product"
    assert decided["down"].reason == "ignore: down"
    assert (decided["up"].action, decided["up"].reason) == ("w4", "W4A16, group 32")


def test_overrides_change_their_layers_alone() -> None:
    override = {"targets": ("down", "re:^v"), "bits": 8, "group_size": -1}
    weights = state_of(overrides=(override,)).weights
    found = {name: (weight.bits, weight.group_size) for name, weight in weights.items()}
    assert {name for name, setting in found.items() if setting == (8, -1)} == {"down", "value"}
    assert {setting for name, setting in found.items() if name not in ("down", "value")} == {(4, 32)}


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transposed"])
@pytest.mark.parametrize("config", [{}, {"symmetric": False}, {"bits": 8}, {"group_size": 64}])
def test_onnx_runtime_fuses_every_layout(op: str, config: dict[str, Any], tmp_path: Any) -> None:
    """What is left of the layer is one MatMulNBits: a weight dequantized on every run would be slower than float32."""
    import onnx
    import onnx_ir as ir
    import onnxruntime as ort

    state = apply_pass(Rtn(**config), GraphState(graphs.one_layer(64, 32, op)), context([])).model
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.log_severity_level = 3
    proto = ir.to_proto(write_state(state, "u8s8"))
    ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    fused = onnx.load(tmp_path / "fused.onnx")
    assert "DequantizeLinear" not in {node.op_type for node in fused.graph.node}
    assert "MatMulNBits" in {node.op_type for node in fused.graph.node}


def test_block_wise_weights_raise_the_opset() -> None:
    model = graphs.transformer()
    state = apply_pass(Rtn(), GraphState(model), context([])).model
    assert write_state(state, "u8s8").opset_imports[""] == 21
    assert model.opset_imports[""] == 20
    model.opset_imports[""] = 17
    with pytest.raises(
        PassError, match="rtn: block-wise weights need a graph of opset 20 or later, and this one has 17"
    ):
        apply_pass(Rtn(), GraphState(model), context([]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_weights_are_named(value: float) -> None:
    model = graphs.transformer()
    layer = next(layer for layer in find_layers(model) if layer.name == "up")
    weight = constant(layer.weight).copy()
    weight[0, 0] = value
    initializer(model, "up.weight", weight)
    with pytest.raises(PassError, match="rtn: up: the weight holds NaN or Inf"):
        apply_pass(Rtn(), GraphState(model), context([]))


@pytest.mark.parametrize(
    ("config", "target", "problem"),
    [
        (
            {"group_size": 48},
            OPEN,
            "rtn: query has 32 inputs, which group_size 48 does not divide; use group_size: 16 or 32, set "
            "indivisible: fit, or ignore it",
        ),
        (
            {"group_size": 0},
            OPEN,
            "rtn: up has 32 inputs, which group_size 0 does not divide; use group_size: 1 or 2, set indivisible: fit",
        ),
        (
            {"scheme": "W4A16"},
            CPU,
            "rtn: down has 64 inputs, which group_size 128 does not divide; use group_size: 32 or 64, set indivisible",
        ),
        (
            {"group_size": 8},
            CPU,
            "rtn: up: target onnxruntime-cpu has 4-bit kernels for group_size 16, 32, 64, 128, 256, not 8",
        ),
        ({"group_size": -1}, CPU, "not -1; it would run slower than float32"),
        ({"scheme": "W8A16", "group_size": 8}, CPU, "has 8-bit kernels for group_size 16, 32, 64, 128, 256, not 8"),
        ({"scheme": "W8A16"}, CPU, "has 8-bit kernels for group_size 16, 32, 64, 128, 256, not -1"),
        ({"scheme": "W8A16"}, TARGETS["tensorrt"], "rtn: target tensorrt takes block-wise weights in 4 bits only"),
        (
            {"scheme": "W4A16_ASYM"},
            TARGETS["tensorrt"],
            "rtn: target tensorrt refuses uint4 and zero points; use scheme: W4A16",
        ),
        ({"ignore": ("nowhere",)}, CPU, "rtn: ignore: 'nowhere' matches no layer"),
        ({"targets": ("nowhere",)}, CPU, "rtn: no matrix product is left to round"),
        ({"overrides": ({"targets": ("x",)},)}, CPU, "rtn: overrides.0.targets: 'x' matches no layer"),
    ],
)
def test_check_says_what_cannot_work(config: dict[str, Any], target: Any, problem: str) -> None:
    problems = Rtn(**config).check(facts_of(graphs.transformer()), target).problems
    assert any(problem in text for text in problems), problems


def test_a_width_that_no_kernel_group_divides_has_one_way_out() -> None:
    problems = Rtn().check(facts_of(graphs.one_layer(172, 8)), CPU).problems
    assert problems == (
        "rtn: fc has 172 inputs, which group_size 32 does not divide; set indivisible: fit, or ignore it",
    )
    problems = Rtn(group_size=128).check(facts_of(graphs.one_layer(172, 8)), OPEN).problems
    assert "use group_size: 86 or 172, set indivisible: fit, or ignore it" in problems[0]


def test_a_preset_and_its_contrary_are_refused() -> None:
    with pytest.raises(ValidationError, match="scheme W4A16 stands for bits: 4; leave one of the two out"):
        Rtn(scheme="W4A16", bits=8)
    with pytest.raises(ValidationError, match="scheme W4A16_ASYM stands for symmetric: false"):
        Rtn(scheme="W4A16_ASYM", symmetric=True)
    assert Rtn(scheme="W8A16", bits=8).bits == 8
    assert (Rtn(scheme="W2A16_ASYM").bits, Rtn(scheme="W2A16_ASYM").symmetric) == (2, False)


def test_a_further_target_is_asked_about_every_format() -> None:
    tensorrt = TARGETS["tensorrt"]
    assert Rtn().explain_refusal(tensorrt) is None
    assert "4 bits only" in (Rtn(scheme="W8A16").explain_refusal(tensorrt) or "")
    assert "4 bits only" in (Rtn(overrides=({"targets": ("up",), "bits": 8},)).explain_refusal(tensorrt) or "")


def test_a_plan_counts_the_scales() -> None:
    plan = Rtn(group_size=16).check(facts_of(graphs.transformer()), CPU)
    assert not plan.problems
    bits = {layer.name: layer.bits for layer in plan.facts.layers}
    assert bits["up"] == 4 + 32 / 16
    assert bits["embedding"] == 32


@pytest.mark.parametrize(
    ("target", "decodes", "bits", "group", "width"),
    [
        ("onnxruntime-cpu", True, 2, 32, 2),
        ("onnxruntime-cpu", True, 2, 16, 4),
        ("onnxruntime-cpu", False, 2, 32, 4),
        ("openvino", True, 2, 32, 4),
        ("onnxruntime-cpu", True, 3, 32, 4),
        ("onnxruntime-cpu", True, 6, 32, 8),
        ("llama.cpp", True, 6, 32, 8),
        ("llama.cpp", True, 5, 32, 5),
        ("transformers", True, 3, 32, 3),
    ],
)
def test_a_width_is_that_of_the_files_type(target: str, decodes: bool, bits: int, group: int, width: int) -> None:
    assert find_width(WeightScheme(bits, group), TARGETS[target], decodes) == width
