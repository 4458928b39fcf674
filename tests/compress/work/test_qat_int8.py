"""`qat` for W8A8: it ends in the graph that it trained, better than where int8 begins; resume; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from distilling import Arrays, Interrupted, broken_off, conv_net, images
from onnx import helper
from streaming import context

from compress.errors import PassError
from compress.export.onnx import export_float
from compress.formats.targets import TARGETS
from compress.graph import torch_graph
from compress.graph.edit import append, initializer
from compress.graph.layers import constant
from compress.graph.specs import input_specs, output_specs
from compress.graph.torch_graph import TorchGraph
from compress.models.load import TorchModel
from compress.passes import Int8
from compress.passes.qat import Qat
from compress.passes.training import Augmentation, LabelsTerm
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState
from compress.work import apply_pass
from compress.work.contexts import GraphContext
from compress.work.qat_int8 import apply_qat_int8, check_in_torch
from runtime.bundle.tensors import TensorSpec

pytestmark = pytest.mark.usefixtures("one_thread")


def separable() -> ir.Model:
    """x [N, 3, 8, 8] -> logits [N, 4]; a depthwise convolution whose channels differ sixty times in size."""
    random = np.random.default_rng(0)
    make, sizes = helper.make_node, np.logspace(-1.3, 0.5, 16).astype(np.float32)
    constants = {
        "stem.weight": random.normal(size=(16, 3, 3, 3)).astype(np.float32) / 5 * sizes[:, None, None, None],
        "depth.weight": random.normal(size=(16, 1, 3, 3)).astype(np.float32) / 3 / sizes[:, None, None, None],
        "point.weight": random.normal(size=(16, 16, 1, 1)).astype(np.float32) / 4,
        "fc.weight": random.normal(size=(16, 4)).astype(np.float32),
        **{f"{name}.bias": random.normal(0, 0.1, n).astype(np.float32) for name, n in (("depth", 16), ("fc", 4))},
    }
    nodes = [
        make("Conv", ["x", "stem.weight"], ["a"], pads=[1] * 4),
        make("Relu", ["a"], ["b"]),
        make("Conv", ["b", "depth.weight", "depth.bias"], ["c"], pads=[1] * 4, group=16),
        make("Relu", ["c"], ["d"]),
        make("Conv", ["d", "point.weight"], ["e"]),
        make("Add", ["e", "d"], ["f"]),
        make("GlobalAveragePool", ["f"], ["g"]),
        make("Flatten", ["g"], ["h"]),
        make("Gemm", ["h", "fc.weight", "fc.bias"], ["logits"]),
    ]
    return graphs.build(nodes, constants, {"x": ("n", 3, 8, 8)}, {"logits": ("n", 4)})


def mlp() -> ir.Model:
    """x [N, 3, 8, 8] -> logits [N, 4]; two layers on the mean colours."""
    random = np.random.default_rng(0)
    make = helper.make_node
    constants = {
        "one.weight": 4 * random.normal(size=(3, 16)).astype(np.float32),
        "one.bias": random.normal(size=16).astype(np.float32),
        "two.weight": random.normal(size=(16, 4)).astype(np.float32),
        "two.bias": random.normal(size=4).astype(np.float32),
    }
    nodes = [
        make("GlobalAveragePool", ["x"], ["mean"]),
        make("Flatten", ["mean"], ["flat"]),
        make("MatMul", ["flat", "one.weight"], ["product"]),
        make("Add", ["product", "one.bias"], ["hidden"]),
        make("Gelu", ["hidden"], ["active"]),
        make("Gemm", ["active", "two.weight", "two.bias"], ["logits"]),
    ]
    return graphs.build(nodes, constants, {"x": ("n", 3, 8, 8)}, {"logits": ("n", 4)})


def loaded_of(graph: ir.Model, task: str = "image-classification") -> TorchModel:
    """The graph as the torch model that it might have come from."""
    inputs, outputs = input_specs(graph), output_specs(graph)
    names = {spec.name: spec.name for spec in inputs}
    return TorchModel(
        architecture="Net", inputs=inputs, outputs=outputs, module=TorchGraph(graph, ()), parameters=names, task=task
    )


def pictures(n: int = 48, seed: int = 0) -> Arrays:
    found = images(n, seed)
    return Arrays({"x": found.columns["pixel_values"]}, found.labels)


def texts(n: int = 24, seed: int = 0) -> Arrays:
    return Arrays({"ids": np.random.default_rng(seed).integers(0, graphs.VOCABULARY, (n, graphs.LENGTH))})


def options(
    loaded: TorchModel, data: Arrays, work: Path | None = None, target: str = "onnxruntime-cpu"
) -> GraphContext:
    calibration = [data.feeds(np.arange(start, start + 8)) for start in (0, 8)]
    given = context(calibration, work, target=target)
    return GraphContext(**vars(given), train=data, teacher=lambda: loaded)


def config(**more: Any) -> Qat:
    return Qat(**{"scheme": "W8A8", "steps": 30, "batch_size": 16, "learning_rate": 5e-3, "held_out": 0.2} | more)


def error_on(
    state: GraphState, model: ir.Model, feeds: dict[str, np.ndarray], target: str = "onnxruntime-cpu"
) -> float:
    """Mean squared error of the written graph's outputs, whatever kernels sum, over the float ones' variance."""
    written = write_state(state, TARGETS[target].variant)
    (exact,), (found,) = graphs.run(model, [feeds]), graphs.run(written, [feeds], optimize=False)
    return float(np.square(found - exact).mean() / exact.var())


@pytest.mark.parametrize(
    ("model", "target"),
    [
        (graphs.residual_cnn(), "onnxruntime-cpu"),
        (graphs.residual_cnn(batchnorm=True), "tensorrt"),
        (separable(), "onnxruntime-cpu"),
        (mlp(), "tensorrt"),
    ],
)
@pytest.mark.slow
def test_training_ends_nearer_to_the_float_model_than_int8_does(model: ir.Model, target: str) -> None:
    """On images that neither calibration nor training saw; ranges begin far too wide, as one image was too bright."""
    data = pictures(64)
    context = options(loaded_of(model, "generic"), data, target=target)
    bright = data.columns["x"][:8] * np.linspace(1, 20, 8, dtype=np.float32)[:, None, None, None]
    context = replace(context, batches=[{"x": bright}])
    wanted = config(calibration="minmax", learning_rate=5e-2)
    result = apply_qat_int8(wanted, GraphState(model), context)
    int8 = apply_pass(Int8(calibration="minmax"), GraphState(model), context).model
    unseen = pictures(64, seed=9).columns
    assert error_on(result.model, model, unseen, target) < 0.9 * error_on(int8, model, unseen, target)
    assert result.model.integer == int8.integer and result.model.ranges.keys() == int8.ranges.keys()
    taken = [one for one in result.decisions if one.action == "int8"]
    assert {one.layer for one in taken} == set(int8.integer) and "W8A8, trained for" in taken[0].reason
    assert result.measured["qat"]["loss_after"] < result.measured["qat"]["loss_before"]
    assert all("sqnr_db" in result.measured[name] for name in int8.integer)


def test_a_transformer_is_trained_by_its_outputs() -> None:
    model, data = graphs.transformer(), texts()
    context = options(loaded_of(model, "feature-extraction"), data)
    result = apply_qat_int8(config(batch_size=8, steps=20, precision="bfloat16"), GraphState(model), context)
    assert "qat: trained with products in bfloat16; the graph's are those of integers" in [n.text for n in result.notes]
    assert result.model.placement == "inputs" and result.model.weight_only == ["embedding"]
    assert result.measured["qat"]["loss_after"] < 0.9 * result.measured["qat"]["loss_before"]


@pytest.mark.slow
def test_batch_norms_lie_in_the_convolutions_that_are_trained() -> None:
    """As the exporter leaves them: what is trained has no statistics that could drift."""
    net, data = conv_net(), images(48)
    names = {"pixel_values": "x"}
    inputs, outputs = (
        (TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),),
        (TensorSpec("logits", "float32", ("batch", 4)),),
    )
    loaded = TorchModel(
        architecture="Net", inputs=inputs, outputs=outputs, module=net, parameters=names, task="image-classification"
    )
    graph = GraphState(export_float(loaded, data.feeds(np.arange(2)), 20))
    assert "BatchNormalization" not in graphs.operators(graph.model)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = apply_qat_int8(config(steps=2, held_out=0.0), graph, options(loaded, data))
    assert not np.array_equal(values(result.model)["conv1.weight"], values(graph)["conv1.weight"])
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_a_graph_may_have_inputs_and_outputs_that_the_torch_module_has_not() -> None:
    """As a decoder's, its caches."""
    plain, model = graphs.one_layer(16, 8), graphs.one_layer(16, 8)
    past, fc = (
        ir.Value(name="past", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 8])),
        model.graph.outputs[0],
    )
    model.graph.inputs.append(past)
    present = append(model, "Add", [fc, past], "present")
    present.type, present.shape = fc.type, fc.shape
    model.graph.outputs.append(present)
    random = np.random.default_rng(0)
    data = Arrays({"x": random.normal(size=(32, 16)).astype(np.float32), "past": np.zeros((32, 8), np.float32)})
    context = options(loaded_of(plain, "generic"), data)
    result = apply_qat_int8(config(steps=2), GraphState(model), context)
    assert result.model.integer == ["fc"] and [value.name for value in result.model.model.graph.outputs] == [
        "y",
        "present",
    ]


@pytest.mark.slow
def test_what_is_left_open_is_found_from_where_rounding_begins() -> None:
    """By trials that leave the rounded graph as it was: a run that is given what they found ends in the same bytes."""
    model, data = separable(), pictures(64)
    context, left = options(loaded_of(model), data), {"learning_rate": "auto", "ema_decay": "auto", "augment": "auto"}
    found = apply_qat_int8(config(steps=120, **left), GraphState(model), context)
    assert found.settled["learning_rate"] > 5e-4 and found.settled["ema_decay"] == pytest.approx(1 - 20 / 120, abs=1e-5)
    assert any("found by 3 trials of 4 to 6 steps" in note.text for note in found.notes)
    given = apply_qat_int8(config(steps=120, **found.settled), GraphState(model), context)
    same(given.model, found.model)
    assert given.measured["qat"]["loss_after"] < given.measured["qat"]["loss_before"]


def test_labels_alone_teach_too() -> None:
    model = separable()
    context = options(loaded_of(model), pictures(64))
    result = apply_qat_int8(config(labels=LabelsTerm()), GraphState(model), context)
    assert result.measured["qat"]["loss_after"] < result.measured["qat"]["loss_before"] - 0.01
    start = apply_pass(Int8(bias_correction=False), GraphState(model), context).model
    grown = [span.high / max(start.ranges[name].high, 1e-9) for name, span in result.model.ranges.items()]
    assert max(abs(ratio - 1) for ratio in grown) > 1e-4


def test_zeros_stay() -> None:
    model = graphs.residual_cnn()
    weight = constant(model.graph.initializers["one.conv2.weight"]).copy()
    weight[:, ::2] = 0.0
    initializer(model, "one.conv2.weight", weight)
    context = options(loaded_of(model), pictures())
    kept = apply_qat_int8(config(steps=2, held_out=0.0), GraphState(model), context).model
    assert not kept.weights["one.conv2"].values[:, ::2].any()


@pytest.mark.slow
@pytest.mark.usefixtures("saved_after_every_step")
def test_a_broken_off_run_ends_in_the_same_bytes(tmp_path: Path) -> None:
    model = graphs.residual_cnn()
    context = options(loaded_of(model), pictures())
    wanted = config(steps=10, augment=Augmentation(crop=1), held_out=0.0)
    whole = apply_qat_int8(wanted, GraphState(model), context)
    context = replace(context, work=tmp_path, progress=broken_off(2, 7))
    for _ in range(2):
        with pytest.raises(Interrupted):
            apply_qat_int8(wanted, GraphState(model), context)
    again = apply_qat_int8(wanted, GraphState(model), context)
    same(whole.model, again.model)
    assert whole.measured["qat: training loss"] == again.measured["qat: training loss"]


def same(one: GraphState, other: GraphState) -> None:
    assert one.record() == other.record()
    for found, expected in ((one.arrays(), other.arrays()), (values(one), values(other))):
        assert found.keys() == expected.keys()
        assert all(np.array_equal(array, expected[name]) for name, array in found.items())


def values(state: GraphState) -> dict[str, np.ndarray]:
    return {name: constant(value) for name, value in state.model.graph.initializers.items()}


def test_refusals() -> None:
    model = graphs.residual_cnn()
    context = options(loaded_of(model), pictures())
    with pytest.raises(PassError, match=r"qat: there is no training set; give the recipe data\.train"):
        apply_qat_int8(config(), GraphState(model), replace(context, train=None))
    with pytest.raises(PassError, match="qat: there is no torch model to train: an onnx: source has none; use int8"):
        apply_qat_int8(config(), GraphState(model), replace(context, teacher=None))


def test_a_graph_that_torch_cannot_train_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, feeds = GraphState(graphs.residual_cnn()), graphs.images(1)[0]
    check_in_torch(graph, feeds)
    with monkeypatch.context() as patch:
        patch.delitem(torch_graph.OPERATORS, "GlobalAveragePool")
        with pytest.raises(
            PassError, match=r"qat: the graph cannot be trained .* 1 GlobalAveragePool .* use int8, which"
        ):
            check_in_torch(graph, feeds)
    monkeypatch.setitem(torch_graph.OPERATORS, "Relu", lambda node: lambda x: x)
    with pytest.raises(PassError, match="torch computes the exported graph otherwise than ONNX Runtime does"):
        check_in_torch(graph, feeds)


def test_where_nothing_is_better_the_start_is_kept() -> None:
    model = graphs.residual_cnn()
    context = options(loaded_of(model), pictures())
    result = apply_qat_int8(config(steps=3, learning_rate=50.0), GraphState(model), context)
    start = apply_pass(Int8(bias_correction=False), GraphState(model), context).model
    assert (result.notes[-1].level, "nothing was better than the start" in result.notes[-1].text) == ("warning", True)
    for name, weight in start.weights.items():
        np.testing.assert_array_equal(result.model.weights[name].values, weight.values)
        np.testing.assert_array_equal(result.model.weights[name].scales, weight.scales)
    for name, span in result.model.ranges.items():
        assert (span.low, span.high) == pytest.approx((start.ranges[name].low, start.ranges[name].high))
