"""Models that hold float8 are known by their bytes, and ONNX Runtime computes what they say."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from runtime.backends.onnxruntime_cpu import create
from runtime.bundle.onnx_file import holds_float8


def rounded_after_relu(float8: bool) -> bytes:
    """x -> Relu -> QuantizeLinear -> DequantizeLinear -> y, in float8 or int8."""
    kind = TensorProto.FLOAT8E4M3FN if float8 else TensorProto.INT8
    zero = np.zeros((), ml_dtypes.float8_e4m3fn if float8 else np.int8)
    nodes = [
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("QuantizeLinear", ["positive", "scale", "zero"], ["stored"]),
        helper.make_node("DequantizeLinear", ["stored", "scale", "zero"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.asarray(0.01, np.float32), "scale"),
        helper.make_tensor("zero", kind, (), zero.tobytes(), raw=True),
    ]
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8])] for name in ("x", "y"))
    graph = helper.make_graph(nodes, "relu", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("float8", [True, False])
def test_found_in_a_file_and_in_memory(float8: bool, tmp_path: Path) -> None:
    data = rounded_after_relu(float8)
    (tmp_path / "model.onnx").write_bytes(data)
    assert holds_float8(data) == float8 and holds_float8(str(tmp_path / "model.onnx")) == float8


@pytest.mark.parametrize("kind", [TensorProto.FLOAT8E5M2, TensorProto.FLOAT16])
def test_found_where_an_operator_or_a_constant_node_gives_it(kind: int) -> None:
    constant = helper.make_tensor("value", kind, (), bytes(2 if kind == TensorProto.FLOAT16 else 1), raw=True)
    for node in (
        helper.make_node("Cast", ["x"], ["y"], to=kind),
        helper.make_node("QuantizeLinear", ["x", "s"], ["y"], output_dtype=kind),
        helper.make_node("Constant", [], ["y"], value=constant),
    ):
        model = helper.make_model(helper.make_graph([node], "g", [], []))
        assert holds_float8(model.SerializeToString()) == (kind == TensorProto.FLOAT8E5M2), node.op_type


@pytest.mark.parametrize("data", [b"not a model", b"\x3a\xff", b"\x3a\x80", bytes(range(256))])
def test_what_is_no_model_holds_none(data: bytes) -> None:
    assert not holds_float8(data)


def test_a_relu_before_float8_is_not_lost() -> None:
    session = create(rounded_after_relu(True), ort.SessionOptions(), ["CPUExecutionProvider"])
    x = np.linspace(-1, 1, 8, dtype=np.float32)[None]
    (y,) = session.run(None, {"x": x})
    assert (y >= 0).all() and np.allclose(y, np.maximum(x, 0), rtol=0.07, atol=1e-4)
