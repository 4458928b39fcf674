"""Profiles: the executed graph with its times, traced to the file's layers; small models written without onnx."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from runtime.backends import find_backend
from runtime.bundle.onnx_file import Graph, GraphNode, read_graph
from runtime.clock import peaks
from runtime.clock.graphs import write_model
from runtime.clock.peaks import Peaks, Product, measure_peaks
from runtime.errors import BundleError
from runtime.measure.profile import Profile, average_undisturbed
from runtime.measure.profile_models import profile_model
from runtime.measure.profile_onnxruntime import read_onnxruntime_profile


def save_cnn(path: Path, external: bool = False) -> Path:
    """x [1, 4, 6, 6] -> a convolution with Relu, its mean over places, a Gemm."""
    rng = np.random.default_rng(0)
    weights = {"conv.weight": rng.normal(size=(16, 4, 3, 3)), "fc.weight": rng.normal(size=(5, 16))}
    weights["fc.bias"] = np.ones(5)
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["c"], "node_conv", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"], "node_relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "node_pool"),
        helper.make_node("Flatten", ["p"], ["f"], "node_flatten"),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["y"], "node_gemm", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(w.astype(np.float32), name) for name, w in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path, save_as_external_data=external, location="w.bin", size_threshold=0)
    return path


FEEDS = {"x": np.ones((2, 4, 6, 6), np.float32)}


def profile_cnn(folder: Path, backend: str = "onnxruntime-cpu", external: bool = False) -> Profile:
    return profile_model(backend, save_cnn(folder / "model.onnx", external), 1, FEEDS, budget_s=0.02)


@pytest.mark.parametrize("external", [False, True])
def test_a_profile_counts_operations_of_layers_by_the_files_names(tmp_path: Path, external: bool) -> None:
    found = profile_cnn(tmp_path, external=external)
    layers = {node.layer: node for node in found.products}
    assert layers.keys() == {"conv", "fc"}  # Conv and Relu were fused, and moved to another layout
    assert layers["conv"].flops == 2 * 2 * 16 * 36 * 4 * 9 and layers["fc"].flops == 2 * 2 * 5 * 16
    assert layers["fc"].n_bytes == 4 * (2 * 16 + 5 * 16 + 5 + 2 * 5)
    assert (layers["conv"].input_width, layers["conv"].output_width) == (4, 16)
    assert (layers["fc"].input_width, layers["fc"].output_width, layers["fc"].rows) == (16, 5, 2)
    assert 0 < found.nodes_ms <= found.call_ms and not found.find("Relu")
    assert found.n_bytes == 4 * (16 * 4 * 9 + 5 * 16)


def test_openvinos_profile_has_the_same_layers(tmp_path: Path) -> None:
    reason = find_backend("openvino").available()
    if reason is not None:
        pytest.skip(reason)
    found = profile_cnn(tmp_path, "openvino")
    (conv,) = (node for node in found.products if node.layer == "conv")
    assert conv.flops == 2 * 2 * 16 * 36 * 4 * 9 and conv.source == "node_conv"


def test_nodes_without_names_and_those_of_subgraphs_are_told_apart() -> None:
    graph = Graph((GraphNode("", "Add", ("x", "x"), ("a",), {}), GraphNode("if", "If", ("a",), ("y",), {})), {})

    def event(name: str, operator: str, start: int, duration: int) -> dict[str, object]:
        kinds = {"op_name": operator, "output_type_shape": [{"float": [2, 3]}]}
        return {"name": f"{name}_kernel_time", "cat": "Node", "ts": start, "dur": duration, "args": kinds}

    events = [
        {"name": "model_run", "cat": "Session", "ts": 0, "dur": 100},
        {"name": "model_run", "cat": "Session", "ts": 200, "dur": 50},
        event("Add_0", "Add", 201, 10),
        event("if", "If", 215, 30),
        event("inner", "Mul", 220, 20),
    ]
    found = read_onnxruntime_profile(events, graph, {}, lambda run: run > 0)
    assert [(node.operator, node.ms) for node in found.nodes] == [("Add", 0.01), ("If", 0.03)]
    assert found.call_ms == found.nodes_ms == 0.04 and found.nodes[0].outputs[0].shape == (2, 3)


def test_disturbed_calls_do_not_count() -> None:
    assert average_undisturbed([1.0, 9.0, 1.0, 50.0]) == 1.0


def test_graphs_are_read_as_onnx_reads_them(tmp_path: Path) -> None:
    path = save_cnn(tmp_path / "model.onnx")
    graph, known = read_graph(path), onnx.load(path).graph
    assert [(n.name, n.operator, list(n.inputs), list(n.outputs)) for n in graph.nodes] == [
        (n.name, n.op_type, list(n.input), list(n.output)) for n in known.node
    ]
    assert graph.constants == {t.name: ("float32", tuple(t.dims)) for t in known.initializer}
    assert graph.nodes[-1].integers == {"transB": 1}
    (tmp_path / "torn.onnx").write_bytes(path.read_bytes()[:-7])
    with pytest.raises(BundleError, match="not an ONNX model"):
        read_graph(tmp_path / "torn.onnx")


def test_models_written_without_onnx_are_valid() -> None:
    content = write_model(
        [("Gemm", ["x", "w"], ["y"], {"transB": 1})],
        {"w": np.ones((3, 300), np.float32)},
        {"x": ("float32", (2, 300))},
        {"y": ("float32", (2, 3))},
    )
    onnx.checker.check_model(onnx.load_from_string(content), full_check=True)


@pytest.mark.slow
def test_peaks_are_measured_through_the_runtime() -> None:
    found = measure_peaks("onnxruntime-cpu", 1, 1000)
    assert all(found.gflops[name] > 0 for name in ("float32", "uint8", "int8")) and found.gb_per_s > 0
    few = Product(4, 64, 64, "bits", level=4)
    assert peaks.time_products("onnxruntime-cpu", 1, [few, Product(4, 64, 64, "bits", bits=5)])[1] is None


def test_the_peak_of_other_float_types_is_that_of_float32() -> None:
    known = Peaks({"float32": 100.0, "uint8": 400.0, "int8": 0.0}, 20.0)
    assert known.rate("float16") == known.rate("int8") == 100.0 and known.rate("uint8") == 400.0
    assert known.int8_gain == 4.0
