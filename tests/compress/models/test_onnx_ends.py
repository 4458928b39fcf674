"""What the samples of an ONNX file share, and what its calls hand on, is said in the recipe or refused with advice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.errors import SourceError
from compress.models.onnx_ends import onnx_io
from compress.models.source import read_onnx
from compress.specs import ModelSpec

STATE, RATE = {"hn": "h"}, {"sr": 16000}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x [n, 4], h [2, n, 4], sr -> y [n, 4], hn [2, n, 4]."""
    make = helper.make_node
    nodes = [
        make("Cast", ["sr"], ["rate"], to=TensorProto.FLOAT),
        make("Mul", ["x", "rate"], ["scaled"]),
        make("Add", ["h", "scaled"], ["hn"]),
        make("ReduceSum", ["hn", "axes"], ["y"], keepdims=0),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [-1, 4]),
        helper.make_tensor_value_info("h", TensorProto.FLOAT, [2, -1, 4]),
        helper.make_tensor_value_info("sr", TensorProto.INT64, []),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "hn")]
    axes = numpy_helper.from_array(np.array([0]), "axes")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [axes])
    path = tmp_path_factory.mktemp("ends") / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def spec(file: Path, **said: Any) -> ModelSpec:
    return ModelSpec(source=f"onnx:{file}", task="generic", **said)


def test_a_sample_is_a_sequence_of_calls(file: Path) -> None:
    ends = onnx_io(spec(file, inputs=RATE, state=STATE), file)
    assert [(value.name, value.shape) for value in (*ends.inputs, *ends.outputs)] == [
        ("x", (1, "time", 4)),
        ("y", (1, "time", 4)),
    ]
    assert [(state.output, state.input.name, state.shape) for state in ends.states] == [("hn", "h", (2, 1, 4))]


def test_what_all_samples_share_is_a_constant_of_the_inputs_type(file: Path) -> None:
    proto = read_onnx(file, RATE)
    assert [value.name for value in proto.graph.input] == ["x", "h"]
    assert {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}["sr"] == np.int64(16000)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({}, "input 'h' [2, h_1, 4] has a first axis of its own, where others have the batch"),
        ({}, "say model.state: {hn: h}"),
        ({"state": STATE}, "input 'sr' has no axes: it is one value for all samples; say which in the recipe: "),
        ({"inputs": {"rate": 1}}, "has no input 'rate'; its inputs are x, h, sr"),
        ({"inputs": {"sr": 0.5}}, "0.5 does not fit input 'sr' [] of"),
        ({"inputs": {"sr": [1, 2]}}, "[1, 2] does not fit input 'sr' [] of"),
        ({"inputs": RATE, "state": {"hm": "h"}}, "has no output 'hm'; write OUTPUT: INPUT. Its outputs are y, hn"),
        ({"inputs": RATE, "state": {"hn": "c"}}, "has no input 'c'; write OUTPUT: INPUT. Its inputs are x, h"),
        ({"inputs": RATE, "state": {"hn": "h", "y": "x"}}, "has nothing but states"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(file: Path, said: dict[str, Any], problem: str) -> None:
    with pytest.raises(SourceError, match=re.escape(problem)):
        onnx_io(spec(file, **said), file)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"source": "python:m.py:f", "state": STATE}, "state: is for onnx: sources"),
        ({"source": "dir:m", "inputs": RATE}, "inputs: is for onnx: sources"),
        ({"source": "onnx:m.onnx", "state": {"a": "h", "b": "h"}}, "two outputs go into one input"),
    ],
)
def test_a_recipe_says_them_of_onnx_files_alone(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ModelSpec(task="generic", **said)
