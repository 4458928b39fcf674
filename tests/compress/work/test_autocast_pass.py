"""The `autocast` pass: half precision where the ranges allow it, float32 and a name where they do not."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from graphs import context, facts_of, node_of

from compress.context import PassResult
from compress.errors import PassError
from compress.formats.targets import TARGETS
from compress.graph.edit import initializer
from compress.graph.half import to_half
from compress.graph.layers import constant, find_layers
from compress.passes import Autocast, Int8
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState
from compress.work import apply_pass

GPU = TARGETS["tensorrt"]


def apply(model: ir.Model, feeds: list[Any], **config: Any) -> PassResult:
    return apply_pass(Autocast(**config), GraphState(model), context(feeds, "tensorrt"))


def half_graph(state: GraphState) -> ir.Model:
    model = write_state(state, "u8s8")
    ir.passes.common.ShapeInferencePass()(model)
    assert state.half is not None
    to_half(model, state.half, state.half_kept)
    return model


def overflowing(factor: float = 1e6) -> ir.Model:
    """A block whose first feed-forward product reaches beyond 65504; the second brings it back."""
    model = graphs.transformer()
    layers = {layer.name: layer for layer in find_layers(model)}
    initializer(model, "up.weight", constant(layers["up"].weight) * np.float32(factor))
    initializer(model, "down.weight", constant(layers["down"].weight) / np.float32(factor))
    return model


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tame_model_is_halved_throughout(dtype: str) -> None:
    model, feeds = graphs.transformer(), graphs.tokens()
    result = apply(model, feeds, dtype=dtype)
    assert not result.notes
    assert not result.model.half_kept
    assert {decision.action for decision in result.decisions} == {dtype}
    cast = half_graph(result.model)
    inner = [v.dtype for node in cast.graph if node.op_type == "MatMul" for v in node.inputs if v is not None]
    assert {kind.name for kind in inner if kind is not None} == {dtype.upper()}
    if dtype == "float16":  # this runtime has no bfloat16 kernels
        np.testing.assert_allclose(graphs.run(cast, feeds)[0], graphs.run(model, feeds)[0], atol=0.05)


def test_a_transposed_normalisation_stays_float() -> None:
    """In half precision it makes ONNX Runtime 1.31 crash, process and all, so no session is opened here."""
    make = graphs.helper.make_node
    nodes = [
        make("LayerNormalization", ["x", "gain"], ["normed"]),
        make("Transpose", ["normed"], ["turned"], perm=[1, 0, 2]),
        make("MatMul", ["turned", "weight"], ["product"]),
        make("Transpose", ["product"], ["y"], perm=[1, 0, 2]),
    ]
    constants = {"gain": np.ones(8, np.float32), "weight": np.eye(8, dtype=np.float32)}
    model = graphs.build(nodes, constants, {"x": ("n", 4, 8)}, {"y": ("n", 4, 8)})
    to_half(model, "float16", ())
    types = {node.op_type: node.outputs[0].dtype for node in model.graph if node.inputs[0].name != "product/float16"}
    assert (types["LayerNormalization"], types["Transpose"], types["MatMul"]) == (
        ir.DataType.FLOAT16,
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
    )
    assert node_of(model, "y/float16").outputs[0].dtype == ir.DataType.FLOAT16  # no normalisation before it


def test_a_node_that_would_overflow_stays_float_and_is_named() -> None:
    model, feeds = overflowing(), graphs.tokens()
    result = apply(model, feeds)
    assert "node_up_out_mm" in result.model.half_kept
    assert "node_q_mm" not in result.model.half_kept
    assert result.notes[0].level == "warning"
    assert "autocast: could overflow float16 and stay float32" in result.notes[0].text
    assert "node_up_out_mm (largest value" in result.notes[0].text
    decided = {decision.layer: decision for decision in result.decisions}
    assert (decided["up"].action, decided["up"].reason) == ("float32", "could overflow")
    assert decided["query"].action == "float16"
    np.testing.assert_allclose(graphs.run(half_graph(result.model), feeds)[0], graphs.run(model, feeds)[0], atol=0.05)
    unguarded = graphs.run(half_graph(GraphState(model, half="float16")), feeds, optimize=False)
    assert np.abs(unguarded[0] - graphs.run(model, feeds)[0]).max() > 0.5 or not np.isfinite(unguarded[0]).all()


def masked_attention(mask: np.ndarray, read_else: bool = False, computed: bool = False) -> ir.Model:
    """y = softmax(x a + mask) b; `read_else`: the masked scores are an output, too; `computed`: the mask is, from x."""
    make, rng = graphs.helper.make_node, np.random.default_rng(0)
    nodes = [make("MatMul", ["x", "a"], ["scores"])]
    if computed:
        nodes += [make("Mul", ["x", "mask"], ["wide"]), make("Min", ["wide", "mask"], ["low"])]
    nodes += [
        make("Add", ["scores", "low" if computed else "mask"], ["masked"]),
        make("Softmax", ["masked"], ["weights"], axis=-1),
        make("MatMul", ["weights", "b"], ["y"]),
    ]
    constants = {name: rng.normal(size=(6, 6)).astype(np.float32) for name in "ab"} | {"mask": mask.astype(np.float32)}
    outputs = {"y": ("n", 6)} | ({"masked": ("n", 6)} if read_else else {})
    return graphs.build(nodes, constants, {"x": ("n", 6)}, outputs)


@pytest.mark.parametrize("low", [np.finfo(np.float32).min, -np.inf])
@pytest.mark.parametrize("all_hidden", [False, True])
def test_what_hides_tokens_is_no_overflow(low: float, all_hidden: bool) -> None:
    mask = np.zeros(6)
    mask[slice(None) if all_hidden else slice(4, None)] = low
    model = masked_attention(mask)
    feeds = [{"x": np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)}]
    if all_hidden and np.isinf(low):
        return  # NaN in float32, too
    result = apply(model, feeds)
    assert not result.notes and not result.model.half_kept
    found, expected = graphs.run(half_graph(result.model), feeds)[0], graphs.run(model, feeds)[0]
    assert np.isfinite(found).all()
    if not all_hidden:  # float32 forgets the scores of a row that is hidden whole
        np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("how", [{"read_else": True}, {"computed": True}])
def test_what_hides_elsewhere_or_is_computed_stays_float(how: dict[str, bool], dtype: str) -> None:
    mask = np.zeros(6)
    mask[4:] = np.finfo(np.float32).min
    feeds = [{"x": np.abs(np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32))}]
    result = apply(masked_attention(mask, **how), feeds, dtype=dtype)
    assert any(f"could overflow {dtype}" in note.text for note in result.notes)
    assert result.model.half_kept


def test_headroom_keeps_more_in_float() -> None:
    model, feeds = overflowing(2000), graphs.tokens()
    kept = [set(apply(model, feeds, headroom=headroom).model.half_kept) for headroom in (1.0, 100.0)]
    assert kept[0] < kept[1]


def test_where_every_layer_could_overflow_nothing_is_cast() -> None:
    with pytest.raises(
        PassError, match=r"every layer could overflow float16 \(the largest value, .*: use dtype: bfloat16"
    ):
        apply(graphs.transformer(), graphs.tokens(), headroom=1e9)


def test_ignored_layers_keep_their_product_and_bias() -> None:
    result = apply(graphs.transformer(), graphs.tokens(), ignore=("up",))
    assert result.model.half_kept == ["node_up_out", "node_up_out_mm"]
    product = node_of(half_graph(result.model), "up_out_mm")
    assert product.inputs[1] is not None
    assert product.inputs[1].dtype == ir.DataType.FLOAT


def test_nodes_without_a_name_are_kept_by_their_output() -> None:
    model = overflowing()
    for node in model.graph:
        node.name = None
    result = apply(model, graphs.tokens())
    assert "up_out_mm" in result.model.half_kept
    assert np.isfinite(graphs.run(half_graph(result.model), graphs.tokens())[0]).all()


def test_integer_layers_stay_as_they_are() -> None:
    feeds = graphs.tokens()
    state = apply_pass(Int8(targets=("up", "down")), GraphState(graphs.transformer()), context(feeds)).model
    result = apply_pass(Autocast(), state, context(feeds))
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided["up"].reason == "already in 8 bits"
    model = half_graph(result.model)
    assert node_of(model, "up_out_mm").inputs[0].producer().op_type == "DequantizeLinear"  # type: ignore[union-attr]
    assert node_of(model, "q_mm/float16").op_type == "MatMul"
    np.testing.assert_allclose(graphs.run(model, feeds)[0], graphs.run(write_state(state, "u8s8"), feeds)[0], atol=0.1)


def test_an_infinity_is_no_overflow_in_a_mask_and_nan_is_refused() -> None:
    make = graphs.helper.make_node
    nodes = [make("Add", ["x", "mask"], ["masked"]), make("Softmax", ["masked"], ["y"])]
    model = graphs.build(nodes, {"mask": np.float32([0, -np.inf])}, {"x": ("n", 2)}, {"y": ("n", 2)})
    feeds = [{"x": np.zeros((1, 2), np.float32)}]
    result = apply(model, feeds)
    assert not result.model.half_kept and not result.notes
    np.testing.assert_array_equal(graphs.run(half_graph(result.model), feeds)[0], [[1, 0]])
    feeds[0]["x"][0, 0] = np.nan
    with pytest.raises(PassError, match="autocast: tensor 'masked': NaN among the values"):
        apply(model, feeds)
    with pytest.raises(PassError, match="no calibration data"):
        apply(model, [])


def test_check_refuses_what_matches_nothing_and_what_the_target_lacks() -> None:
    facts = facts_of(graphs.transformer())
    plan = Autocast(ignore=("nowhere",)).check(facts, GPU)
    assert "autocast: ignore: 'nowhere' matches no layer" in plan.problems[0]
    assert {layer.bits for layer in plan.facts.layers} == {16}
    plan = Autocast(dtype="bfloat16").check(facts, TARGETS["onnxruntime-cpu"])
    assert "has no bfloat16 CPU kernels" in plan.problems[0]
    plan = Autocast().check(facts, TARGETS["onnxruntime-cpu"])
    assert plan.notes[0].level == "slow"
    assert "slower than float32" in plan.notes[0].text
