"""Where quantize/dequantize pairs stand, and that the written graph computes what plain numpy computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import graphs
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from graphs import context, int8_state, makers, node_of, operators, written
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.export.onnx import finish
from compress.formats.targets import TARGETS
from compress.graph.edit import initializer
from compress.graph.fast_forms import pad_input_channels
from compress.graph.half import to_half
from compress.graph.layers import constant, find_layers, is_constant
from compress.graph.run import clone, tap
from compress.passes import Rtn
from compress.rounding.measure import output_cosine
from compress.rounding.placement import Kind, decide_kind, place
from compress.rounding.qdq import placement_of, write_state
from compress.rounding.quantized_weight import round_to_nearest
from compress.rounding.state import GraphState, Range, Variant, restore_state
from compress.work import apply_pass


@pytest.fixture(scope="module")
def cnn() -> GraphState:
    return int8_state(graphs.residual_cnn(), graphs.images())


@pytest.fixture(scope="module")
def encoder() -> GraphState:
    return int8_state(graphs.transformer(), graphs.tokens())


def fake_quant(values: np.ndarray, span: Range, variant: Variant) -> np.ndarray:
    """Quantize and dequantize, in float32 as ONNX defines it."""
    scale, zero = span.parameters(variant)
    low, high = (0, 255) if variant == "u8s8" else (-128, 127)
    quantized = np.clip(np.rint(values / scale) + np.float32(zero), low, high)
    return (quantized - np.float32(zero)) * scale


def test_writing_nothing_changes_nothing() -> None:
    for model, feeds in ((graphs.residual_cnn(), graphs.images()), (graphs.transformer(), graphs.tokens())):
        for variant in ("u8s8", "s8s8"):
            expected = np.concatenate(graphs.run(model, feeds))
            np.testing.assert_array_equal(written(GraphState(model), feeds, variant, optimize=True), expected)


def test_writing_leaves_the_state_as_it_is(cnn: GraphState) -> None:
    before = operators(cnn.model), {name: constant(value) for name, value in cnn.model.graph.initializers.items()}
    write_state(cnn, "u8s8")
    assert operators(cnn.model) == before[0]
    for name, array in before[1].items():
        np.testing.assert_array_equal(constant(cnn.model.graph.initializers[name]), array)


OPS, WIDTHS, SEEDS = st.sampled_from(["MatMul", "Gemm", "Gemm transB"]), st.integers(1, 40), st.integers(0, 10**6)


@settings(max_examples=15)
@given(st.sampled_from(["u8s8", "s8s8"]), OPS, WIDTHS, WIDTHS, st.sampled_from(["minmax", "percentile", "mse"]), SEEDS)
def test_one_layer_is_what_numpy_computes(
    variant: Variant, op: str, n_in: int, n_out: int, calibration: str, seed: int
) -> None:
    model, feeds = graphs.one_layer(n_in, n_out, op, seed), graphs.vectors(n_in, seed=seed + 1)
    state = int8_state(model, feeds, bias_correction=False, calibration=calibration, percentile=99.0)
    x = fake_quant(np.concatenate([f["x"] for f in feeds]), state.ranges["x"], variant)
    (layer,) = find_layers(model)
    weight = state.weights["fc"].dequantize()
    bias = constant(layer.bias)
    if variant == "u8s8" and op != "MatMul":  # an int32 bias
        scale = state.ranges["x"].parameters(variant)[0] * state.weights["fc"].scales[:, 0]
        bias = np.round(bias / scale) * scale
    np.testing.assert_allclose(written(state, feeds, variant), x @ weight.T + bias, rtol=1e-5, atol=1e-4)


def test_optimised_and_plain_graphs_agree(cnn: GraphState, encoder: GraphState) -> None:
    for state, feeds in ((cnn, graphs.images()), (encoder, graphs.tokens())):
        plain, fused = written(state, feeds), written(state, feeds, optimize=True)
        within = 0.05 if graphs.sums_are_exact() else 1.0
        assert np.abs(plain - fused).max() < within * np.abs(plain).max()


def test_convolutional_nets_stay_in_eight_bits(cnn: GraphState) -> None:
    assert cnn.placement == "all"
    model = write_state(cnn, "u8s8")
    for layer in ("stem", "one.conv1", "two.conv2", "fc", "shortcut/select"):
        assert set(cnn.integer) >= {layer}
    readers = ["stem_out", "one_mid", "one_sum", "two_out", "shortcut", "two_sum", "pooled", "flat", "logits"]
    for output in readers:
        assert set(makers(model, output)) == {"DequantizeLinear"}, output
    assert makers(model, "a") == ["Conv"]  # the activation is fused: its pair stands after it
    assert not {"Slice", "Pad"} & set(operators(model))


def test_u8s8_has_uint8_activations_and_int32_biases(cnn: GraphState) -> None:
    model = write_state(cnn, "u8s8")
    quantizers = [node for node in model.graph if node.op_type == "QuantizeLinear"]
    assert quantizers
    assert {constant(node.inputs[2]).dtype for node in quantizers} == {np.dtype(np.uint8)}
    for layer in find_layers(cnn.model):
        if layer.bias is not None:
            bias = node_of(model, layer.node.outputs[0].name or "").inputs[2]
            assert bias is not None
            assert bias.producer() is not None
            assert constant(bias.producer().inputs[0]).dtype == np.int32  # type: ignore[union-attr]


def test_s8s8_is_symmetric_with_float_biases(cnn: GraphState) -> None:
    model = write_state(cnn, "s8s8")
    for node in model.graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            zero = constant(node.inputs[2])
            assert zero.dtype == np.int8
            assert not zero.any()
    for layer in find_layers(cnn.model):
        if layer.bias is not None:
            bias = node_of(model, layer.node.outputs[0].name or "").inputs[2]
            assert constant(bias).dtype == np.float32


def test_s8s8_leaves_a_layer_and_its_residual_sum_together(cnn: GraphState) -> None:
    model = write_state(cnn, "s8s8")
    assert makers(model, "one_sum") == ["Conv", "DequantizeLinear"]
    assert makers(model, "two_sum") == ["Conv", "Conv"]
    assert makers(write_state(cnn, "u8s8"), "one_sum") == ["DequantizeLinear", "DequantizeLinear"]


def test_encoders_quantize_what_products_read(encoder: GraphState) -> None:
    assert encoder.placement == "inputs"
    model = write_state(encoder, "u8s8")
    assert makers(model, "q_mm") == ["DequantizeLinear", "DequantizeLinear"]
    assert makers(model, "scores") == ["Add", "Transpose"]
    assert makers(model, "sum2") == ["Add", "LayerNormalization"]
    assert {name for name, uses in placement_of(encoder).consumers.items() if uses} == {
        "embedded",
        "context",
        "x2",
        "activated",
    }


def test_convolutions_among_products_write_eight_bits_too() -> None:
    """Without that no integer convolution fuses, and the float one loses its fast layout."""
    model = graphs.residual_cnn()
    layers = find_layers(model)
    placement = place(model, layers, "inputs")
    assert set(placement.writers.values()) == {"Conv"}
    assert not place(model, layers, "inputs", leave_out=["Conv"]).writers
    state = int8_state(model, graphs.images(), placement="inputs")
    for layer in layers:
        readers = [
            use.node.op_type for use in node_of(write_state(state, "u8s8"), layer.output.name or "").outputs[0].uses()
        ]
        assert layer.op != "Conv" or set(readers) <= {"QuantizeLinear", "Relu"}


def test_attention_products_are_quantized_where_asked() -> None:
    state = int8_state(graphs.transformer(), graphs.tokens(), attention=True)
    model = write_state(state, "u8s8")
    assert makers(model, "scores") == ["DequantizeLinear", "DequantizeLinear"]
    assert makers(model, "context") == ["DequantizeLinear", "DequantizeLinear"]


def test_an_embedding_is_looked_up_in_integers(encoder: GraphState) -> None:
    model, feeds = write_state(encoder, "u8s8"), graphs.tokens(1)
    gather = next(node for node in model.graph if node.op_type == "Gather")
    assert constant(gather.inputs[0]).dtype == np.int8
    assert constant(gather.inputs[0]).shape == (256, 32)
    assert node_of(model, "embedded").op_type == "DequantizeLinear"
    expected = encoder.weights["embedding"].dequantize().T[feeds[0]["ids"]]
    np.testing.assert_array_equal(graphs.run(tap(model, ["embedded"]), feeds, optimize=False)[0], expected)


def test_no_constant_scales_both_weights_and_looked_up_rows(encoder: GraphState) -> None:
    """OpenVINO, where shapes are fixed, computes a layer in floats whose zeros are those of looked-up rows, too."""
    finished, _ = finish(encoder, TARGETS["onnxruntime-cpu"])
    for value in finished.graph.initializers.values():
        scaled = [use.node.inputs[0] for use in value.uses() if use.node.op_type == "DequantizeLinear" and use.idx > 0]
        assert len({is_constant(of) for of in scaled}) <= 1, value.name


def test_tensorrt_gets_its_table_dequantized_at_once(encoder: GraphState) -> None:
    """Integers that anything else reads it refuses."""
    model, feeds = write_state(encoder, "s8s8"), graphs.tokens(1)
    assert all(
        use.node.op_type == "DequantizeLinear"
        for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.INT8 and len(value.shape or ()) > 1
        for use in value.uses()
    )
    expected = encoder.weights["embedding"].dequantize().T[feeds[0]["ids"]]
    np.testing.assert_array_equal(graphs.run(tap(model, ["embedded"]), feeds, optimize=False)[0], expected)


def test_dynamic_products_measure_their_inputs_at_run_time() -> None:
    feeds = graphs.tokens()
    state = int8_state(graphs.transformer(), feeds, mode="dynamic")
    model = write_state(state, "u8s8")
    assert not state.ranges
    assert operators(model).count("MatMulInteger") == 6
    assert operators(model).count("DynamicQuantizeLinear") == 4  # query, key and value share theirs
    assert "QuantizeLinear" not in operators(model)
    least = 0.99 if graphs.sums_are_exact() else 0.97
    assert output_cosine(graphs.run(state.model, feeds), graphs.run(model, feeds)) > least


@settings(max_examples=10)
@given(OPS, WIDTHS, WIDTHS, SEEDS)
def test_a_dynamic_layer_is_what_numpy_computes(op: str, n_in: int, n_out: int, seed: int) -> None:
    model, feeds = graphs.one_layer(n_in, n_out, op, seed), graphs.vectors(n_in, n_batches=1, seed=seed + 1)
    state = int8_state(model, feeds, mode="dynamic", bias_correction=False)
    x = feeds[0]["x"]
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    expected = fake_quant(x, Range(low, high, 0), "u8s8") @ state.weights["fc"].dequantize().T
    expected += constant(find_layers(model)[0].bias)
    within = 1e-3 if graphs.sums_are_exact() else np.abs(expected).max()
    np.testing.assert_allclose(written(state, feeds), expected, rtol=1e-4, atol=within)
    assert [output.name for output in write_state(state, "u8s8").graph.outputs] == ["y"]


def test_a_state_survives_its_record() -> None:
    feeds = graphs.tokens()
    state = int8_state(graphs.transformer(), feeds, ignore=("down",))
    state = apply_pass(Rtn(scheme="W4A16_ASYM", group_size=32), state, context(feeds)).model
    state = replace(state, leave_out=["Add"], half="float16", half_kept=["node_sum1"])
    again = restore_state(state.model, json.loads(json.dumps(state.record())), state.arrays())
    assert again.record() == state.record()
    assert again.arrays().keys() == state.arrays().keys()
    for name, array in state.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array)
    np.testing.assert_array_equal(written(again, feeds), written(state, feeds))


def test_tied_weights_are_stored_once_unless_they_are_rounded_differently() -> None:
    """A table that is looked up and also multiplied by, in two products: one scale a column, one scale a row."""
    rng = np.random.default_rng(0)
    make = graphs.helper.make_node
    nodes = [
        make("Gather", ["t.weight", "ids"], ["embedded"]),
        make("Flatten", ["embedded"], ["flat"]),
        make("Gemm", ["flat", "t.weight"], ["y"], transB=1),
        make("Gemm", ["flat", "t.weight"], ["z"], transB=1),
    ]
    table = (rng.normal(size=(64, 16)) * rng.uniform(0.1, 3, (64, 1))).astype(np.float32)
    model = graphs.build(nodes, {"t.weight": table}, {"ids": ("n", 1)}, {"y": ("n", 64), "z": ("n", 64)})
    layers = find_layers(model)
    weights = {
        la.name: round_to_nearest(np.ascontiguousarray(la.matrix().T) if la.op == "Gather" else la.matrix(), 8)
        for la in layers
    }
    state = GraphState(model, weight_only=[la.name for la in layers], weights=weights)
    feeds = [{"ids": rng.integers(0, 64, (8, 1))}]
    rows = weights[layers[0].name].dequantize().T[feeds[0]["ids"][:, 0]]
    np.testing.assert_allclose(
        written(state, feeds), rows @ weights[layers[1].name].dequantize().T, rtol=1e-4, atol=1e-4
    )
    written_down = write_state(state, "u8s8").graph.initializers.values()
    assert sorted(constant(v).shape for v in written_down if constant(v).size == 64 * 16) == [(16, 64), (64, 16)]


@pytest.mark.parametrize("kind", ["all", "inputs"])
def test_pairs_of_fewer_layers_are_among_those_of_more(kind: Kind) -> None:
    """Restoring a layer never asks for a range that was not chosen."""
    model = graphs.residual_cnn()
    layers = find_layers(model)
    everything = set(place(model, layers, kind).consumers)
    for leave_out in ((), ("Add",), ("Conv",)):
        for i in range(len(layers)):
            assert set(place(model, layers[i : i + 1], kind, leave_out=leave_out).consumers) <= everything


def test_every_layer_alone_can_be_written(cnn: GraphState) -> None:
    for name in cnn.integer:
        for leave_out in ([], ["Add"], ["Conv"]):
            assert np.isfinite(written(replace(cnn, integer=[name], leave_out=leave_out), graphs.images(1))).all()


def test_the_kind_follows_what_most_layers_are() -> None:
    assert decide_kind(find_layers(graphs.residual_cnn())) == "all"
    assert decide_kind(find_layers(graphs.transformer())) == "inputs"
    assert decide_kind([]) == "inputs"


def test_pools_and_moves_share_a_range() -> None:
    model = graphs.residual_cnn()
    placement = place(model, find_layers(model), "all")
    assert placement.source("flat") == "pooled"
    assert placement.source("shortcut") == placement.source("quarter") == "b"
    assert placement.writers["b"] == "Add"
    assert placement.writers["a"] == "Conv"
    assert "logits" not in placement.writers


def test_ranges_give_the_field_s_parameters() -> None:
    span = Range(-1.0, 3.0, 3.0)
    scale, zero = span.parameters("u8s8")
    assert scale == np.float32(4 / 255)
    assert zero == round(255 / 4)
    assert zero.dtype == np.uint8
    scale, zero = span.parameters("s8s8")
    assert scale == np.float32(3 / 127)
    assert zero == 0
    assert zero.dtype == np.int8


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_half_precision_around_integers_leaves_them_alone(mode: str) -> None:
    """Integer sums reach far beyond float16, and kernels fuse float32 pairs only."""
    feeds = graphs.tokens()
    state = int8_state(graphs.transformer(), feeds, mode=mode)
    model = write_state(state, "u8s8")
    ir.passes.common.ShapeInferencePass()(model)
    plain = np.concatenate(graphs.run(model, feeds, optimize=False))
    pairs = makers(model, "q_mm") if mode == "static" else []
    to_half(model, "float16", ())
    assert not pairs or makers(model, "q_mm") == pairs
    half = np.concatenate(graphs.run(model, feeds, optimize=False))
    assert np.isfinite(half).all()
    np.testing.assert_allclose(half, plain, atol=0.1)


def test_a_four_bit_weight_follows_its_layer_into_half() -> None:
    feeds = graphs.vectors(64)
    state = apply_pass(Rtn(), GraphState(graphs.one_layer(64, 8)), context(feeds)).model
    model = write_state(state, "s8s8")
    ir.passes.common.ShapeInferencePass()(model)
    plain = np.concatenate(graphs.run(model, feeds))
    to_half(model, "float16", ())
    product = next(node for node in model.graph if node.op_type == "MatMul")
    assert product.inputs[1] is not None
    assert product.inputs[1].producer().op_type == "DequantizeLinear"
    np.testing.assert_allclose(np.concatenate(graphs.run(model, feeds)), plain, atol=0.1)


def test_padding_input_channels_changes_no_output(cnn: GraphState) -> None:
    """Plain and fused: the stem's three channels become four, all else stays as it is."""
    model, feeds = write_state(cnn, "u8s8"), graphs.images()
    expected = graphs.run(model, feeds, optimize=False)
    assert pad_input_channels(model) == 1
    assert all(value.shape == value.producer().inputs[0].shape for value in _dequantized_kernels(model))  # type: ignore[union-attr]
    for got, want in zip(graphs.run(model, feeds, optimize=False), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    fused = np.concatenate(graphs.run(model, feeds))
    assert output_cosine([fused], [np.concatenate(expected)]) > 0.999


def _dequantized_kernels(model: ir.Model) -> list[ir.Value]:
    return [node.inputs[1] for node in model.graph if node.op_type == "Conv" and node.inputs[1] is not None]


def identity_shortcut() -> ir.Model:
    """Two sums before any layer, then conv1 -> Relu -> Identity and conv2 side by side, added."""
    rng = np.random.default_rng(0)
    make = graphs.helper.make_node
    nodes = [
        make("Neg", ["x"], ["negative"]),
        make("Add", ["x", "negative"], ["nothing"]),
        make("Add", ["nothing", "x"], ["plain_sum"]),
        make("Conv", ["plain_sum", "conv1.weight"], ["a"], pads=[1] * 4),
        make("Relu", ["a"], ["r"]),
        make("Conv", ["plain_sum", "conv2.weight"], ["b"], pads=[1] * 4),
        make("Identity", ["r"], ["copy"]),
        make("Add", ["b", "copy"], ["sum"]),
        make("Sigmoid", ["sum"], ["y"]),
    ]
    weights = {
        "conv1.weight": rng.normal(size=(3, 3, 3, 3)).astype(np.float32),
        "conv2.weight": rng.normal(size=(3, 3, 3, 3)).astype(np.float32),
    }
    return graphs.build(nodes, weights, {"x": ("n", 3, 8, 8)}, {"y": ("n", 3, 8, 8)})


def test_a_tensor_that_shares_a_range_has_one_of_its_own_for_later() -> None:
    """With conv1 back in float nothing gives `copy` a range to share, and the residual sum still reads it quantized."""
    state = int8_state(identity_shortcut(), graphs.images())
    assert placement_of(state).source("copy") == "r"
    alone = replace(state, integer=["conv2"])
    assert placement_of(alone).source("copy") == "copy"
    assert makers(write_state(alone, "u8s8"), "sum") == ["DequantizeLinear", "DequantizeLinear"]


def test_sums_away_from_layers_stay_float() -> None:
    model = write_state(int8_state(identity_shortcut(), graphs.images()), "u8s8")
    assert makers(model, "plain_sum") == ["Add"]
    assert makers(model, "nothing") == ["Neg"]


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transB"])
@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_are_multiplied_as_they_lie(op: str, bits: int, tmp_path: Path) -> None:
    """Whatever form a layer had: ONNX Runtime does not unpack its weight on every call, which is slower than floats."""
    model = graphs.one_layer(op=op)
    (layer,) = find_layers(model)
    weight = apply_pass(Rtn(scheme=f"W{bits}A16", group_size=32), GraphState(model), context(graphs.vectors())).model
    written_model = write_state(weight, "u8s8")
    ir.save(written_model, tmp_path / "written.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(tmp_path / "written.onnx", options, providers=["CPUExecutionProvider"])
    kinds = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert "MatMulNBits" in kinds and not kinds & {"Gemm", "DequantizeLinear"}, layer.name


def test_a_bias_far_above_its_products_is_no_int32_cut_off() -> None:
    """Inputs of 1e-7 beside a bias of 1: in steps of both scales it is 1e12."""
    model = graphs.one_layer(op="Gemm")
    feeds = [{name: values * np.float32(1e-7) for name, values in batch.items()} for batch in graphs.vectors()]
    after = written(int8_state(model, feeds), feeds)
    np.testing.assert_allclose(after, np.concatenate(graphs.run(model, feeds)), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("op", ["Conv", "MatMul", "Gemm"])
@pytest.mark.parametrize(
    ("bits", "group_size", "zero_points"), [(8, -1, False), (8, -1, True), (4, 8, False), (4, 8, True)]
)
def test_unpacked_weights_are_folded_to_floats_as_the_file_is_loaded(
    op: str, bits: int, group_size: int, zero_points: bool, tmp_path: Path
) -> None:
    model = graphs.residual_cnn() if op == "Conv" else graphs.one_layer(op=op)
    feeds = graphs.images() if op == "Conv" else graphs.vectors()
    layers = [layer for layer in find_layers(model) if layer.op == op]
    group_size = -1 if op == "Conv" else group_size  # three channels fill no group
    weights = {layer.name: round_to_nearest(layer.matrix(), bits, group_size, not zero_points) for layer in layers}
    names = list(weights)
    state = GraphState(model, weight_only=names, unpacked=names, weights=weights)
    graph = write_state(state, "u8s8")
    stored = [value for value in graph.graph.initializers.values() if value.name.endswith(f"/int{bits}")]  # type: ignore[union-attr]
    assert len(stored) == len(names) and all(value.dtype and value.dtype.bitwidth == bits for value in stored)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    ort.InferenceSession(ir.to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"])
    loaded = onnx.load(options.optimized_model_filepath)
    assert not {"Cast", "Mul", "Sub", "Reshape", "DequantizeLinear"} & {node.op_type for node in loaded.graph.node}
    # the same numbers as those of weights rounded in place, and as TensorRT's file holds
    rounded = clone(model)
    for layer in find_layers(rounded):
        if layer.name in weights:
            matrix = weights[layer.name].dequantize()
            values = np.ascontiguousarray(matrix.T if layer.axis == 1 else matrix)
            layer.node.replace_input_with(layer.weight_input, initializer(rounded, f"{layer.name}/rounded", values))
    exact = np.concatenate(graphs.run(rounded, feeds))
    for variant in get_args(Variant):
        np.testing.assert_allclose(graphs.written(state, feeds, variant, optimize=True), exact, rtol=1e-4, atol=1e-5)


def test_a_convolution_whose_weights_alone_are_rounded_is_unpacked_for_no_kernel_reads_it_packed() -> None:
    model = graphs.residual_cnn()
    weights = {layer.name: round_to_nearest(layer.matrix(), 8) for layer in find_layers(model) if layer.op == "Conv"}
    state = GraphState(model, weight_only=list(weights), weights=weights)
    assert "DequantizeLinear" not in graphs.operators(write_state(state, "u8s8"))
