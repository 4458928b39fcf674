"""A model that hands a state from call to call, and one whose samples cannot share a call, from recipe to Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from makers import apply
from onnx import TensorProto, helper, numpy_helper
from triton_rules import find_problems, read_repository

from compress.deploy.triton import Serving, write_repository
from runtime import open_bundle
from runtime.tasks.manifest import read_manifest

pytestmark = pytest.mark.slow
RNG = np.random.default_rng(0)
CALLS = 5


def write_model(path: Path, *, state: bool) -> None:
    """x [n, 6], h [2, n, 8], sr -> y [n, 3], hn [2, n, 8]; without `state` x -> y alone, less the batch's mean."""
    make, weights = helper.make_node, {"w": (6, 8), "u": (8, 8), "v": (8, 3)}
    constants = {name: (RNG.normal(size=shape) / 3).astype(np.float32) for name, shape in weights.items()}
    constants |= {"rate": np.array(16000, np.float32), "first": np.array(0)}
    if state:
        nodes = [
            make("Cast", ["sr"], ["sr_f"], to=TensorProto.FLOAT),
            make("Div", ["sr_f", "rate"], ["scale"]),
            make("Mul", ["x", "scale"], ["scaled"]),
            make("MatMul", ["scaled", "w"], ["wx"]),
            make("MatMul", ["h", "u"], ["uh"]),
            make("Add", ["uh", "wx"], ["sum"]),
            make("Tanh", ["sum"], ["hn"]),
            make("Gather", ["hn", "first"], ["layer"], axis=0),
        ]
    else:
        nodes = [
            make("MatMul", ["x", "w"], ["wx"]),
            make("ReduceMean", ["wx"], ["mean"], axes=[0]),
            make("Add", ["wx", "mean"], ["layer"]),
        ]
    nodes.append(make("MatMul", ["layer", "v"], ["y"]))
    inputs: dict[str, tuple[int, list[Any]]] = {"x": (TensorProto.FLOAT, ["n", 6])}
    if state:
        inputs |= {"h": (TensorProto.FLOAT, [2, "n", 8]), "sr": (TensorProto.INT64, [])}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (("y", "hn") if state else ("y",))],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def build(folder: Path, *, state: bool) -> Path:
    write_model(folder / "m.onnx", state=state)
    shape = (CALLS, 6) if state else (6,)
    for name in ("train", "test"):
        np.savez(folder / f"{name}.npz", x=RNG.normal(size=(12, *shape)).astype(np.float32))
    said = {"inputs": {"sr": 16000}, "state": {"hn": "h"}} if state else {}
    recipe = {
        "version": 1,
        "name": "theirs",
        "model": {"source": "onnx:m.onnx", "task": "generic", **said},
        "data": {"calibration": {"source": "npz:train.npz"}, "evaluation": {"source": "npz:test.npz"}},
        "passes": [{"kind": "int8", "placement": "all"}],
        "validate": {
            "gates": [{"metric": "cosine", "min": 0.9, "undecided": "pass"}],
            "benchmark": {"warmup": 1, "iterations": 10, "processes": 1},
        },
    }
    apply(recipe, folder / "out", folder / "cache")
    return folder / "out"


def test_a_state_goes_from_call_to_call_in_every_place(tmp_path: Path) -> None:
    bundle = build(tmp_path, state=True)
    manifest = read_manifest(bundle)
    artifact = manifest.artifact("candidate")
    assert [(state.output, state.input.name, state.shape) for state in artifact.states] == [("hn", "h", (2, 1, 8))]
    x = np.load(tmp_path / "test.npz")["x"]
    session, handed = ort.InferenceSession(bundle / artifact.path), np.zeros((2, 1, 8), np.float32)
    expected = []
    for step in range(CALLS):
        y, handed = session.run(["y", "hn"], {"x": x[:1, step], "h": handed})
        expected.append(y[0])
    answers = open_bundle(bundle).predict({"x": x})["y"]
    assert answers.shape == (12, CALLS, 3)
    np.testing.assert_allclose(answers[0], expected, atol=1e-6)
    assert abs(answers[0] - answers[0][0]).max() > 0.1

    write_repository(bundle, tmp_path / "models", Serving())
    configs = read_repository(tmp_path / "models")
    assert find_problems(tmp_path / "models", configs) == []
    config = configs["theirs"]
    assert config.max_batch_size == 0 and [list(value.dims) for value in config.input] == [[1, 6]]
    (kept,) = config.sequence_batching.state
    assert (kept.input_name, kept.output_name, list(kept.dims)) == ("h", "hn", [2, 1, 8])
    assert kept.initial_state[0].zero_data


def test_samples_that_depend_on_each_other_are_run_one_at_a_time(tmp_path: Path) -> None:
    bundle = build(tmp_path, state=False)
    x = np.load(tmp_path / "test.npz")["x"]
    opened = open_bundle(bundle)
    together = opened.predict({"x": x})["y"]
    np.testing.assert_array_equal(together[3:4], opened.predict({"x": x[3:4]})["y"])
    write_repository(bundle, tmp_path / "models", Serving())
    assert read_repository(tmp_path / "models")["theirs"].max_batch_size == 0
