"""Two ways to run a graph, one of them with a layer that computes otherwise: the first tensor that differs is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.commands.parity import Parity, allow_error, compare_outputs, lines, locate, to_dict
from compress.engine.marked import mark, tensors_of
from runtime.backends import Session, find_backend
from runtime.bundle.manifest import Artifact
from runtime.judge.divergence import Divergence

LAYERS = 20


def chain(path: Path, wrong: int | None = None) -> Path:
    """x -> LAYERS times matrix product and Relu -> y; the product of number `wrong` has another matrix."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for i in range(LAYERS):
        matrix = np.eye(8, dtype=np.float32) + 0.05 * rng.normal(size=(8, 8)).astype(np.float32)
        matrix = matrix * 1.5 if i == wrong else matrix
        weights.append(numpy_helper.from_array(matrix, f"w{i}"))
        source = "x" if i == 0 else f"r{i - 1}"
        nodes += [
            helper.make_node("MatMul", [source, f"w{i}"], [f"m{i}"]),
            helper.make_node("Relu", [f"m{i}"], ["y" if i == LAYERS - 1 else f"r{i}"]),
        ]
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 8])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def opened(path: Path) -> Session:
    return find_backend("onnxruntime-cpu").open(path, 1, {})


@pytest.mark.parametrize("wrong", [0, 7, LAYERS - 1])
def test_the_layer_that_computes_otherwise_is_found(tmp_path: Path, wrong: int) -> None:
    graph = chain(tmp_path / "model.onnx")
    feeds = {"x": np.random.default_rng(1).uniform(0.5, 1, (4, 8)).astype(np.float32)}

    def sabotaged(path: Path) -> Session:
        """The same tensors asked of the other graph."""
        asked = [value.name for value in onnx.load(path).graph.output]
        other = chain(tmp_path / "other.onnx", wrong)
        mark(other, asked, tmp_path / "marked.onnx")
        return opened(tmp_path / "marked.onnx")

    same = {"x": np.zeros((4, 8), np.float32)}  # 0 whatever the weights are
    errors, worst = compare_outputs(opened(graph), sabotaged(graph), [same, feeds])
    assert errors["y"] > 0.1 and worst == 1
    found = locate(graph, feeds, (opened, sabotaged), allowed=1e-3)
    assert found is not None and found.tensor == f"m{wrong}"
    assert found.before == (f"r{wrong - 1}" if wrong else "") and found.questions <= 4


def test_a_graph_agrees_with_itself(tmp_path: Path) -> None:
    graph = chain(tmp_path / "model.onnx")
    feeds = {"x": np.ones((3, 8), np.float32)}
    assert compare_outputs(opened(graph), opened(graph), [feeds, feeds]) == ({"y": 0.0}, 0)
    assert locate(graph, feeds, (opened, opened), allowed=1e-3) is None
    assert len(tensors_of(graph)) == 2 * LAYERS


def test_what_is_said(tmp_path: Path) -> None:
    found = Divergence("m7", "r6", {"m7": 0.5, "r6": 1e-7}, 2)
    wrong = Parity("tensorrt", 4, {"y": 0.2}, 1e-3, found)
    assert not wrong.holds and lines(wrong)[1] == "first tensor that differs: m7, by 0.5; r6 before it does not"
    assert "a fusion" in lines(replace(wrong, divergence=None))[1]
    right = replace(wrong, errors={"y": 1e-5}, divergence=None)
    assert right.holds and lines(right)[1] == "tensorrt gives what the ONNX file gives, on 4 samples"
    assert to_dict(wrong)["divergence"] == {"tensor": "m7", "before": "r6", "errors": found.errors, "questions": 2}


def test_what_a_precision_explains() -> None:
    graph = Artifact("candidate", "model.onnx", "tensorrt", "int4 + float16", (), (), 1)
    assert allow_error(graph) == 2e-2
