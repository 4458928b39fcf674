"""Inputs and outputs that are called as something of ours is: through a run, its judgement, `predict` and a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import apply, plan
from shortcuts import quick_export, quick_judge

import runtime
from compress.errors import CompressError
from runtime.__main__ import main
from runtime.clock.graphs import write_model
from runtime.judge.validate import validate
from runtime.serving.protocol import ServedModel

RESERVED = (
    *("prediction", "predictions", "label", "score", "answered", "image", "audio", "rate", "text", "text_pair"),
    *("messages", "question", "context", "logits", "embedding", "top", "mask", "file", "positions", "batch"),
)


def write_names(folder: Path, given: str, output: str) -> dict[str, Any]:
    """Write a model of an input and an output so called, and its samples; return a recipe."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(8, 5)).astype(np.float32)
    nodes = [("MatMul", [given, "weight"], [output], {})]
    content = write_model(nodes, {"weight": weight}, {given: ("float32", ("n", 8))}, {output: ("float32", ("n", 5))})
    (folder / "model.onnx").write_bytes(content)
    np.savez(folder / "samples.npz", **{given: rng.normal(size=(64, 8)).astype(np.float32)})
    return {
        "version": 1,
        "name": "names",
        "model": {"source": "onnx:model.onnx", "task": "generic"},
        "data": {"calibration": {"source": "npz:samples.npz"}, "evaluation": {"source": "npz:samples.npz"}},
        "passes": [{"kind": "int8"}],
        "validate": {"gates": [{"metric": "cosine", "min": 0.9}]},
    }


@pytest.mark.parametrize("name", RESERVED)
def test_an_output_of_a_reserved_name(name: str, cache: Path, tmp_path: Path) -> None:
    recipe = write_names(tmp_path, "x", name)
    use(recipe, "x", name, cache, tmp_path)


@pytest.mark.parametrize("name", RESERVED)
def test_an_input_of_a_reserved_name(name: str, cache: Path, tmp_path: Path) -> None:
    recipe = write_names(tmp_path, name, "y")
    if name == "label":
        with pytest.raises(CompressError, match="input 'label'"):
            plan(recipe, tmp_path, cache)
        return
    use(recipe, name, "y", cache, tmp_path)


def use(recipe: dict[str, Any], given: str, output: str, cache: Path, folder: Path) -> None:
    with quick_judge(), quick_export():
        assert apply(recipe, folder / "out", cache, folder).verdict == "pass"
        assert validate(folder / "out").verdict == "pass"
    samples = {given: np.load(folder / "samples.npz")[given][:3]}
    with runtime.open_bundle(folder / "out") as bundle:
        outputs = bundle.predict(samples)
        assert list(outputs) == [output] and outputs[output].shape == (3, 5) and outputs.predictions is None
        about = {"name": given, "datatype": "FP32", "shape": [3, 8], "data": samples[given].ravel().tolist()}
        answer = json.loads(ServedModel(bundle, 4).infer(json.dumps({"inputs": [about]}).encode()).header)
    (served,) = answer["outputs"]
    assert served["name"] == output
    np.testing.assert_allclose(np.reshape(served["data"], (3, 5)), outputs[output], rtol=1e-5)
    np.savez(folder / "some.npz", **samples)
    assert main(["predict", str(folder / "out"), str(folder / "some.npz")]) == 0
