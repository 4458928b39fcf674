"""Inputs and outputs that are called as something of ours is: through a run, its judgement, `predict` and a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
from makers import QUICK, apply, plan
from onnx import helper
from shortcuts import quick_judge

import runtime
from compress.errors import CompressError
from runtime.__main__ import main
from runtime.bundle.samples import write_npz
from runtime.report.validate import validate
from runtime.serving.protocol import ServedModel

RESERVED = (
    *("prediction", "predictions", "score", "answered", "image", "audio", "rate", "text", "text_pair", "messages"),
    *("question", "context", "logits", "embedding", "top", "mask", "file", "positions", "loss_mask", "batch"),
)


def write_model(folder: Path, inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, Any]:
    """Write a model in which each output is made of all inputs, and samples; return a recipe."""
    rng = np.random.default_rng(0)
    weights = {f"weight of {name}": rng.normal(size=(8, 5)).astype(np.float32) for name in outputs}
    nodes = [helper.make_node("Sum", list(inputs), ["sum of all"])]
    nodes += [helper.make_node("MatMul", ["sum of all", f"weight of {name}"], [name]) for name in outputs]
    model = graphs.build(nodes, weights, dict.fromkeys(inputs, ("n", 8)), dict.fromkeys(outputs, ("n", 5)))
    ir.save(model, folder / "model.onnx")
    write_npz(folder / "samples.npz", {name: rng.normal(size=(64, 8)).astype(np.float32) for name in inputs})
    return {
        "version": 1,
        "name": "names",
        "model": {"source": "onnx:model.onnx", "task": "generic"},
        "data": {"calibration": {"source": "npz:samples.npz"}, "evaluation": {"source": "npz:samples.npz"}},
        "passes": [{"kind": "int8"}],
        "validate": {"gates": [{"metric": "cosine", "min": 0.9}], "benchmark": QUICK},
    }


@pytest.mark.parametrize(("inputs", "outputs"), [(("x",), (*RESERVED, "label")), (RESERVED, ("y",))])
def test_reserved_names(inputs: Sequence[str], outputs: Sequence[str], cache: Path, tmp_path: Path) -> None:
    recipe = write_model(tmp_path, inputs, outputs)
    with quick_judge():
        assert apply(recipe, tmp_path / "out", cache, tmp_path).verdict == "pass"
        assert validate(tmp_path / "out").verdict == "pass"
    samples = {name: np.load(tmp_path / "samples.npz")[name][:3] for name in inputs}
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [3, 8], "data": values.ravel().tolist()}
        for name, values in samples.items()
    ]
    with runtime.open_bundle(tmp_path / "out") as bundle:
        found = bundle.predict(samples)
        answer = json.loads(ServedModel(bundle, 4).infer(json.dumps({"inputs": tensors}).encode()).header)
    assert set(found) == set(outputs) and found.predictions is None
    served = {each["name"]: np.reshape(each["data"], (3, 5)) for each in answer["outputs"]}
    assert served.keys() == found.keys()
    for name, values in found.items():
        np.testing.assert_allclose(served[name], values, rtol=1e-5)
    write_npz(tmp_path / "some.npz", samples)
    assert main(["predict", str(tmp_path / "out"), str(tmp_path / "some.npz")]) == 0


def test_an_input_that_would_be_taken_for_labels(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match="input 'label'"):
        plan(write_model(tmp_path, ["label"], ["y"]), tmp_path, cache)
