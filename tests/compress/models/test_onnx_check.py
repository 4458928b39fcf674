"""ONNX files that are not what they say: refused by a sentence, whatever they do to ONNX's own checks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.errors import SourceError
from compress.models import onnx_check
from compress.models.onnx_check import check_onnx, examine
from compress.models.onnx_facts import onnx_facts
from compress.models.source import read_onnx

SAMPLE = {"x": ((4,), "float32")}
WEIGHT = numpy_helper.from_array(np.ones((4, 5), np.float32), "w")


def write(path: Path, nodes: list[onnx.NodeProto], *tensors: TensorProto, opset: int = 20, **more: object) -> Path:
    """A model from x [n, 4] to y [n, 5]."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", n]) for name, n in (("x", 4), ("y", 5)))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(nodes, "net", [x], [y], tensors)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9, **more), path)
    return path


def product(path: Path, weight: TensorProto = WEIGHT) -> Path:
    return write(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], weight)


@pytest.fixture(scope="module", autouse=True)
def quick_run() -> None:
    """In place of the shortcuts of all other tests: here files are checked and run in processes of their own."""


@pytest.mark.slow
def test_a_whole_model_is_taken_and_run(tmp_path: Path) -> None:
    assert examine(product(tmp_path / "a.onnx")) == check_onnx(tmp_path / "a.onnx") == {"y": ["n", 5]}
    assert onnx_facts(tmp_path / "a.onnx", "generic", SAMPLE).outputs[0].shape == ("batch", 5)
    broken = product(tmp_path / "b.onnx", numpy_helper.from_array(np.full((4, 5), np.nan, np.float32), "w"))
    with pytest.raises(SourceError, match="NaN or infinity in w"):
        onnx_facts(broken, "generic", SAMPLE)


def test_sizes_that_are_computed_have_a_number(tmp_path: Path) -> None:
    """Before opset 13 inference loses track of a slice of sizes, and with it how many axes come of it."""
    numbers = {"first": [0], "last": [1], "rest": [-1]}
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Slice", ["sizes", "first", "last"], ["batch"]),
        helper.make_node("Concat", ["batch", "rest"], ["told"], axis=0),
        helper.make_node("Reshape", ["x", "told"], ["same"]),
        helper.make_node("MatMul", ["same", "w"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(np.array(values, np.int64), name) for name, values in numbers.items()]
    found = examine(write(tmp_path / "a.onnx", nodes, WEIGHT, *tensors, opset=11))
    assert isinstance(found, dict) and found["y"] is not None and found["y"][1:] == [5]


def tensor(**fields: object) -> TensorProto:
    return TensorProto(name="w", **fields)


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (tensor(dims=[4, 5], data_type=1, raw_data=b"\0" * 79), "has shape [4, 5], of 80 bytes, and 79 bytes"),
        (tensor(dims=[4, 5], data_type=1, float_data=[0.0] * 19), "has shape [4, 5] and 19 values"),
        (tensor(dims=[2**40, 2**40], data_type=1), f"has shape [{2**40}, {2**40}] and 0 values"),
        (tensor(dims=[4, -5], data_type=1), "has shape [4, -5]"),
        (tensor(dims=[4, 5], data_type=99, raw_data=b"\0" * 80), "has data type 99, which is none that can be read"),
        (tensor(dims=[4, 5], data_type=8), "has shape [4, 5] and 0 texts"),
        (tensor(dims=[4, 5], data_type=22, raw_data=b"\0" * 20), "has shape [4, 5], of 10 bytes, and 20 bytes"),
    ],
)
def test_tensors_have_the_values_of_their_shapes(tmp_path: Path, weight: TensorProto, problem: str) -> None:
    assert examine(product(tmp_path / "a.onnx", weight)) == f"tensor 'w' {problem}"


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"offset": "-4"}, "has external data at offset '-4' of length '80'"),
        ({"length": "79"}, "has shape [4, 5], of 80 bytes, and external data of 79"),
        ({"offset": "1"}, "has external data up to byte 81 of w.bin, which has 80"),
    ],
)
def test_external_values_lie_in_their_file(tmp_path: Path, entries: dict[str, str], problem: str) -> None:
    weight = tensor(dims=[4, 5], data_type=1, data_location=1)
    for key, value in {"location": "w.bin", **entries}.items():
        weight.external_data.add(key=key, value=value)
    (tmp_path / "w.bin").write_bytes(b"\0" * 80)
    assert examine(product(tmp_path / "a.onnx", weight)) == f"tensor 'w' {problem}"


def test_checker_and_shape_inference_are_asked(tmp_path: Path) -> None:
    circle = [helper.make_node("Neg", [a], [b]) for a, b in (("b", "a"), ("a", "b"))]
    assert "topologically sorted" in examine(write(tmp_path / "a.onnx", circle))
    narrow = numpy_helper.from_array(np.ones((3, 5), np.float32), "w")
    assert "Incompatible dimensions for matrix multiplication" in examine(product(tmp_path / "b.onnx", narrow))
    with pytest.raises(SourceError, match=r"b\.onnx: is no valid ONNX model: .*Incompatible dimensions"):
        read_onnx(tmp_path / "b.onnx")


def test_names_are_text(tmp_path: Path) -> None:
    path = product(tmp_path / "a.onnx")
    path.write_bytes(path.read_bytes().replace(b"\x01w", b"\x01\xff"))
    assert examine(path) == "it holds a name that is not UTF-8: b'\\xff'"


@pytest.mark.slow
def test_checks_that_do_not_end_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty functions that call the next one twice: shape inference would walk a billion calls."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    calls = [[(["a"], ["c"]), (["c"], ["b"])]] * 30
    bodies = [[helper.make_node(f"F{i + 1}", *pair, domain="own") for pair in pairs] for i, pairs in enumerate(calls)]
    functions = [helper.make_function("own", f"F{i}", ["a"], ["b"], body, opsets) for i, body in enumerate(bodies)]
    functions.append(helper.make_function("own", "F30", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], opsets))
    nodes = [helper.make_node("F0", ["x"], ["z"], domain="own"), helper.make_node("MatMul", ["z", "w"], ["y"])]
    path = write(tmp_path / "a.onnx", nodes, WEIGHT, functions=functions)
    monkeypatch.setattr(onnx_check, "SECONDS", 1)
    with pytest.raises(SourceError, match=r"a\.onnx: is no valid ONNX model: checking it takes more than 1 s"):
        check_onnx(path)
