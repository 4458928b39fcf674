"""The graph room: layers are found as the passes need them, and every rewriting leaves the function as it was."""

from __future__ import annotations

import graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from compress.graph.convolutions import fold_channel_scales, pool_globally, shortcuts_to_convolutions
from compress.graph.edit import initializer, normalize, strip_metadata, tidy
from compress.graph.fast_forms import keep_norms_apart, keep_pools_fast
from compress.graph.half import to_half
from compress.graph.layers import SCOPES, constant, find_layers, node_scope
from compress.graph.run import TAPPED, clone, open_session, run_batches, tap

make = helper.make_node


def names(model: ir.Model) -> list[str]:
    return [layer.name for layer in find_layers(model)]


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transposed"])
def test_matrix_is_out_by_in_whatever_the_layout(op: str) -> None:
    model, feeds = graphs.one_layer(6, 4, op), graphs.vectors(6)
    (layer,) = find_layers(model)
    assert layer.bias is not None
    expected = feeds[0]["x"] @ layer.matrix().T + constant(layer.bias)
    assert layer.matrix().shape == (4, 6)
    np.testing.assert_allclose(graphs.run(model, feeds)[0], expected, atol=1e-5)
    assert (layer.name, layer.type, layer.output.name) == ("fc", "Linear", "y")


def test_layers_of_a_cnn_and_a_transformer() -> None:
    assert names(graphs.residual_cnn()) == ["stem", "one.conv1", "one.conv2", "two.conv1", "two.conv2", "fc"]
    layers = {layer.name: layer for layer in find_layers(graphs.transformer())}
    assert list(layers) == ["embedding", "query", "key", "value", "projection", "up", "down"]
    assert layers["embedding"].type == "Embedding"
    assert layers["embedding"].matrix().shape == (256, 32)
    assert layers["down"].matrix().shape == (32, 64)
    assert layers["down"].output.name == "down_out"


def test_layers_that_share_a_weight_have_names_of_their_own() -> None:
    nodes = [make("MatMul", ["x", "fc.weight"], ["h"]), make("MatMul", ["h", "fc.weight"], ["y"])]
    model = graphs.build(nodes, {"fc.weight": np.eye(4, dtype=np.float32)}, {"x": ("n", 4)}, {"y": ("n", 4)})
    assert names(model) == ["fc", "fc#2"]


def test_a_gemm_with_factors_and_foreign_operators_are_no_layers() -> None:
    model = graphs.one_layer(op="Gemm")
    model.graph.node(0).attributes["alpha"] = ir.AttrFloat32("alpha", 0.5)
    assert not find_layers(model)
    model = graphs.one_layer()
    model.graph.node(0).domain = "com.example"
    assert not find_layers(model)


def test_a_bias_that_is_no_vector_is_not_taken_for_one() -> None:
    constants = {"fc.weight": np.ones((4, 3), np.float32), "c": np.ones((1, 3), np.float32)}
    model = graphs.build([make("Gemm", ["x", "fc.weight", "c"], ["y"])], constants, {"x": ("n", 4)}, {"y": ("n", 3)})
    assert find_layers(model)[0].bias is None
    wider = {"fc.weight": np.ones((4, 1), np.float32), "c": np.ones(3, np.float32)}  # repeated along the output
    nodes = [make("MatMul", ["x", "fc.weight"], ["product"]), make("Add", ["product", "c"], ["y"])]
    assert find_layers(graphs.build(nodes, wider, {"x": ("n", 4)}, {"y": ("n", 3)}))[0].bias is None


def test_what_depends_on_no_input_is_no_layer() -> None:
    constants = {"a": np.ones((2, 4), np.float32), "fc.weight": np.ones((4, 3), np.float32)}
    nodes = [make("MatMul", ["a", "fc.weight"], ["priors"]), make("Relu", ["x"], ["y"])]
    assert not find_layers(graphs.build(nodes, constants, {"x": (2,)}, {"priors": (2, 3), "y": (2,)}))


def test_scopes_name_a_node_without_the_wrapper() -> None:
    node = make("Relu", ["x"], ["y"])
    model = graphs.build([node], {}, {"x": ("n",)}, {"y": ("n",)})
    model.graph.node(0).metadata_props[SCOPES] = "['', 'wrapped.encoder.0', 'relu']"
    assert node_scope(model.graph.node(0)) == "encoder.0"


def test_an_absent_constant_is_refused_by_name() -> None:
    model = graphs.one_layer()
    with pytest.raises(ValueError, match="x is not a constant"):
        constant(model.graph.inputs[0])


def test_tap_gives_inner_tensors_and_inputs() -> None:
    model, feeds = graphs.one_layer(6, 4), graphs.vectors(6, n_batches=1)
    (outputs,) = run_batches(open_session(tap(model, ["product", "x"])), feeds)
    np.testing.assert_array_equal(outputs[f"x{TAPPED}"], feeds[0]["x"])
    np.testing.assert_allclose(outputs["product"], feeds[0]["x"] @ constant(find_layers(model)[0].weight), atol=1e-5)
    with pytest.raises(KeyError):
        tap(model, ["nowhere"])


def test_replacing_a_constant_of_a_copy_leaves_the_original() -> None:
    model = graphs.one_layer()
    before = constant(model.graph.initializers["fc.bias"]).copy()
    initializer(clone(model), "fc.bias", np.zeros(8, np.float32))
    np.testing.assert_array_equal(constant(model.graph.initializers["fc.bias"]), before)


def test_tidy_and_strip_remove_what_nothing_reads() -> None:
    model = graphs.one_layer()
    initializer(model, "unread", np.zeros(3, np.float32))
    model.graph.node(0).metadata_props["stack"] = "/home/someone"
    tidy(model)
    strip_metadata(model)
    assert set(model.graph.initializers) == {"fc.weight", "fc.bias"}
    assert not model.graph.node(0).metadata_props


def test_folding_batchnorm_changes_nothing_but_the_graph() -> None:
    model, feeds = graphs.residual_cnn(batchnorm=True), graphs.images()
    expected = graphs.run(model, feeds)
    folded = fold_channel_scales(model)
    assert len(folded) == 5
    assert "BatchNormalization" not in graphs.operators(model)
    for got, want in zip(graphs.run(model, feeds), expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def batchnorm_constants(*tags: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {f"{part}{tag}": rng.uniform(0.5, 2, 4).astype(np.float32) for tag in tags for part in "gbmv"}


def test_folding_keeps_output_names_and_copies_a_shared_weight() -> None:
    """Two convolutions of one name share a weight, and each norm, a graph output, has statistics of its own."""
    weight = np.random.default_rng(0).normal(size=(4, 3, 1, 1)).astype(np.float32)
    nodes = [
        make("Conv", ["x", "w"], ["c1"], name="conv"),
        make("BatchNormalization", ["c1", "g1", "b1", "m1", "v1"], ["y"]),
        make("Conv", ["x", "w"], ["c2"], name="conv"),
        make("BatchNormalization", ["c2", "g2", "b2", "m2", "v2"], ["z"]),
    ]
    shape = ("n", 4, 8, 8)
    model = graphs.build(
        nodes, {"w": weight} | batchnorm_constants("1", "2"), {"x": ("n", 3, 8, 8)}, {"y": shape, "z": shape}
    )
    normalize(model)  # ONNX Runtime refuses two nodes of one name
    (expected,) = run_batches(open_session(model), graphs.images(1))
    assert len(fold_channel_scales(model)) == 2
    (got,) = run_batches(open_session(model), graphs.images(1))
    for name in ("y", "z"):
        np.testing.assert_allclose(got[name], expected[name], atol=1e-5)


def test_a_convolution_that_others_read_keeps_its_batchnorm() -> None:
    nodes = [make("Conv", ["x", "w"], ["c"]), make("BatchNormalization", ["c", "g", "b", "m", "v"], ["y"])]
    constants = {"w": np.ones((4, 3, 1, 1), np.float32)} | batchnorm_constants("")
    shape = ("n", 4, 8, 8)
    model = graphs.build(nodes, constants, {"x": ("n", 3, 8, 8)}, {"y": shape, "c": shape})
    assert not fold_channel_scales(model)


@pytest.mark.parametrize(
    ("window", "more", "is_global"),
    [
        ((300, 300), {"ceil_mode": 1}, True),
        ((8, 8), {}, True),
        ((8, 8), {"pads": [0, 0, 1, 1]}, False),
        ((4, 8), {}, False),
    ],
)
def test_a_pool_whose_window_holds_all_is_global(
    window: tuple[int, int], more: dict[str, int], is_global: bool
) -> None:
    """Torch's own EfficientNet pools by a window as wide as its last layer has channels."""
    pool = make("AveragePool", ["x"], ["y"], kernel_shape=window, strides=window, **more)
    size = 2 if window == (4, 8) else 1
    model, feeds = graphs.build([pool], {}, {"x": ("n", 3, 8, 8)}, {"y": ("n", 3, size, 1)}), graphs.images(1)
    assert bool(pool_globally(model)) is is_global
    (operator,) = graphs.operators(model)
    assert operator == ("GlobalAveragePool" if is_global else "AveragePool")
    if is_global:
        kernel = torch.nn.AvgPool2d(window, ceil_mode=True)
        np.testing.assert_allclose(graphs.run(model, feeds)[0], kernel(torch.from_numpy(feeds[0]["x"])), atol=1e-6)


def test_a_shortcut_is_the_same_as_a_convolution_bit_for_bit() -> None:
    model, feeds = graphs.residual_cnn(), graphs.images()
    expected = graphs.run(tap(model, ["shortcut"]), feeds)
    (made,) = shortcuts_to_convolutions(model)
    assert not {"Slice", "Pad"} & set(graphs.operators(model))
    assert made in names(model)
    for got, want in zip(graphs.run(tap(model, ["shortcut"]), feeds), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("constant_name", "value"),
    [
        ("pads", np.array([0, 2, 1, 0, 0, 2, 1, 0])),  # pads rows
        ("zero", np.ones((), np.float32)),  # with ones
        ("starts", np.array([1])),  # odd pixels
        ("rows", np.array([1])),  # takes every second channel
    ],
)
def test_what_is_no_shortcut_is_left_alone(constant_name: str, value: np.ndarray) -> None:
    model = graphs.residual_cnn()
    initializer(model, constant_name, value)
    assert not shortcuts_to_convolutions(model)


def test_sum_is_add() -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    expected = graphs.run(model, feeds, optimize=False)
    assert keep_norms_apart(model) == 2
    assert graphs.operators(model).count("Sum") == 2
    for got, want in zip(graphs.run(model, feeds, optimize=False), expected, strict=True):
        np.testing.assert_array_equal(got, want)


PADS, TO_HALF = ["x", "pads"], {"to": TensorProto.FLOAT16}


@pytest.mark.parametrize(
    ("beside", "opset", "called"),
    [
        ([make("Pad", PADS, ["a"])], 20, 18),
        ([make("Identity", ["x"], ["a"])], 19, 18),
        ([make("Pad", PADS, ["a"], mode="wrap")], 20, 20),
        ([make("Gelu", ["x"], ["a"])], 20, 20),
        ([make("Cast", ["x"], ["half"], **TO_HALF), make("Cast", ["half"], ["a"], to=TensorProto.FLOAT)], 20, 20),
        ([make("Relu", ["x"], ["a"])], 22, 22),
        ([make("Relu", ["x"], ["a"])], 17, 17),
    ],
)
def test_a_graph_that_averages_gets_the_opset_of_the_fast_kernel_where_it_stays_the_same(
    beside: list[onnx.NodeProto], opset: int, called: int
) -> None:
    pool = make("AveragePool", ["a"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    pads = {"pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
    model = graphs.build([*beside, pool], pads, {"x": ("n", 5, 8, 8)}, {"y": ("n", 5, "h", "w")}, opset)
    feeds = [{"x": np.random.default_rng(0).normal(size=(2, 5, 8, 8)).astype(np.float32)}]
    expected = graphs.run(model, feeds, optimize=False)
    assert keep_pools_fast(model) == (called != opset)
    assert model.opset_imports[""] == called
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    np.testing.assert_allclose(graphs.run(model, feeds, optimize=False)[0], expected[0], rtol=1e-6, atol=1e-6)


def test_without_an_average_the_opset_stays() -> None:
    model = graphs.residual_cnn()
    assert keep_pools_fast(model) == 0 and model.opset_imports[""] == 20


def test_half_of_nothing_is_the_float_graph() -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    expected = graphs.run(model, feeds, optimize=False)
    to_half(model, "float16", [node.name or "" for node in model.graph])
    for got, want in zip(graphs.run(model, feeds, optimize=False), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("graph", ["cnn", "transformer"])
def test_half_graphs_load_and_are_close(graph: str) -> None:
    model = graphs.residual_cnn() if graph == "cnn" else graphs.transformer()
    feeds = graphs.images() if graph == "cnn" else graphs.tokens()
    expected = graphs.run(model, feeds)
    inputs, outputs = [v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs]
    to_half(model, "float16", ())
    assert ([v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs]) == (inputs, outputs)
    for got, want in zip(graphs.run(model, feeds), expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, atol=3e-2)


def test_masks_become_half_of_the_lowest_half() -> None:
    nodes = [make("Add", ["x", "mask"], ["y"])]
    model = graphs.build(nodes, {"mask": np.float32([0, -3.4e38])}, {"x": ("n", 2)}, {"y": ("n", 2)})
    to_half(model, "float16", ())
    (got,) = graphs.run(model, [{"x": np.zeros((1, 2), np.float32)}])
    np.testing.assert_array_equal(got, [[0, -32752]])
