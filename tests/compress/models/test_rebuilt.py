"""An ONNX file as a torch module: batches that it fixes, and what the plan knows of it."""

from __future__ import annotations

from pathlib import Path

import graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import helper

from compress.blocks.forward import name_outputs
from compress.errors import SourceError
from compress.graph.run import open_session
from compress.models.facts import model_facts, rebuilt_facts
from compress.models.load import load_torch_model
from compress.models.rebuilt import InBatches, rebuild_onnx
from compress.models.source import locate
from compress.specs import ModelSpec
from runtime.bundle.tensors import TensorSpec

RANDOM = np.random.default_rng(0)
FEEDS = {"x": ((4,), "float32")}


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def bound(batch: int) -> ir.Model:
    """x [batch, 4] -> y [batch, 3]; samples are mixed with a constant that holds one row for each of the batch."""
    make = helper.make_node
    nodes = [make("MatMul", ["x", "w"], ["h"], name="fc"), make("Add", ["h", "rows"], ["y"])]
    constants = {"w": floats(4, 3), "rows": floats(batch, 3)}
    return graphs.build(nodes, constants, {"x": (batch, 4)}, {"y": (batch, 3)})


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_graph_that_is_bound_to_its_batch_reads_more_in_parts(n: int) -> None:
    model = bound(2)
    rebuilt = rebuild_onnx(model, (TensorSpec("x", "float32", (2, 4)),), FEEDS)
    assert rebuilt.bound_to == 2 and isinstance(rebuilt.module, InBatches)
    x = floats(n, 4)
    filled = x[np.arange(n + n % 2) % n]
    session = open_session(model)
    expected = np.concatenate([session.run(None, {"x": filled[i : i + 2]})[0] for i in range(0, len(filled), 2)])[:n]
    (given,) = name_outputs(rebuilt.module(x=torch.from_numpy(x))).values()
    np.testing.assert_allclose(given.numpy(), expected, atol=1e-6)


def test_a_fixed_batch_that_can_be_free_is_free() -> None:
    rebuilt = rebuild_onnx(graphs.one_layer(4, 3), (TensorSpec("x", "float32", (1, 4)),), FEEDS)
    assert rebuilt.bound_to is None and rebuilt.inputs[0].shape == ("batch", 4)


def test_the_plan_knows_the_modules_layers_and_what_can_go(tmp_path: Path) -> None:
    ir.save(graphs.residual_cnn(batchnorm=True), tmp_path / "m.onnx")
    spec = ModelSpec(source=f"onnx:{tmp_path / 'm.onnx'}", task="generic")
    graph = graphs.residual_cnn()
    feeds = {value.name or "": (tuple(int(d) for d in value.shape[1:]), "float32") for value in graph.graph.inputs}
    plain = model_facts(locate(spec, Path()), feeds)
    facts = rebuilt_facts(plain, locate(spec, Path()), feeds, coupling=True)
    assert facts.source == "onnx" and facts.rebuilt and facts.explain_no_module() == ""
    assert {layer.name for layer in facts.layers} == {layer.name for layer in plain.layers}
    assert facts.macs == plain.macs and facts.prunable and facts.structure
    assert facts.inputs == plain.inputs and facts.outputs == plain.outputs
    loaded = load_torch_model(locate(spec, Path()), feeds)
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


def test_what_stands_in_the_way_is_told(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"], name="fc"), helper.make_node("Det", ["h"], ["y"], name="d")]
    model = graphs.build(nodes, {"w": floats(3, 3)}, {"x": ("n", 3, 3)}, {"y": ("n",)})
    ir.save(model, tmp_path / "m.onnx")
    spec, feeds = ModelSpec(source=f"onnx:{tmp_path / 'm.onnx'}", task="generic"), {"x": ((3, 3), "float32")}
    why = "no torch module can be made of its graph: operators that have no form in torch here: 1 Det (d)"
    facts = rebuilt_facts(model_facts(locate(spec, Path()), feeds), locate(spec, Path()), feeds)
    assert not facts.rebuilt and facts.explain_no_module() == f"an onnx: source is none: {why}"
    with pytest.raises(SourceError, match=r"1 Det \(d\)"):
        load_torch_model(locate(spec, Path()), feeds)
