"""Smoothing leaves the float function as it was, and is taken only where it lowers the error of the int8 product."""

from __future__ import annotations

from collections.abc import Sequence

import graphs
import numpy as np
import onnx_ir as ir
import pytest

from compress.errors import PassError
from compress.formats.targets import TARGETS
from compress.graph.edit import initializer
from compress.graph.layers import find_layers
from compress.passes import Equalize, Int8, SmoothQuant
from compress.rounding.observers import Observer, choose_range
from compress.rounding.quantized_weight import round_to_nearest
from compress.rounding.smooth import apply_smoothing, input_groups, search_smoothing, smoothing_scales
from compress.rounding.state import GraphState
from compress.work import apply_pass, foresee_pass
from compress.work.contexts import GraphContext
from runtime.progress import no_progress


def relative(got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    a, b = np.concatenate(got), np.concatenate(expected)
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("post_norm", [True, False])
def test_any_scales_leave_the_outputs_as_they_were(post_norm: bool) -> None:
    model, feeds = graphs.transformer(post_norm), graphs.tokens()
    expected = graphs.run(model, feeds)
    rng = np.random.default_rng(0)
    how = {}
    for name, group in input_groups(find_layers(model)).items():
        scales = np.exp(rng.normal(size=group[0].matrix().shape[1])).astype(np.float32)
        how[name] = apply_smoothing(model, group, scales)
    assert relative(graphs.run(model, feeds), expected) < 1e-5
    assert "multiplication" in how.values()
    # a norm before its block feeds the products alone, one after a block feeds the residual stream too
    assert how["x2"] == ("multiplication" if post_norm else "folded into node_x2")


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transposed"])
def test_scales_go_along_the_inputs_in_every_layout(op: str) -> None:
    model, feeds = graphs.one_layer(6, 4, op), graphs.vectors(6)
    expected = graphs.run(model, feeds)
    assert apply_smoothing(model, find_layers(model), np.float32([1, 2, 4, 0.5, 3, 7])) == "multiplication"
    assert relative(graphs.run(model, feeds), expected) < 1e-5


def norm_model(gain_readers: int = 1, norm_is_output: bool = False) -> ir.Model:
    make = graphs.helper.make_node
    nodes = [
        make("LayerNormalization", ["x", "g", "b"], ["h"], axis=-1),
        make("MatMul", ["h", "fc.weight"], ["y"]),
        *[make("Mul", ["x", "g"], [f"other{i}"]) for i in range(gain_readers - 1)],
    ]
    rng = np.random.default_rng(0)
    shapes = {"g": 6, "b": 6, "fc.weight": (6, 6)}
    constants = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    outputs = {"y": ("n", 6)} | {f"other{i}": ("n", 6) for i in range(gain_readers - 1)}
    return graphs.build(nodes, constants, {"x": ("n", 6)}, outputs | ({"h": ("n", 6)} if norm_is_output else {}))


@pytest.mark.parametrize(("gain_readers", "norm_is_output"), [(2, False), (1, True)])
def test_nothing_is_folded_into_what_others_see(gain_readers: int, norm_is_output: bool) -> None:
    model, feeds = norm_model(gain_readers, norm_is_output), graphs.vectors(6, n_batches=1)
    (before,) = graphs.run_batches(graphs.open_session(model), feeds)
    assert apply_smoothing(model, find_layers(model), np.float32([1, 2, 4, 0.5, 3, 7])) == "multiplication"
    (after,) = graphs.run_batches(graphs.open_session(model), feeds)
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, atol=1e-4)


def test_a_shared_weight_is_smoothed_in_a_copy() -> None:
    make = graphs.helper.make_node
    nodes = [make("MatMul", ["x", "w.weight"], ["h"]), make("MatMul", ["h", "w.weight"], ["y"])]
    weight = np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32)
    model, feeds = graphs.build(nodes, {"w.weight": weight}, {"x": ("n", 6)}, {"y": ("n", 6)}), graphs.vectors(6)
    expected = graphs.run(model, feeds)
    apply_smoothing(model, find_layers(model)[:1], np.float32([1, 2, 4, 0.5, 3, 7]))
    assert relative(graphs.run(model, feeds), expected) < 1e-5


def test_scales_follow_equation_4() -> None:
    x, w = np.float32([1, 4, 100]), np.float32([2, 1, 0.5])
    expected = x**0.7 / w**0.3
    np.testing.assert_allclose(smoothing_scales(x, w, 0.7), expected / np.exp(np.log(expected).mean()), rtol=1e-5)
    dead = smoothing_scales(np.float32([1, 0, 9]), np.float32([1, 1, 0]), 0.5)
    assert np.isfinite(dead).all()
    assert dead[1] == dead[2] == 1


def int8_error(rows: np.ndarray, weight: np.ndarray) -> float:
    """Relative squared error of an int8 product, written out."""
    seen = Observer()
    seen.update(rows)
    low, high = choose_range(seen, "mse")
    step = (high - low) / 255
    x = np.clip(np.round((rows - low) / step), 0, 255) * step + low
    exact = rows @ weight.T
    return float(np.square(x @ round_to_nearest(weight, 8).dequantize().T - exact).sum() / np.square(exact).sum())


def test_the_search_lowers_the_error_where_channels_differ() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(256, 32)).astype(np.float32)
    rows[:, :2] *= 200
    weight = rng.normal(size=(16, 32)).astype(np.float32)
    found = search_smoothing(rows, np.abs(rows).max(axis=0), [weight[:8], weight[8:]])
    assert found.scales is not None
    assert found.error_after < 0.5 * found.error_before
    assert found.error_before == pytest.approx(int8_error(rows, weight), rel=1e-3)
    assert found.error_after == pytest.approx(int8_error(rows / found.scales, weight * found.scales), rel=1e-2)


def test_the_search_leaves_even_channels_alone() -> None:
    rng = np.random.default_rng(0)
    rows, weight = rng.uniform(-1, 1, (256, 32)).astype(np.float32), rng.uniform(-1, 1, (16, 32)).astype(np.float32)
    rows[0], weight[0] = 1, 1
    found = search_smoothing(rows, np.abs(rows).max(axis=0), [weight])
    assert found.scales is None
    assert found.error_after == found.error_before


def test_the_pass_smooths_outliers_and_keeps_the_function() -> None:
    model, feeds = graphs.transformer(post_norm=False, outlier=50), graphs.tokens()
    result = apply_pass(SmoothQuant(), GraphState(model), graphs.context(feeds))
    assert relative(graphs.run(result.model.model, feeds), graphs.run(model, feeds)) < 1e-4
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided["query"].action == "smoothed"
    assert "folded into node_x1" in decided["query"].reason
    assert decided["embedding"].action == "kept"
    assert set(decided) == {layer.name for layer in find_layers(model)}
    for numbers in result.measured.values():
        assert numbers["error_after"] <= numbers["error_before"]
    assert result.measured["query"]["error_after"] < 0.9 * result.measured["query"]["error_before"]


def test_what_is_foreseen_has_a_multiplication_where_no_norm_takes_the_scales() -> None:
    state = GraphState(graphs.one_layer(6, 4))
    context = GraphContext((), TARGETS["onnxruntime-cpu"], 0, print, no_progress)
    ahead, known = foresee_pass(SmoothQuant(), state, None, context)  # type: ignore[arg-type]
    assert known and [node.op_type for node in ahead.model.graph].count("Mul") == 1
    assert not any(node.op_type == "Mul" for node in state.model.graph)


def test_a_fixed_alpha_is_applied_whatever_it_does() -> None:
    result = apply_pass(SmoothQuant(alpha=0.5), GraphState(graphs.transformer()), graphs.context(graphs.tokens()))
    reasons = {decision.reason.partition(",")[0] for decision in result.decisions if decision.action == "smoothed"}
    assert reasons == {"alpha 0.5"}


def test_a_group_with_an_ignored_layer_is_left_and_says_so() -> None:
    model = graphs.transformer()
    result = apply_pass(SmoothQuant(ignore=("key",)), GraphState(model), graphs.context(graphs.tokens()))
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided["key"].reason == "ignore: key"
    assert decided["query"].action == "kept"
    assert "reads embedded with a layer that is kept" in decided["query"].reason
    nothing = apply_pass(SmoothQuant(ignore=("Linear",)), GraphState(model), graphs.context(graphs.tokens()))
    assert all(decision.action == "kept" for decision in nothing.decisions)


def test_bad_values_are_named() -> None:
    model = graphs.one_layer(6, 4)
    feeds = graphs.vectors(6)
    feeds[0]["x"][0, 0] = np.inf
    (decision,) = apply_pass(SmoothQuant(), GraphState(model), graphs.context(feeds)).decisions
    assert (decision.action, decision.reason) == ("kept", "tensor 'x' has NaN or Inf on the calibration data")
    initializer(model, "fc.weight", np.full((6, 4), np.nan, np.float32))
    with pytest.raises(PassError, match="smoothquant: fc: the weight holds NaN or Inf"):
        apply_pass(SmoothQuant(), GraphState(model), graphs.context(graphs.vectors(6)))
    with pytest.raises(PassError, match="no calibration data"):
        apply_pass(SmoothQuant(), GraphState(model), graphs.context([]))


def test_check_refuses_what_matches_nothing_and_says_what_it_costs() -> None:
    target = TARGETS["onnxruntime-cpu"]
    plan = SmoothQuant(ignore=("nowhere",)).check(graphs.facts_of(graphs.transformer()), target)
    assert "smoothquant: ignore: 'nowhere' matches no layer" in plan.problems[0]
    assert "costs a multiplication" in plan.notes[0].text
    plan = SmoothQuant(ignore=("fc",)).check(graphs.facts_of(graphs.residual_cnn()), target)
    assert plan.problems == ("smoothquant: the model has no float matrix product to smooth",)


def test_equalizing_keeps_the_function_and_evens_the_channels() -> None:
    model, feeds = graphs.residual_cnn(), graphs.images()
    result = apply_pass(Equalize(), GraphState(model), graphs.context(feeds))
    equalized = {decision.layer for decision in result.decisions if decision.action == "equalized"}
    assert equalized == {"one.conv2", "two.conv2"}  # the others read a tensor that a residual sum reads too
    assert relative(graphs.run(result.model.model, feeds), graphs.run(model, feeds)) < 1e-5


def test_what_others_see_or_another_pass_rounded_is_not_equalized() -> None:
    make = graphs.helper.make_node
    rng = np.random.default_rng(0)
    weights = {f"{name}.weight": rng.normal(size=(4, 4)).astype(np.float32) for name in ("a", "b")}
    nodes = [
        make("MatMul", ["x", "a.weight"], ["h"]),
        make("Relu", ["h"], ["r"]),
        make("MatMul", ["r", "b.weight"], ["y"]),
    ]
    shape = ("n", 4)
    feeds = graphs.vectors(4)

    def equalized(state: GraphState) -> list[str]:
        decisions = apply_pass(Equalize(), state, graphs.context(feeds)).decisions
        return [decision.layer for decision in decisions if decision.action == "equalized"]

    assert equalized(GraphState(graphs.build(nodes, weights, {"x": shape}, {"y": shape}))) == ["b"]
    for seen in ("h", "r"):
        assert not equalized(GraphState(graphs.build(nodes, weights, {"x": shape}, {"y": shape, seen: shape})))
    model = graphs.build(nodes, weights, {"x": shape}, {"y": shape})
    assert not equalized(apply_pass(Int8(targets=("a",)), GraphState(model), graphs.context(feeds)).model)
