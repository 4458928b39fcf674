"""What became of a graph's layers, read from a builder's log and from the engine inspector."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.engine.compile import find_asked_precisions
from compress.engine.layers import EngineLayer, layers_in_json, layers_in_log, outcomes, share_as_asked

LOG = Path(__file__).with_name("engine_log.txt")
"""Lines that TensorRT for RTX 1.7 wrote of an int8 residual CNN."""


def layer(name: str, nodes: tuple[str, ...], inputs: tuple[str, ...], weights: tuple[str, ...] = ()) -> EngineLayer:
    return EngineLayer(name, "gemm", inputs, weights, ("float32",), "", nodes)


def test_a_real_log() -> None:
    layers = layers_in_log([LOG.read_text(encoding="utf-8")])
    first = next(one for one in layers if one.name == "node_Conv_91_myl0_2")
    assert (first.kind, first.inputs, first.weights) == ("correlation", ("int8",), ("int8", "float32", "float32"))
    assert first.nodes[0] == "node_Conv_91" and first.outputs == ("float32",)
    assert layers[0].kind == "shape_call" and layers[0].nodes == () and layers[0].inputs == ()
    found = outcomes({"node_Conv_91": "int8", "node_linear": "int8", "node_Conv_95": "int8"}, layers)
    assert [one.got for one in found] == ["int8"] * 3 and share_as_asked(found) == 1.0


def test_the_inspector_says_the_same() -> None:
    rows = [
        {
            "Name": "fc",
            "LayerType": "gemm",
            "Inputs": [{"Name": "x", "Datatype": "Int8"}],
            "Constants": [{"Name": "w", "Datatype": "Int8"}],
            "Outputs": [{"Name": "y", "Format/Datatype": "Row major linear FP16 format (kLINEAR)"}],
            "TacticName": "sm86_xmma",
            "Metadata": "[ONNX Layer: node_fc]\x1e[ONNX Layer: node_relu]",
        },
        "a layer that is only named",
    ]
    (one,) = layers_in_json(json.dumps({"Layers": rows}))
    assert one == EngineLayer("fc", "gemm", ("int8",), ("int8",), ("float16",), "sm86_xmma", ("node_fc", "node_relu"))


def test_the_inspector_of_tensorrt_names_weights_apart() -> None:
    row = {
        "Name": "conv",
        "LayerType": "CaskConvolution",
        "Inputs": [{"Name": "x", "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}],
        "Outputs": [{"Name": "y", "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}],
        "Weights": {"Type": "Int8", "Count": 9216},
        "Bias": {"Type": "Float", "Count": 32},
        "Metadata": "[ONNX Layer: node_conv]",
    }
    layers = layers_in_json(json.dumps({"Layers": [row]}))
    assert layers[0].weights == ("int8",) and share_as_asked(outcomes({"node_conv": "int8"}, layers)) == 1.0


@pytest.mark.parametrize(
    ("asked", "inputs", "weights", "got"),
    [
        ("int8", ("int8",), ("int8", "float32"), "int8"),
        ("int8", ("int8", "int8"), (), "int8"),  # both factors are activations
        ("int8", ("int8", "float32"), ("float32",), "float32"),  # adds what is in int8, multiplies in float
        ("int8", ("float16",), ("int8",), "float16"),  # dequantized on the way
        ("int4", ("float16",), ("int4", "float16"), "int4"),
        ("int4", ("float16",), ("float16",), "float16"),
        ("float16", ("float16",), ("float16",), "float16"),
        ("float16", ("float32",), ("float16",), "float32"),
        ("float8", ("float8",), ("float8",), "float8"),
    ],
)
def test_what_counts_as_the_asked_precision(
    asked: str, inputs: tuple[str, ...], weights: tuple[str, ...], got: str
) -> None:
    (found,) = outcomes({"n": asked}, [layer("k", ("n",), inputs, weights)])
    assert found.got == got and found.as_asked == (asked == got) and found.kernels == ("k",)


def test_a_node_that_the_engine_does_not_name() -> None:
    (found,) = outcomes({"gone": "int8"}, [layer("k", ("other",), ("int8", "int8"))])
    assert (found.got, found.as_asked, share_as_asked([found])) == ("", False, 0.0)


def test_what_a_graph_asks_for(tmp_path: Path) -> None:
    """Int8 needs both factors dequantized; int4 weights; float by the output's type."""
    weights = {
        "w8": numpy_helper.from_array(np.ones((4, 4), np.int8), "w8"),
        "w": numpy_helper.from_array(np.ones((4, 4), np.float32), "w"),
        "s": numpy_helper.from_array(np.float32(0.1), "s"),
        "z": numpy_helper.from_array(np.int8(0), "z"),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["xq"], "q"),
        helper.make_node("DequantizeLinear", ["xq", "s", "z"], ["xd"], "dx"),
        helper.make_node("DequantizeLinear", ["w8", "s", "z"], ["wd"], "dw"),
        helper.make_node("Transpose", ["wd"], ["wt"], "t", perm=[1, 0]),
        helper.make_node("MatMul", ["xd", "wt"], ["a"], "both"),
        helper.make_node("MatMul", ["a", "wd"], ["b"], "weights_alone"),
        helper.make_node("MatMul", ["b", "w"], ["y"], "float"),
    ]
    shape = [None, 4]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        list(weights.values()),
    )
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    onnx.save(model, tmp_path / "m.onnx")
    assert find_asked_precisions(tmp_path / "m.onnx") == {
        "both": "int8",
        "weights_alone": "float32",
        "float": "float32",
    }
