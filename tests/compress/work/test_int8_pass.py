"""The `int8` pass: which layers, which ranges, what it corrects, what it sees collapse, what it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from graphs import context, facts_of, operators, written
from onnx import helper
from pydantic import ValidationError

from compress.context import PassResult
from compress.errors import PassError
from compress.formats.targets import TARGETS
from compress.graph.edit import initializer
from compress.graph.layers import constant, find_layers
from compress.passes import FoldBatchNorm, Int8
from compress.rounding.measure import output_cosine
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState
from compress.work import apply_pass

CPU = TARGETS["onnxruntime-cpu"]


def apply(model: ir.Model, feeds: list[Any], log: list[str] | None = None, **config: Any) -> PassResult:
    return apply_pass(Int8(**config), GraphState(model), context(feeds, log=log))


def cosine(result: PassResult, model: ir.Model, feeds: list[Any]) -> float:
    written = write_state(result.model, "u8s8")
    return output_cosine(graphs.run(model, feeds), graphs.run(written, feeds, optimize=False))


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_outputs_stay_close(mode: str) -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    least = 0.99 if mode == "static" or graphs.sums_are_exact() else 0.97  # MatMulInteger is as it is on this CPU
    assert cosine(apply(model, feeds, mode=mode), model, feeds) > least
    if mode == "static":
        model, feeds = graphs.residual_cnn(), graphs.images()
        assert cosine(apply(model, feeds), model, feeds) > 0.99


def test_the_float_model_is_left_as_it_was() -> None:
    model, feeds = graphs.residual_cnn(), graphs.images()
    before = operators(model)
    apply(model, feeds)
    assert operators(model) == before


def test_outliers_in_the_residual_stream_ruin_placement_all_and_not_inputs() -> None:
    model, feeds = graphs.transformer(outlier=300), graphs.tokens()
    found = {kind: cosine(apply(model, feeds, placement=kind), model, feeds) for kind in ("all", "inputs")}
    assert found["inputs"] > found["all"] + 0.01


@pytest.mark.parametrize(
    ("config", "taken"),
    [
        ({"ignore": ("fc", "re:one\\..*")}, {"stem", "two.conv1", "two.conv2", "shortcut/select"}),
        ({"ignore": ("Conv2d",)}, {"fc"}),
        ({"ignore": ("Conv",)}, {"fc"}),
        ({"targets": ("Linear", "stem")}, {"fc", "stem"}),
        ({"targets": ("re:.*conv1",), "ignore": ("two.conv1",)}, {"one.conv1"}),
    ],
)
def test_layers_are_chosen_by_name_pattern_and_type(config: dict[str, Any], taken: set[str]) -> None:
    result = apply(graphs.residual_cnn(), graphs.images(), **config)
    assert set(result.model.integer) == taken
    for decision in result.decisions:
        assert decision.action == ("int8" if decision.layer in taken else "kept")
        assert decision.action == "int8" or decision.reason
    planned = {d.layer: d.action for d in Int8(**config).check(facts_of(graphs.residual_cnn()), CPU).decisions}
    assert {name for name, action in planned.items() if action == "int8"} == taken - {"shortcut/select"}


def test_overrides_change_the_ranges_of_their_layers_alone() -> None:
    model, feeds = graphs.residual_cnn(), graphs.images()
    plain = apply(model, feeds, calibration="mse").model.ranges
    override = {"targets": ("one.conv1",), "calibration": "percentile", "percentile": 90.0}
    changed = apply(model, feeds, overrides=(override,)).model.ranges
    assert {name for name, span in plain.items() if changed[name] != span} == {"a", "one_relu"}


def test_methods_differ_in_what_they_clip() -> None:
    model, feeds = graphs.residual_cnn(), graphs.images()
    spans = {method: apply(model, feeds, calibration=method).model.ranges["x"] for method in ("minmax", "mse")}
    whole = np.concatenate([f["x"] for f in feeds])
    assert (spans["minmax"].low, spans["minmax"].high) == (whole.min(), whole.max())
    assert spans["mse"].high < spans["minmax"].high
    assert spans["minmax"].peak == np.abs(whole).max()


def test_bias_correction_takes_out_the_mean_shift() -> None:
    """Against the outputs of the layer itself, float and rounded, on the calibration data."""
    feeds = [{"x": f["x"] + 2} for f in graphs.vectors(64)]
    model = graphs.one_layer(64, 8)
    x = np.concatenate([f["x"] for f in feeds]).astype(np.float64)
    (layer,) = find_layers(model)
    with_it, without = (apply(model, feeds, bias_correction=on).model for on in (True, False))
    assert not without.biases
    rounded = x @ with_it.weights["fc"].dequantize().T + with_it.biases["fc"]
    exact = x @ layer.matrix().T + constant(layer.bias)
    np.testing.assert_allclose(rounded.mean(axis=0), exact.mean(axis=0), atol=1e-5)


def test_an_exact_weight_has_its_bias_left_as_it_is() -> None:
    model = graphs.one_layer(64, 8)
    grid = np.random.default_rng(0).integers(-127, 128, (64, 8)).astype(np.float32)
    grid[0] = 127
    initializer(model, "fc.weight", grid)
    state = apply(model, graphs.vectors(64)).model
    np.testing.assert_array_equal(state.biases["fc"], constant(find_layers(model)[0].bias))


def test_embeddings_are_taken_once_they_are_large() -> None:
    result = apply(graphs.transformer(), graphs.tokens())
    assert result.model.weight_only == ["embedding"]
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided["embedding"].reason == "W8, looked up as integers"
    assert result.measured["embedding"]["sqnr_db"] > 30


def test_measured_numbers_come_with_the_result() -> None:
    result = apply(graphs.residual_cnn(), graphs.images())
    numbers = result.measured["stem"]
    assert numbers["sqnr_db"] > 20
    whole = np.concatenate([f["x"] for f in graphs.images()])
    assert numbers["input_low"] == pytest.approx(whole.min(), abs=1e-4)
    assert numbers["input_spread"] == pytest.approx(np.abs(whole).max() / np.median(np.abs(whole)), rel=0.01)


def test_a_collapse_is_seen_blamed_and_healed() -> None:
    model, feeds, log = graphs.broken_sum(), graphs.images(), list[str]()
    result = apply(model, feeds, log, calibration="minmax", ignore=("fc",))
    (warning,) = [note.text for note in result.notes if note.level == "warning"]
    assert warning.startswith("int8: outputs collapsed (mean cosine 0.")
    without = re.search(r"quantized outputs of Add are to blame: without them ([01]\.\d+)", warning)
    assert without is not None and float(without[1]) > 0.97
    assert warning.partition("tensors: ")[2].startswith("sum (largest value ")
    assert "They stay float" in warning
    assert any("outputs collapsed" in line for line in log)
    assert result.model.leave_out == ["Add"]
    assert cosine(result, model, feeds) > 0.99


def test_with_an_explicit_placement_a_collapse_is_reported_only() -> None:
    result = apply(graphs.broken_sum(), graphs.images(), calibration="minmax", placement="all", ignore=("fc",))
    assert not result.model.leave_out
    assert "Use placement: auto or inputs" in result.notes[0].text


def test_a_collapse_that_no_operator_explains_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.work.eight_bit.COLLAPSE", 1.1)
    result = apply(graphs.transformer(), graphs.tokens(), mode="dynamic")
    assert "leaving out no one operator helps" in result.notes[0].text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_values_are_named(value: float) -> None:
    model, feeds = graphs.residual_cnn(), graphs.images()
    feeds[0]["x"][0, 0, 0, 0] = value
    with pytest.raises(PassError, match="int8: no layer is left: tensor 'x' has NaN or Inf on the calibration data"):
        apply(model, feeds)
    weight = constant(find_layers(model)[1].weight).copy()
    weight[0, 0, 0, 0] = value
    initializer(model, "one.conv1.weight", weight)
    with pytest.raises(PassError, match=r"int8: one\.conv1: the weight holds NaN or Inf"):
        apply(model, graphs.images())
    with pytest.raises(PassError, match="int8: there is no calibration data"):
        apply(graphs.residual_cnn(), [])


def branches(parts: Sequence[str] = ("x", "bad")) -> ir.Model:
    """Each part [N, P, 16] -> a layer of its own, a Relu and a second layer, then a sum over P; all added -> y."""
    rng, nodes, constants = np.random.default_rng(0), list[Any](), {"rows": np.array([1])}
    for part in parts:
        for name, width in ((f"{part}.one", 16), (f"{part}.two", 8)):
            constants[f"{name}.weight"] = rng.normal(size=(width, 8)).astype(np.float32)
        nodes += [
            helper.make_node("MatMul", [part, f"{part}.one.weight"], [f"{part}_a"]),
            helper.make_node("Relu", [f"{part}_a"], [f"{part}_b"]),
            helper.make_node("MatMul", [f"{part}_b", f"{part}.two.weight"], [f"{part}_c"]),
            helper.make_node("ReduceSum", [f"{part}_c", "rows"], [f"{part}_sum"], keepdims=0),
        ]
    nodes.append(helper.make_node("Sum", [f"{part}_sum" for part in parts], ["y"]))
    return graphs.build(nodes, constants, {part: ("n", f"p_{part}", 16) for part in parts}, {"y": ("n", 8)})


@pytest.mark.parametrize("placement", ["all", "inputs", "auto"])
@pytest.mark.parametrize("mode", ["static", "dynamic"])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (np.zeros((4, 0, 16), np.float32), "no values on the calibration data"),
        (np.full((4, 2, 16), np.nan, np.float32), "NaN or Inf on the calibration data"),
    ],
    ids=["empty", "nan"],
)
def test_a_tensor_without_a_range_costs_the_layers_that_touch_it(
    placement: Any, mode: Any, bad: np.ndarray, why: str
) -> None:
    if (mode, placement) == ("dynamic", "all"):
        pytest.skip("no such placement")
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.normal(size=(4, 3, 16)).astype(np.float32), "bad": bad} for _ in range(3)]
    result = apply(branches(), feeds, placement=placement, mode=mode)
    assert result.model.integer == ["x.one", "x.two"]
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided["bad.one"].action == "float32" and why in decided["bad.one"].reason
    told = " ".join(note.text for note in result.notes)
    assert "bad.one" in told and "bad.two" in told and why in told and "x.one" not in told
    fed = [{**batch, "bad": rng.normal(size=(4, 2, 16)).astype(np.float32)} for batch in feeds]
    exact, got = graphs.run(branches(), fed), graphs.run(write_state(result.model, "u8s8"), fed, optimize=False)
    assert output_cosine(exact, got) > (0.999 if mode == "static" or graphs.sums_are_exact() else 0.99)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_weights_in_seven_bits_saturate_on_no_cpu(mode: Any) -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    result = apply(model, feeds, mode=mode, weight_bits=7)
    products = [result.model.weights[name] for name in result.model.integer]
    assert {int(np.abs(weight.values).max()) for weight in products} == {63}
    assert {weight.bits for weight in products} == {8}  # which they are stored in
    decided = {decision.layer: decision.reason for decision in result.decisions}
    assert all(decided[name].startswith("W7A8") for name in result.model.integer)
    written, optimized = (graphs.written(result.model, feeds, optimize=one) for one in (False, True))
    assert output_cosine([written], [optimized]) > 0.9999


def test_a_second_pass_may_not_change_the_mode() -> None:
    feeds = graphs.tokens()
    first = apply(graphs.transformer(), feeds, targets=("up",)).model
    second = apply_pass(Int8(targets=("down",)), first, context(feeds)).model
    assert second.integer == ["up", "down"]
    with pytest.raises(PassError, match="put all layers into one int8 pass"):
        apply_pass(Int8(targets=("down",), mode="dynamic"), first, context(feeds))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"ignore": ("nowhere",)},
            "int8: ignore: 'nowhere' matches no layer (this model has stem, one.conv1, one.conv2, ...)",
        ),
        ({"targets": ("re:decoder",)}, "int8: targets: 're:decoder' matches no layer"),
        ({"overrides": ({"targets": ("x",)},)}, "int8: overrides.0.targets: 'x' matches no layer"),
        (
            {"ignore": ("Conv2d", "Linear")},
            "no convolution or matrix product is left to quantize (ignore: Conv2d; ignore: Linear)",
        ),
        ({"mode": "dynamic", "placement": "all"}, "int8: mode: dynamic quantizes inputs only"),
        (
            {"mode": "dynamic", "overrides": ({"targets": ("fc",)},)},
            "int8: overrides set calibrated ranges, and mode: dynamic has none",
        ),
        ({"attention": True, "placement": "all"}, "int8: attention: true needs mode: static and placement: inputs"),
    ],
)
def test_check_says_what_cannot_work(config: dict[str, Any], problem: str) -> None:
    problems = Int8(**config).check(facts_of(graphs.residual_cnn()), CPU).problems
    assert any(problem in text for text in problems), problems


def test_a_plan_without_problems_promises_eight_bits() -> None:
    plan = Int8().check(facts_of(graphs.residual_cnn()), CPU)
    assert not plan.problems
    assert {layer.bits for layer in plan.facts.layers} == {8}
    dynamic = Int8(mode="dynamic").check(facts_of(graphs.transformer()), CPU)
    assert {d.reason for d in dynamic.decisions} == {"W8A8 dynamic", "W8"}
    again = Int8().check(plan.facts, CPU)
    assert {d.reason for d in again.decisions} == {"already in 8 bits"}


def test_a_broken_regular_expression_is_refused_at_once() -> None:
    with pytest.raises(ValidationError, match=r"'re:\(' is no regular expression"):
        Int8(ignore=("re:(",))


def test_fold_batchnorm_folds_before_int8_only() -> None:
    model, feeds = graphs.residual_cnn(batchnorm=True), graphs.images()
    result = apply_pass(FoldBatchNorm(), GraphState(model), context(feeds))
    assert len(result.decisions) == 5
    assert "BatchNormalization" in operators(model)
    np.testing.assert_allclose(written(result.model, feeds), np.concatenate(graphs.run(model, feeds)), atol=1e-5)
    rounded = Int8().check(facts_of(model), CPU).facts
    assert "fold_batchnorm: must come before the pass that rounds stem" in FoldBatchNorm().check(rounded, CPU).problems
    without = facts_of(graphs.transformer())
    nothing = FoldBatchNorm().check(replace(without, source="torch"), CPU)
    assert nothing.problems == ("fold_batchnorm: the model has no batch normalisation; remove the pass",)
    cleaned = FoldBatchNorm().check(without, CPU)
    assert not cleaned.problems and "cleaned of what can be folded" in cleaned.notes[0].text


@pytest.mark.parametrize("operator", ["BatchNormalization", "aten.native_batch_norm"])
def test_fold_batchnorm_knows_the_operator_under_both_names(operator: str) -> None:
    facts = replace(facts_of(graphs.residual_cnn()), operators=(operator,))
    assert not FoldBatchNorm().check(facts, CPU).problems
