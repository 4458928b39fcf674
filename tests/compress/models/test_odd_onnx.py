"""ONNX files that are oddly written: those that ONNX Runtime runs are taken, the others refused in the plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.errors import SourceError
from compress.graph.run import open_session
from compress.models.onnx_facts import onnx_facts
from compress.models.onnx_graph import open_onnx
from compress.models.source import read_onnx
from compress.store.output import resolve_output

RNG = np.random.default_rng(3)
make = helper.make_node


def info(name: str, shape: list[int | str] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def write(
    path: Path,
    x: onnx.ValueInfoProto,
    y: onnx.ValueInfoProto,
    opset: int = 17,
    inner: list[onnx.ValueInfoProto] | None = None,
    weight: np.ndarray | None = None,
) -> Path:
    """x [n, 4] -> Relu, product with w [4, 5] -> y [n, 5], whatever the file says of the shapes."""
    weight = RNG.normal(size=(4, 5)).astype(np.float32) if weight is None else weight
    tensor = numpy_helper.from_array(weight, "w")
    if x.type.tensor_type.elem_type == TensorProto.BFLOAT16:
        tensor = helper.make_tensor("w", TensorProto.BFLOAT16, [4, 5], weight.ravel())
    nodes = [make("Relu", ["x"], ["r"]), make("MatMul", ["r", "w"], ["y"])]
    graph = helper.make_graph(nodes, "net", [x], [y], [tensor], value_info=inner or [])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


SAMPLE = {"x": ((4,), "float32")}
GOOD = info("x", ["n", 4]), info("y", ["n", 5])


@pytest.mark.parametrize("opset", [7, 9, 13, 20, 22])
@pytest.mark.parametrize(
    ("x", "y", "inner"),
    [
        (*GOOD, []),
        (GOOD[0], info("y", None), []),
        (info("x", [-1, 4]), info("y", [-1, 5]), []),
        (GOOD[0], info("y", ["n", 7]), []),
        (*GOOD, [info("r", ["n", 9])]),
        (info("x", ["n", 4], TensorProto.BFLOAT16), info("y", ["n", 5], TensorProto.BFLOAT16), []),
    ],
)
def test_what_shape_inference_completes_is_taken(
    tmp_path: Path, opset: int, x: onnx.ValueInfoProto, y: onnx.ValueInfoProto, inner: list[onnx.ValueInfoProto]
) -> None:
    if x.type.tensor_type.elem_type == TensorProto.BFLOAT16:
        opset = max(opset, 13)  # products of bfloat16 are of 13 and later
    facts = onnx_facts(write(tmp_path / "a.onnx", x, y, opset, inner), "generic", SAMPLE)
    assert [(spec.dtype, spec.shape) for spec in (*facts.inputs, *facts.outputs)] == [
        ("float32", ("batch", 4)),
        ("float32", ("batch", 5)),
    ]


@pytest.mark.parametrize(
    ("x", "weight", "opset", "problem"),
    [
        (info("x", [0, 4]), None, 17, "input 'x' has a dimension of 0"),
        (info("x", [-5, 4]), None, 17, "input 'x' has a dimension of -5"),
        (GOOD[0], None, 999, "ONNX Runtime cannot load it: ONNX Runtime only"),
        (GOOD[0], np.full((4, 5), np.nan, np.float32), 17, "NaN or infinity in w"),
    ],
)
def test_what_does_not_run_is_refused_by_its_facts(
    tmp_path: Path, x: onnx.ValueInfoProto, weight: np.ndarray | None, opset: int, problem: str
) -> None:
    with pytest.raises(SourceError, match=problem):
        onnx_facts(write(tmp_path / "a.onnx", x, GOOD[1], opset, weight=weight), "generic", SAMPLE)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(("operator", "opset"), [("Upsample", 9), ("Resize", 10)])
def test_old_images_are_enlarged_as_they_were(tmp_path: Path, mode: str, operator: str, opset: int) -> None:
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s")
    nodes = [make(operator, ["x", "s"], ["y"], mode=mode)]
    graph = helper.make_graph(nodes, "net", [info("x", [1, 2, 4, 4])], [info("y", [1, 2, 8, 8])], [scales])
    path = tmp_path / "a.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4), path)
    feeds = {"x": RNG.normal(size=(1, 2, 4, 4)).astype(np.float32)}
    want, got = open_session(path).run(None, feeds)[0], open_session(open_onnx(path).model).run(None, feeds)[0]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_constant_is_no_output(tmp_path: Path) -> None:
    path = write(tmp_path / "a.onnx", *GOOD)
    model = onnx.load(path)
    model.graph.output.append(info("w", [4, 5]))
    onnx.save(model, path)
    with pytest.raises(SourceError, match="output 'w' is a constant"):
        read_onnx(path)


def test_links_that_lead_to_each_other_are_no_place(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(Exception, match="is no place to write to"):
        resolve_output(tmp_path / "a")
