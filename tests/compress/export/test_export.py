"""From a decided graph to a file: what is written loads, says nothing of this machine, and holds what it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from graphs import one_layer, residual_cnn
from onnx import TensorProto, helper, numpy_helper

from compress.errors import ExportError
from compress.export.bundle import precision
from compress.export.card import model_card
from compress.export.onnx import finish, float_graph, save_graph
from compress.formats.targets import TARGETS
from compress.graph import files
from compress.graph.files import write_graph
from compress.graph.layers import find_layers
from compress.graph.run import Feeds, clone
from compress.models.onnx_facts import onnx_facts
from compress.models.onnx_graph import open_onnx
from compress.rounding.quantized_weight import round_to_nearest
from compress.rounding.state import GraphState
from runtime.bundle.format import Artifact, EvaluationSet, Judgement, Manifest, model_files, model_size
from runtime.bundle.tensors import TensorSpec

X: Feeds = {"x": np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)}


def outputs(path: Path, feeds: Feeds) -> np.ndarray:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def test_a_graph_that_is_saved_runs(tmp_path: Path) -> None:
    save_graph(one_layer(), tmp_path / "new/model.onnx")
    assert outputs(tmp_path / "new/model.onnx", X).shape == (5, 8)


def test_over_the_limit_of_protobuf_weights_lie_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_graph(one_layer(), tmp_path / "small/model.onnx")
    monkeypatch.setattr(files, "IN_MEMORY", 100)
    save_graph(one_layer(), tmp_path / "large/model.onnx")
    assert [path.name for path in model_files(tmp_path / "large/model.onnx")] == ["model.onnx", "model.onnx.data"]
    assert model_size(tmp_path / "large/model.onnx") > 64 * 8 * 4
    np.testing.assert_array_equal(*(outputs(tmp_path / size / "model.onnx", X) for size in ("small", "large")))
    write_graph(ir.load(tmp_path / "large/model.onnx"), tmp_path / "again.onnx")
    np.testing.assert_array_equal(outputs(tmp_path / "again.onnx", X), outputs(tmp_path / "small/model.onnx", X))


def test_a_graph_that_the_checker_or_the_runtime_refuses(tmp_path: Path) -> None:
    graph = one_layer()
    graph.graph.node(0).op_type = "MatMull"
    with pytest.raises(ExportError, match=r"model\.onnx: the exported graph is refused: .*MatMull"):
        save_graph(graph, tmp_path / "model.onnx")
    graph = one_layer()
    graph.graph.node(0).domain = "of.nobody"
    graph.opset_imports["of.nobody"] = 1
    with pytest.raises(ExportError, match="the exported graph is refused"):
        save_graph(graph, tmp_path / "model.onnx")


def nameless(path: Path, opset: int) -> None:
    """x [n, 4] -> Unsqueeze, Squeeze, Softmax -> MatMul with w -> Relu -> y, no node named."""
    old = opset < 13  # from then on axes are an input, for which a converter adds nodes
    more, attributes = ([], {"axes": [2]}) if old else (["axes"], {})
    nodes = [
        helper.make_node("Unsqueeze", ["x", *more], ["up"], **attributes),
        helper.make_node("Squeeze", ["up", *more], ["down"], **attributes),
        helper.make_node("Softmax", ["down"], ["soft"], axis=0),  # over everything in old opsets: more nodes, converted
        helper.make_node("MatMul", ["soft", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    constants = {"w": np.eye(4, dtype=np.float32)} | ({} if old else {"axes": np.array([2])})
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)


@pytest.mark.parametrize("opset", [11, 17, 21])
def test_an_onnx_file_is_read_with_the_names_that_the_plan_knows(tmp_path: Path, opset: int) -> None:
    nameless(tmp_path / "m.onnx", opset)
    facts = onnx_facts(tmp_path / "m.onnx", "generic", {"x": ((4,), "float32")})
    graph = open_onnx(tmp_path / "m.onnx").model
    names = [layer.name for layer in find_layers(graph)]
    assert len(names) == 1 and names == [layer.name for layer in facts.layers]
    assert all(node.name for node in graph.graph) and graph.opset_imports[""] == max(opset, 20)


def test_nothing_of_this_machine_is_written() -> None:
    graph = residual_cnn()
    graph.metadata_props["made.in"] = str(Path.cwd())
    for node in graph.graph:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = __file__
    plain = float_graph(graph)
    assert str(Path.cwd()).encode() not in ir.to_proto(plain).SerializeToString()
    finished, _ = finish(GraphState(clone(graph)), TARGETS["onnxruntime-cpu"])
    assert str(Path.cwd()).encode() not in ir.to_proto(finished).SerializeToString()
    assert graph.metadata_props, "the graph itself is left as it was"


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    graph = one_layer()
    weight = round_to_nearest(find_layers(graph)[0].matrix(), 4, 32, True)
    state = GraphState(graph, weight_only=["fc"], weights={"fc": weight})
    for name in "ab":
        save_graph(finish(state, TARGETS["onnxruntime-cpu"])[0], tmp_path / f"{name}.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert onnx.load(tmp_path / "a.onnx").opset_import[0].version >= 21, "4-bit weights need it"


def test_precision_in_words() -> None:
    graph = one_layer()
    four, eight = (round_to_nearest(find_layers(graph)[0].matrix(), bits, 32, True) for bits in (4, 8))
    assert precision(GraphState(graph)) == "float32"
    assert precision(GraphState(graph, weights={"a": eight})) == "int8"
    assert precision(GraphState(graph, weights={"a": eight, "b": four}, half="float16")) == "int4 + int8 + float16"


def test_the_card_counts_what_was_done_and_holds_no_measurement() -> None:
    manifest = Manifest(
        name="b",
        task="generic",
        target="openvino",
        preprocess={"kind": "tensor"},
        artifacts=(Artifact("candidate", "m.onnx", "openvino", "int8", (TensorSpec("x", "float32", (2,)),), (), 1),),
        evaluation=EvaluationSet(7, None, None, "evaluation/baseline_outputs.npz", ""),
        judgement=Judgement(),
        created_by="compress 0",
    )
    rows = [{"action": "int8"}, {"action": "kept"}, {"action": "int8"}]
    text = model_card(manifest, {"model": {"source": "onnx:m.onnx", "digest": "abc"}}, rows)
    assert text.startswith("---\nlibrary_name: onnx\n") and text.endswith("\n")
    assert "- 2 layers: int8\n- 1 layers: kept" in text and "the evaluation set has 7 samples" in text.lower()
    assert "`onnx:m.onnx` (sha256 abc)" in text and "ms" not in text.split()
