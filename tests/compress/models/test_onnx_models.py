"""ONNX files as models: facts, layers, refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hub_double import cache_as_hub
from model_specs import DIGITS_FEEDS, DIGITS_SPEC
from onnx import TensorProto, helper, numpy_helper

from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.models.facts import model_facts
from compress.models.load import OnnxModel, load_model
from compress.models.source import locate
from compress.specs import ModelSpec
from runtime.bundle.tensors import TensorSpec


def small_onnx(path: Path, weight: np.ndarray | None = None, external: bool = False) -> Path:
    """x [N, 3, 6, 6] -> Conv 3x3 -> ReduceMean -> MatMul [4, 5] -> logits."""
    kernel = np.ones((4, 3, 3, 3), np.float32) if weight is None else weight
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"], name="conv"),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "matrix"], ["logits"], name="head"),
    ]
    values = {"kernel": kernel, "matrix": np.arange(20, dtype=np.float32).reshape(4, 5)}
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 6, 6])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 5])],
        [numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, path, save_as_external_data=external, location="small.data", size_threshold=0)
    return path


def onnx_spec(path: Path) -> ModelSpec:
    return ModelSpec(source=f"onnx:{path}", task="image-classification")


EXPORT: dict[str, Any] = {"input_names": ["pixel_values"], "dynamo": True, "verbose": False}
ONNX_FEEDS: SampleShapes = {"x": ((3, 6, 6), "float32")}


@pytest.mark.parametrize("external", [False, True])
def test_onnx_facts(tmp_path: Path, external: bool) -> None:
    spec = onnx_spec(small_onnx(tmp_path / "m.onnx", external=external))
    facts, loaded = model_facts(locate(spec, Path()), ONNX_FEEDS), load_model(locate(spec, Path()), ONNX_FEEDS)
    found = [(layer.name, layer.type, layer.op, layer.shape, layer.macs) for layer in facts.layers]
    assert found == [
        ("conv", "Conv2d", "Conv", (4, 3, 3, 3), 4 * 4 * 4 * 27),
        ("head", "Linear", "MatMul", (5, 4), 20),
    ]
    assert facts.n_bytes == 4 * (4 * 27 + 20)
    assert facts.inputs == loaded.inputs == (TensorSpec("x", "float32", ("batch", 3, 6, 6)),)
    assert facts.outputs == loaded.outputs == (TensorSpec("logits", "float32", ("batch", 5)),)
    assert facts.peak_activation_bytes == 4 * (3 * 36 + 4 * 16)  # the input and the convolution's output
    assert isinstance(loaded, OnnxModel) and loaded.path == tmp_path / "m.onnx"


def link_weights(folder: Path) -> None:
    (folder / "small.data").rename(folder / "more.data")
    (folder / "small.data").symlink_to("more.data")


def link_graph(folder: Path) -> None:
    (folder / "real").mkdir()
    for name in ("m.onnx", "small.data"):
        (folder / name).rename(folder / "real" / name)
    (folder / "m.onnx").symlink_to("real/m.onnx")


@pytest.mark.parametrize("link", [cache_as_hub, link_weights, link_graph])
def test_links_to_a_graph_and_to_its_weights(tmp_path: Path, link: Callable[[Path], None]) -> None:
    (folder := tmp_path / "snapshot").mkdir()
    spec = onnx_spec(small_onnx(folder / "m.onnx", external=True))
    before = load_model(locate(spec, Path()), ONNX_FEEDS)
    link(folder)
    after = load_model(locate(spec, Path()), ONNX_FEEDS)
    assert isinstance(before, OnnxModel) and isinstance(after, OnnxModel)
    assert ir.to_proto(before.graph) == ir.to_proto(after.graph)


def test_weights_that_lie_elsewhere_or_have_two_names(tmp_path: Path) -> None:
    (folder := tmp_path / "given").mkdir()
    path = small_onnx(folder / "m.onnx", external=True)
    data = folder / "small.data"
    os.link(data, tmp_path / "second")
    with pytest.raises(SourceError, match=r"small\.data has 2 names \(hard links\).* put a copy"):
        model_facts(locate(onnx_spec(path), Path()), ONNX_FEEDS)
    data.unlink()
    data.symlink_to("../second")
    with pytest.raises(SourceError, match=r"small\.data is a link to .*second, out of its folder; copy it here"):
        model_facts(locate(onnx_spec(path), Path()), ONNX_FEEDS)


def test_onnx_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not a graph")
    with pytest.raises(SourceError, match=r"bad\.onnx: cannot be read as ONNX"):
        model_facts(locate(onnx_spec(tmp_path / "bad.onnx"), Path()), ONNX_FEEDS)
    infinite = np.full((4, 3, 3, 3), np.inf, np.float32)
    with pytest.raises(SourceError, match="NaN or infinity in kernel"):
        load_model(locate(onnx_spec(small_onnx(tmp_path / "inf.onnx", infinite)), Path()), ONNX_FEEDS)
    path = small_onnx(tmp_path / "m.onnx", external=True)
    with pytest.raises(SourceError, match=r"input 'x' takes \['batch', 3, 6, 6\], a sample is \[1, 6, 6\]"):
        model_facts(locate(onnx_spec(path), Path()), {"x": ((1, 6, 6), "float32")})
    two = onnx.load(path, load_external_data=False)
    two.graph.output.append(helper.make_tensor_value_info("f", TensorProto.FLOAT, ["N", 4]))
    onnx.save(two, tmp_path / "named.onnx")
    model_facts(locate(onnx_spec(tmp_path / "named.onnx"), Path()), ONNX_FEEDS)  # one of them is called logits
    two.graph.node[-1].output[0] = two.graph.output[0].name = "y"
    onnx.save(two, tmp_path / "two.onnx")
    with pytest.raises(SourceError, match=r"one output \[batch, classes\], but the graph gives 'y' .*'f' .*'logits'"):
        model_facts(locate(onnx_spec(tmp_path / "two.onnx"), Path()), ONNX_FEEDS)
    (tmp_path / "small.data").unlink()
    with pytest.raises(SourceError, match=r"weights file .*small\.data is missing"):
        model_facts(locate(onnx_spec(path), Path()), ONNX_FEEDS)


@pytest.mark.filterwarnings("ignore")  # the exporter's own
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.slow
def test_exported_graph_has_the_layers_that_the_plan_named(tmp_path: Path, optimize: bool) -> None:
    facts, loaded = (
        model_facts(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS),
        load_model(locate(DIGITS_SPEC, Path()), DIGITS_FEEDS),
    )
    batch = {0: torch.export.Dim("batch")}
    torch.onnx.export(
        loaded.module,
        (torch.zeros(2, 1, 8, 8),),
        tmp_path / "m.onnx",
        dynamic_shapes=(batch,),
        optimize=optimize,
        **EXPORT,
    )
    exported = model_facts(locate(onnx_spec(tmp_path / "m.onnx"), Path()), DIGITS_FEEDS)
    by_name = {layer.name: layer for layer in exported.layers}
    for layer in facts.layers:
        found = by_name[layer.name]
        assert (found.shape, found.macs, found.op, found.type) == (layer.shape, layer.macs, layer.op, layer.type)
