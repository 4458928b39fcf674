"""Parity: an exported graph that is not the model is refused, by the name of the first layer that differs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from graphs import build
from onnx import helper

from compress.errors import ExportError
from compress.export.onnx import export_float
from compress.export.parity import check_parity
from compress.graph.layers import find_layers
from compress.graph.run import clone, open_session
from compress.models.batch_axis import TOLERANCE
from compress.models.load import TorchModel, load_model
from compress.models.source import locate
from compress.rounding.measure import relative_difference
from compress.specs import ModelSpec
from compress.zoo.digits_resnet import DIGITS
from runtime.bundle.tensors import TensorSpec

SPEC = ModelSpec(
    source="python:compress.zoo.digits_resnet:digits_resnet",
    weights=str(DIGITS / "digits_resnet.safetensors"),
    task="image-classification",
)
BATCHES = [{"pixel_values": np.random.default_rng(n).normal(size=(n, 1, 8, 8)).astype(np.float32)} for n in (2, 5, 1)]


@pytest.fixture(scope="module")
def exported() -> tuple[TorchModel, ir.Model]:
    loaded = load_model(locate(SPEC, DIGITS), {"pixel_values": ((1, 8, 8), "float32")})
    return loaded, export_float(loaded, BATCHES[0], 20)


@pytest.mark.slow
def test_the_export_is_the_model(exported: tuple[TorchModel, ir.Model]) -> None:
    assert 0 <= check_parity(*exported, BATCHES) < TOLERANCE / 5


@pytest.mark.parametrize("name", ["conv1", "layer2.conv1", "linear"])
def test_the_layer_that_differs_is_named(exported: tuple[TorchModel, ir.Model], name: str) -> None:
    loaded, graph = exported[0], clone(exported[1])
    layer = next(layer for layer in find_layers(graph) if layer.name == name)
    wrong = layer.weight.const_value.numpy() * np.float32(1.01)  # type: ignore[union-attr]
    layer.weight.const_value = ir.tensor(wrong)
    with pytest.raises(ExportError, match=rf"torch and ONNX differ by .*; the first layer to differ is {name} \("):
        check_parity(loaded, graph, BATCHES)


def test_a_difference_outside_the_layers_is_said_to_be_there(exported: tuple[TorchModel, ir.Model]) -> None:
    loaded, graph = exported[0], clone(exported[1])
    (output,) = graph.graph.outputs
    doubled = ir.node("Add", [output, output])
    graph.graph.append(doubled)
    doubled.outputs[0].name, output.name = output.name, "inner"
    doubled.outputs[0].shape, doubled.outputs[0].type = output.shape, output.type
    graph.graph.outputs[0] = doubled.outputs[0]
    with pytest.raises(ExportError, match="every layer with a weight agrees"):
        check_parity(loaded, graph, BATCHES)


def test_free_sizes_may_be_called_anything() -> None:
    specs = (TensorSpec("x", "float32", ("batch", "height/8")),)
    relu = {"module": torch.nn.ReLU().eval(), "parameters": {"x": "input"}, "architecture": "Relu"}
    outputs = (TensorSpec("y", "float32", ("batch", "height/8")),)
    model = TorchModel(inputs=specs, outputs=outputs, **relu)  # type: ignore[arg-type]
    graph = export_float(model, {"x": np.ones((2, 3), np.float32)}, 20)
    assert open_session(graph).run(None, {"x": -np.ones((5, 7), np.float32)})[0].shape == (5, 7)


def test_outputs_of_another_shape(exported: tuple[TorchModel, ir.Model]) -> None:
    node = helper.make_node("Flatten", ["pixel_values"], ["logits"])
    graph = build([node], {}, {"pixel_values": ("n", 1, 8, 8)}, {"logits": ("n", 64)})
    with pytest.raises(ExportError, match=r"output 'logits' has shape \(2, 64\), torch gives \(2, 10\)"):
        check_parity(exported[0], graph, BATCHES[:1])


def test_relative_difference() -> None:
    expected = np.array([1.0, -4.0, 2.0], np.float32)
    assert relative_difference(expected, expected) == 0
    assert relative_difference(expected, expected + np.float32(0.5)) == 0.125
    assert relative_difference(np.zeros(3), np.zeros(3)) == 0
    assert relative_difference(np.array([True, False]), np.array([True, True])) == 1
    assert relative_difference(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_side_only_differs(bad: float) -> None:
    whole, broken = np.array([1.0, 2.0]), np.array([1.0, bad])
    assert relative_difference(whole, broken) == relative_difference(broken, whole) == float("inf")
    assert relative_difference(broken, broken) == 0
