"""How far a quantized graph is from float, which layer is to blame, and giving back as few layers as the gates need."""

from __future__ import annotations

from dataclasses import replace

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from graphs import context
from onnx import helper

from compress.graph.edit import initializer
from compress.graph.layers import constant, find_layers
from compress.graph.run import open_session, run_batches, tap
from compress.passes import Int8
from compress.rounding.measure import (
    COLLAPSE,
    Restored,
    decibel,
    hold_choices,
    layer_sqnr_db,
    list_answers,
    output_cosine,
    outputs_of,
    restore_until_held,
    sensitivities,
    share_of_strangers,
    spread,
)
from compress.rounding.observers import Observer
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState
from compress.work import apply_pass

FEEDS = graphs.images()


def fragile_cnn() -> ir.Model:
    """A CNN of whose layers one, two.conv1, has rows that a scale for each channel cannot hold."""
    model = graphs.residual_cnn()
    layer = next(layer for layer in find_layers(model) if layer.name == "two.conv1")
    weight = constant(layer.weight).copy()
    weight[:, 0, 0, 0] *= 300
    initializer(model, "two.conv1.weight", weight)
    return model


@pytest.fixture(scope="module")
def state() -> GraphState:
    config = Int8(bias_correction=False, placement="inputs")
    found: GraphState = apply_pass(config, GraphState(fragile_cnn()), context(FEEDS)).model
    return found


@pytest.fixture(scope="module")
def measured(state: GraphState) -> dict[str, float]:
    return sensitivities(state, FEEDS, "u8s8", lambda names: names)


def test_a_set_of_outputs_is_like_itself() -> None:
    outputs = [np.random.default_rng(0).normal(size=(3, 4)), np.zeros((2, 4))]
    assert output_cosine(outputs, outputs) == pytest.approx(1)
    assert output_cosine(outputs[:1], [-outputs[0]]) == pytest.approx(-1)
    assert output_cosine([np.float32([[1, 0], [0, 1]])], [np.float32([[1, 0], [1, 0]])]) == pytest.approx(0.5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_outputs_are_a_collapse(value: float) -> None:
    exact = np.ones((4, 2))
    broken = exact.copy()
    broken[0, 0] = value
    assert output_cosine([exact], [broken]) == pytest.approx(0.5)
    assert COLLAPSE > 0.5
    assert output_cosine([broken], [broken]) == 1


def test_every_output_but_a_cache_counts() -> None:
    nodes = [helper.make_node("MatMul", ["x", f"{name}.weight"], [y]) for name, y in (("a", "boxes"), ("b", "scores"))]
    nodes.append(helper.make_node("Relu", ["x"], ["present.0.key"]))
    weights = {f"{name}.weight": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32) for name in "ab"}
    outputs = {"boxes": ("n", 4), "scores": ("n", 4), "present.0.key": ("n", 8)}
    model, feeds = graphs.build(nodes, weights, {"x": ("n", 8)}, outputs), graphs.vectors(8)
    assert list_answers(model) == ["boxes", "scores"]
    rounded = apply_pass(Int8(placement="inputs"), GraphState(model), context(feeds)).model
    hurt = sensitivities(rounded, feeds, "u8s8", lambda names: names)
    assert hurt.keys() == {"a", "b"} and min(hurt.values()) > 0


def test_boxes_of_another_number_are_compared_as_a_whole() -> None:
    assert output_cosine([np.ones((4, 2))], [np.ones((1, 2))]) == pytest.approx(0.5)


def test_objects_that_change_places_are_compared_each_with_itself() -> None:
    """Of two equal scores rounding may put either first: that is no error of its rows."""
    nodes = [
        helper.make_node("MatMul", ["x", "scores.weight"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["best", "places"], axis=1),
        helper.make_node("MatMul", ["x", "boxes.weight"], ["boxes"]),
        helper.make_node("GatherElements", ["boxes", "places"], ["chosen"], axis=1),
    ]
    rng = np.random.default_rng(0)
    weights = {f"{name}.weight": rng.normal(size=(8, 40)).astype(np.float32) for name in ("scores", "boxes")}
    weights["scores.weight"] = 0.01 * weights["scores.weight"] + weights["scores.weight"][:, :1]  # nearly equal ones
    outputs = {"best": ("n", 10), "chosen": ("n", 10)}
    model = graphs.build(nodes, {**weights, "k": np.array([10], np.int64)}, {"x": ("n", 8)}, outputs)
    feeds = graphs.vectors(8)
    state = apply_pass(Int8(placement="inputs"), GraphState(model), context(feeds)).model
    assert output_cosine(outputs_of(model, feeds), outputs_of(write_state(state, "u8s8"), feeds)) < COLLAPSE
    held, given = hold_choices(state, feeds)
    exact = outputs_of(held.model, given)
    for place, values in enumerate(outputs_of(model, feeds)):  # of each batch two, and with the scores three
        np.testing.assert_array_equal(values, exact[place // 2 * 3 + place % 2])
    assert output_cosine(exact, outputs_of(write_state(held, "u8s8"), given)) > 0.99
    assert [value.name for value in held.model.graph.outputs] == ["best", "chosen", "scores/chosen_by_node_best"]


def test_boxes_that_are_suppressed_are_those_of_the_float_graph() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "boxes.weight"], ["flat"]),
        helper.make_node("Reshape", ["flat", "four"], ["boxes"]),
        helper.make_node("MatMul", ["x", "scores.weight"], ["likely"]),
        helper.make_node("Reshape", ["likely", "one"], ["scores"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap"], ["chosen"]),
        helper.make_node("GatherND", ["scores", "chosen"], ["found"]),
    ]
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": rng.normal(size=(8, n)).astype(np.float32) for name, n in (("boxes", 80), ("scores", 20))
    }
    shapes = {"four": np.array([0, 20, 4]), "one": np.array([0, 1, 20]), "most": np.array([20])}
    constants = {**weights, **shapes, "overlap": np.array([0.2], np.float32)}
    model, feeds = graphs.build(nodes, constants, {"x": ("n", 8)}, {"found": ("m",)}), graphs.vectors(8)
    state = apply_pass(Int8(placement="inputs"), GraphState(model), context(feeds)).model
    held, given = hold_choices(state, feeds)
    exact, rounded = outputs_of(held.model, given), outputs_of(write_state(held, "u8s8"), given)
    assert [values.shape for values in exact] == [values.shape for values in rounded]
    np.testing.assert_array_equal(exact[0], outputs_of(model, feeds)[0])
    assert output_cosine(exact, rounded) > 0.99


def test_rows_in_another_order_are_no_strangers() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 50, 6)).astype(np.float32)
    turned = rows + np.float32(1e-6)
    turned[1, [3, 4]] = turned[1, [4, 3]]
    assert share_of_strangers(rows, turned, 1e-4, 1.0) == 0
    turned[1, 7] += 0.1
    assert share_of_strangers(rows, turned, 1e-4, 1.0) == pytest.approx(1 / 100)
    assert share_of_strangers(rows, rows[::-1].copy(), 1e-4, 1.0) == 1  # a row of another sample is none of this one
    assert share_of_strangers(rows, rows[::-1].copy(), 1e-4, 0.05) == pytest.approx(6 / 100)  # no more were looked at
    assert share_of_strangers(rows[0], rows[0, ::-1].copy(), 1e-4, 1.0) == 1


def test_decibels() -> None:
    assert decibel(100, 1) == pytest.approx(20)
    assert decibel(1, 0) == decibel(0, 0) == 200


def test_spread_is_the_largest_over_the_median() -> None:
    observer = Observer()
    observer.update(np.append(np.ones(1000), -64).astype(np.float32))
    assert spread(observer) == pytest.approx(64, rel=0.05)
    assert spread(None) == 0


def test_noise_of_a_layer_is_measured_at_its_output(state: GraphState) -> None:
    quantized = write_state(state, "u8s8")
    found = layer_sqnr_db(state.model, quantized, state.integer, FEEDS)
    exact, rounded = (
        np.concatenate([out["two_mid"] for out in run_batches(open_session(tap(model, ["two_mid"])), FEEDS)])
        for model in (state.model, quantized)
    )
    expected = 10 * np.log10(np.square(exact).sum() / np.square(exact - rounded).sum())
    within = 0.01 if graphs.sums_are_exact() else 3  # in the graph that ends there other kernels overflow
    assert found["two.conv1"] == pytest.approx(expected, abs=within)
    assert layer_sqnr_db(state.model, state.model, ["fc"], FEEDS)["fc"] == 200


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Gemm transposed"])
def test_dynamic_layers_are_measured_too(op: str) -> None:
    result = apply_pass(Int8(mode="dynamic"), GraphState(graphs.one_layer(64, 8, op)), context(graphs.vectors(64)))
    assert 20 < result.measured["fc"]["sqnr_db"] < 100


def test_the_fragile_layer_is_the_most_sensitive(state: GraphState, measured: dict[str, float]) -> None:
    assert set(measured) == set(state.integer)
    assert max(measured, key=lambda name: measured[name]) == "two.conv1"
    assert all(value > -1e-9 for value in measured.values())


def restore(
    state: GraphState, measured: dict[str, float], enough: int, max_layers: int = 8, max_minutes: float = 1.0
) -> tuple[Restored, list[str]]:
    """Gates that hold as soon as `enough` layers are float."""
    log: list[str] = []
    total = len(state.integer)

    def shortfalls(model: ir.Model) -> list[str]:
        floats = total - sum(node.op_type in ("Conv", "Gemm") and is_rounded(node) for node in model.graph)
        return [] if floats >= enough else [f"{enough - floats} short"]

    short = shortfalls(write_state(state, "u8s8"))
    found = restore_until_held(state, short, measured, "u8s8", shortfalls, max_layers, max_minutes, log.append)
    return found, log


def is_rounded(node: ir.Node) -> bool:
    maker = node.inputs[1].producer() if node.inputs[1] is not None else None
    return maker is not None and maker.op_type == "DequantizeLinear"


def test_the_most_sensitive_layers_come_back_until_the_gates_hold(
    state: GraphState, measured: dict[str, float]
) -> None:
    before = state.record()
    order = sorted(measured, key=lambda name: -measured[name])
    found, log = restore(state, measured, enough=2)
    assert found.layers == tuple(order[:2])
    assert found.shortfalls == ()
    assert found.ended == "the gates hold"
    assert set(found.state.integer) == set(order[2:]) == set(found.state.weights)
    assert log[0].startswith("int8: two.conv1 back to float32; 1 short")
    assert log[1].endswith("the gates hold")
    assert state.record() == before


def test_nothing_comes_back_where_the_gates_hold(state: GraphState, measured: dict[str, float]) -> None:
    found, log = restore(state, measured, enough=0)
    assert found.layers == ()
    assert found.ended == "the gates hold"
    assert not log


@pytest.mark.parametrize(
    ("budget", "layers", "ended"),
    [
        ({"max_layers": 2}, 2, "max_layers 2 reached"),
        ({"max_minutes": 1e-12}, 0, "max_minutes 1e-12 used"),
        ({"max_layers": 100}, 7, "no layer is left"),
    ],
)
def test_restoring_ends_at_its_budgets(
    state: GraphState, measured: dict[str, float], budget: dict[str, float], layers: int, ended: str
) -> None:
    some = replace(state)
    found, _ = restore(some, measured, enough=100, **budget)  # type: ignore[arg-type]
    assert (len(found.layers), found.ended) == (min(layers, len(measured)), ended)
    assert found.shortfalls


def test_a_layer_given_back_computes_in_float(state: GraphState) -> None:
    empty = replace(state, weights=dict(state.weights), biases=dict(state.biases))
    for name in list(empty.integer):
        empty.to_float(name)
    assert not empty.integer
    assert not empty.weights
    expected = np.concatenate(graphs.run(state.model, FEEDS, optimize=False))
    np.testing.assert_array_equal(graphs.written(empty, FEEDS), expected)


def test_the_pass_restores_for_the_gates_and_says_so() -> None:
    feeds, model = FEEDS, fragile_cnn()
    exact = graphs.run(model, feeds)

    def shortfalls(graph: ir.Model) -> dict[str, str]:
        cosine = output_cosine(exact, graphs.run(graph, feeds))
        return {} if cosine >= 0.99999 else {"cosine": f"cosine {cosine:.6f} below 0.99999"}

    log: list[str] = []
    config = Int8(placement="inputs", restore={"max_layers": 3})
    result = apply_pass(config, GraphState(model), context(feeds, log=log, shortfalls=shortfalls))
    restored = [d for d in result.decisions if d.action == "float32"]
    assert restored
    assert restored[0].reason.startswith("restored: among the most sensitive")
    assert {d.layer for d in restored} == {la.name for la in find_layers(model)} - set(result.model.integer)
    assert "two.conv1" in {d.layer for d in restored}
    assert len(restored) <= 3
    assert result.notes[0].text.startswith("int8: back to float32 for the gates: two.conv1")
    assert any("measuring each layer's sensitivity, because cosine" in line for line in log)
    assert result.measured["two.conv1"]["sensitivity"] >= result.measured["fc"]["sensitivity"]


def too_low_if_rounded(graph: ir.Model) -> dict[str, str]:
    rounded = any("Quantize" in node.op_type for node in graph.graph)
    return {"top1 max_drop 0.01": "top1 max_drop 0.01: too low"} if rounded else {}


def test_gates_that_never_hold_are_told() -> None:
    config = Int8(restore={"max_layers": 1})
    result = apply_pass(config, GraphState(graphs.residual_cnn()), context(FEEDS, shortfalls=too_low_if_rounded))
    assert result.notes[-1].text == "int8: gates still short (max_layers 1 reached): top1 max_drop 0.01: too low"
    config = Int8(restore={"max_layers": 0})
    result = apply_pass(config, GraphState(graphs.residual_cnn()), context(FEEDS, shortfalls=too_low_if_rounded))
    assert not [d for d in result.decisions if d.action == "float32"]


def test_what_was_lost_before_eight_bits_returns_no_layer() -> None:
    lost = {"top1 max_drop 0.01": "top1 max_drop 0.01: 0.05 in all"}

    def lost_before(graph: ir.Model) -> dict[str, str]:
        return lost | ({"cosine min 1": "cosine min 1: too low"} if too_low_if_rounded(graph) else {})

    config, state = Int8(restore={"max_layers": 8}), GraphState(graphs.residual_cnn())
    result = apply_pass(config, state, context(FEEDS, shortfalls=lambda graph: lost))
    assert not [d for d in result.decisions if d.action == "float32"]
    assert "lost before, which no layer in float mends): top1" in result.notes[-1].text
    both = apply_pass(config, state, context(FEEDS, shortfalls=lost_before))
    assert [d for d in both.decisions if d.action == "float32"]  # for the gate that eight bits broke
