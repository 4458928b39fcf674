"""A graph with switches is the compressed one, or the float one, exactly, and any mixture between."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.graph.run import open_session
from compress.graph.switches import SWITCHES, SwitchedGraph, add_switches, find_pairs
from compress.rounding.int8 import round_layer, with_integer_layers
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState, Range


def make_residual() -> ir.Model:
    """Return x -> Conv a -> Relu -> Conv b -> Add(x) -> Relu -> GlobalAveragePool -> Flatten -> Gemm c -> y."""
    rng = np.random.default_rng(0)
    weights = {
        **{f"{name}.weight": rng.normal(0, 0.2, (8, 8, 3, 3)) for name in "ab"},
        **{f"{name}.bias": rng.normal(0, 0.2, 8) for name in "ab"},
        "c.weight": rng.normal(0, 0.5, (5, 8)),
        "c.bias": rng.normal(0, 0.2, 5),
    }
    nodes = [
        helper.make_node("Conv", ["x", "a.weight", "a.bias"], ["a"], pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["ra"]),
        helper.make_node("Conv", ["ra", "b.weight", "b.bias"], ["b"], pads=[1] * 4),
        helper.make_node("Add", ["b", "x"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["rs"]),
        helper.make_node("GlobalAveragePool", ["rs"], ["pool"]),
        helper.make_node("Flatten", ["pool"], ["flat"]),
        helper.make_node("Gemm", ["flat", "c.weight", "c.bias"], ["y"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "residual",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def quantize(model: ir.Model, layers: list[str], dynamic: bool = False) -> ir.Model:
    """Write these layers in int8, every range -4 to 4."""
    kind = "inputs" if dynamic else "all"
    state = with_integer_layers(GraphState(model), layers, kind, False, dynamic, round_layer)
    names = [value.name for node in model.graph for value in node.outputs] + ["x"]
    state.ranges = {str(name): Range(-4.0, 4.0, 4.0) for name in names}
    return write_state(state, "u8s8")


def run(model: ir.Model, vector: list[bool] | None = None) -> np.ndarray:
    feeds = {"x": np.random.default_rng(1).normal(size=(3, 8, 6, 6)).astype(np.float32)}
    if vector is not None:
        feeds[SWITCHES] = np.array(vector)
    result: np.ndarray = open_session(model, 1, optimize=False).run(None, feeds)[0]
    return result


@pytest.fixture(scope="module")
def switched() -> SwitchedGraph:
    model = make_residual()
    return add_switches(quantize(model, ["a", "b", "c"]), model)


def test_all_as_in_the_file_is_the_file_and_all_float_is_the_float_graph(switched: SwitchedGraph) -> None:
    model = make_residual()
    assert [(unit.name, unit.bits) for unit in switched.units] == [("a", 8), ("b", 8), ("c", 8)]
    compressed = run(quantize(model, ["a", "b", "c"]))
    np.testing.assert_array_equal(run(switched.model, [True] * 3), compressed)
    np.testing.assert_array_equal(run(switched.model, [False] * 3), run(model))


@pytest.mark.parametrize("layer", ["a", "b", "c"])
def test_one_layer_in_float_is_the_file_written_without_it(switched: SwitchedGraph, layer: str) -> None:
    """What is rounded because of it (the Add behind b, what is pooled of that) is so in both or in neither."""
    others = [name for name in "abc" if name != layer]
    wanted = run(quantize(make_residual(), others))
    np.testing.assert_allclose(run(switched.model, [name != layer for name in "abc"]), wanted, atol=1e-6)


def test_a_dynamic_layer_has_both_forms() -> None:
    model = make_residual()
    compressed = quantize(model, ["c"], dynamic=True)
    switched = add_switches(compressed, model)
    assert [unit.name for unit in switched.units] == ["c"]
    np.testing.assert_array_equal(run(switched.model, [True]), run(compressed))
    np.testing.assert_array_equal(run(switched.model, [False]), run(model))


def test_without_float_weights_the_rounding_of_activations_alone_is_switched() -> None:
    model = make_residual()
    compressed = quantize(model, ["a", "b", "c"])
    switched = add_switches(compressed, model, own_weights=True)
    left = run(switched.model, [False] * 3)
    weights_alone = np.abs(left - run(model)).max()
    assert 0 < weights_alone < np.abs(run(compressed) - run(model)).max()


def test_what_is_as_it_was_has_no_switch() -> None:
    model = make_residual()
    assert [unit.name for unit in add_switches(quantize(model, ["a"]), model).units] == ["a"]
    assert add_switches(model, model).units == ()


def test_rounded_activations_are_paired_with_themselves_before() -> None:
    pairs = dict(find_pairs(quantize(make_residual(), ["a", "b", "c"])))
    assert pairs["x"] == "x/float" and "ra" in pairs and "a.weight" not in pairs
