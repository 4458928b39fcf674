"""Torch modules rebuilt from ONNX graphs: equal outputs, torch's own layers, what can be pruned, what is refused."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

import graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper
from onnx_ir.passes.common import IdentityEliminationPass
from torch import Tensor, nn

from compress.graph.cleanup import clean_graph
from compress.graph.edit import normalize
from compress.graph.layers import find_layers
from compress.graph.node_functions import Followed, follow_input
from compress.graph.rebuild import RebuildError, Rebuilt, rebuild
from compress.graph.run import Feeds, open_session
from compress.pruning.coupling import find_coupling
from compress.pruning.surgery import differs_from_masked

RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


class Depthwise(nn.Module):
    """As MobileNets are made: batch norms, ReLU6, depthwise kernels, a width that a reshape holds."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(self.step(3, 8), self.step(8, 8, groups=8), self.step(8, 16, 1))
        self.residual, self.head = self.step(16, 16, 1), nn.Linear(16, 5)
        for norm in (part for part in self.modules() if isinstance(part, nn.BatchNorm2d)):
            norm.running_mean, norm.running_var = torch.randn(norm.num_features), torch.rand(norm.num_features) + 0.5

    @staticmethod
    def step(into: int, out: int, kernel: int = 3, groups: int = 1) -> nn.Sequential:
        conv = nn.Conv2d(into, out, kernel, padding=kernel // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU6())

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.features(image)
        hidden = nn.functional.adaptive_avg_pool2d(hidden + self.residual(hidden), 1)
        return self.head(hidden.view(-1, 16))


def export_old(module: nn.Module, inputs: Sequence[Tensor], names: list[str], axes: Any, opset: int) -> ir.Model:
    """Export as torch did for years; an older opset is cleaned, which folds its batch norms."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs),
            file,
            input_names=names,
            output_names=["out"],
            dynamic_axes=axes,
            opset_version=opset,
            dynamo=False,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
        )
    model = ir.from_proto(onnx.load_model_from_string(file.getvalue()))
    if opset < 17:
        clean_graph(model)
    else:
        normalize(model)
        IdentityEliminationPass()(model)
    return model


def depthwise(batch: int | None = None, opset: int = 17) -> ir.Model:
    torch.manual_seed(0)
    axes = None if batch else {"image": {0: "n"}}
    return export_old(Depthwise(), [torch.randn(batch or 2, 3, 8, 8)], ["image"], axes, opset)


def of_shapes(model: ir.Model, **shapes: Sequence[int]) -> Rebuilt:
    kinds = {value.name: value.dtype for value in model.graph.inputs}
    integer = {name: kind is not None and kind.is_integer() for name, kind in kinds.items()}
    return rebuild(model, {n: (tuple(s), torch.int64 if integer[n] else torch.float32) for n, s in shapes.items()})


def assert_same(model: ir.Model, rebuilt: Rebuilt, feeds: Feeds) -> None:
    """Torch and ONNX Runtime give the same to 1e-5 of the largest output."""
    expected = dict(zip([v.name for v in model.graph.outputs], open_session(model).run(None, feeds), strict=True))
    with torch.no_grad():
        given = rebuilt.module(**{rebuilt.parameters[name]: torch.from_numpy(x) for name, x in feeds.items()})
    assert given.keys() == expected.keys()
    for name, values in expected.items():
        assert given[name].shape == values.shape
        np.testing.assert_allclose(given[name].numpy(), values, atol=1e-5 * np.abs(values).max(), rtol=0)


def build(nodes: Sequence[Any], constants: dict[str, np.ndarray], x: Sequence[Any], y: Sequence[Any]) -> ir.Model:
    return graphs.build(nodes, constants, {"x": tuple(x)}, {"y": tuple(y)})


def test_layers_and_norms_are_torchs_own_under_the_names_of_the_graph() -> None:
    model = depthwise()
    rebuilt = of_shapes(model, image=(61, 3, 8, 8))
    assert_same(model, rebuilt, {"image": floats(3, 3, 8, 8)})
    parts = dict(rebuilt.module.named_modules())
    assert all(isinstance(parts[layer.name], nn.Conv2d | nn.Linear) for layer in find_layers(model))
    assert isinstance(parts["features.1.1"], nn.BatchNorm2d)
    assert parts["features.1.0"].groups == 8  # type: ignore[union-attr]


@pytest.mark.slow
def test_it_is_exported_with_the_same_layers() -> None:
    from compress.export.onnx import export_program

    model = depthwise()
    rebuilt, image = of_shapes(model, image=(61, 3, 8, 8)), floats(3, 3, 8, 8)
    batch = {"image": {0: torch.export.Dim("batch")}}
    again = export_program(rebuilt.module, "it", {"image": torch.from_numpy(image)}, ["image"], ["out"], batch, 20)
    assert [layer.name for layer in find_layers(again)] == [layer.name for layer in find_layers(model)]
    assert "Clip" in {node.op_type for node in again.graph}  # ReLU6 is one operator, which fuses
    one = image[:1]
    first, second = (open_session(graph).run(None, {"image": one})[0] for graph in (model, again))
    np.testing.assert_allclose(first, second, atol=1e-5)


def test_channels_can_go_although_a_reshape_holds_their_number() -> None:
    rebuilt = of_shapes(depthwise(), image=(61, 3, 8, 8))
    sample = {"image": torch.from_numpy(floats(2, 3, 8, 8))}
    dimensions = {d.name: d for d in find_coupling(rebuilt.module, sample).dimensions}
    assert {name: d.n_units for name, d in dimensions.items()} == {"features.0.0": 8, "features.2.0": 16}
    last = dimensions["features.2.0"]
    assert differs_from_masked(rebuilt.module, last, np.array([3, 5]), sample) < 1e-5
    assert rebuilt.module.get_submodule("head").weight.shape == (5, 14)


def test_it_learns() -> None:
    rebuilt = of_shapes(depthwise(), image=(61, 3, 8, 8))
    module = rebuilt.module.train().requires_grad_(True)
    norm = module.get_submodule("features.0.1")
    before = norm.running_mean.clone()
    module(image=torch.from_numpy(floats(4, 3, 8, 8)))["out"].square().sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert not torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("opset", [9, 13])
def test_a_batch_that_the_file_fixes_is_the_inputs(opset: int) -> None:
    model = depthwise(batch=1, opset=opset)
    rebuilt = of_shapes(model, image=(1, 3, 8, 8))
    images = floats(4, 3, 8, 8)
    assert_same(model, rebuilt, {"image": images[:1]})
    together = rebuilt.module(image=torch.from_numpy(images))["out"]
    alone = torch.cat([rebuilt.module(image=torch.from_numpy(images[i : i + 1]))["out"] for i in range(4)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=24,
        vocab_size=50,
        max_position_embeddings=32,
        return_dict=False,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


@pytest.mark.slow
def test_an_encoder_takes_texts_of_any_length_and_loses_heads() -> None:
    """Of opset 14: norms and GELU in pieces, shapes computed, equal vectors merged."""
    names, axes = ["input_ids", "attention_mask"], {0: "batch", 1: "sequence"}
    ids = torch.from_numpy(RANDOM.integers(0, 50, (2, 9)))
    model = export_old(tiny_bert(), [ids, torch.ones_like(ids)], names, dict.fromkeys(names, axes), 14)
    rebuilt = of_shapes(model, input_ids=(61, 7), attention_mask=(61, 7))
    for shape in ((1, 5), (3, 11)):
        mask = np.ones(shape, np.int64)
        mask[0, 3:] = 0
        assert_same(model, rebuilt, {"input_ids": RANDOM.integers(0, 50, shape), "attention_mask": mask})
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    dimensions = {d.kind: d for d in find_coupling(rebuilt.module, feeds).dimensions}
    assert dimensions["heads"].n_units == 4 and dimensions["width"].n_units == 16
    assert differs_from_masked(rebuilt.module, dimensions["heads"], np.array([1]), feeds) < 1e-5


@pytest.mark.parametrize(
    ("shape", "out", "written", "rules"),
    [
        ((61, 16, 1, 1), (61, 16), (-1, 16), [(0, (0,)), (1, (1, 2, 3))]),
        ((61, 7, 16), (61, 7, 4, 4), (0, 0, 4, 4), [(2, (2,))]),  # heads, not what is in a head
        ((61, 7, 4, 4), (61, 7, 16), (0, 0, 16), [(2, (2, 3))]),
        ((1, 12, 3, 5), (1, 45, 4), (1, -1, 4), [(0, (0,)), (1, (1, 2, 3))]),
        ((6, 4), (3, 8), (5, 8), []),  # runs over: nothing to follow
    ],
)
def test_what_a_reshape_takes_from_its_input(
    shape: tuple[int, ...], out: tuple[int, ...], written: tuple[int, ...], rules: list[Any]
) -> None:
    found = follow_input(shape, out, written, [True] * len(out))
    if rules:
        assert [(rule.axis, rule.axes) for rule in found] == rules
    for rule in found:
        assert isinstance(rule, Followed)
        rest = int(np.prod([out[k] for k in rule.others]))
        assert np.prod([shape[i] for i in rule.axes]) == out[rule.axis] * rest


def test_a_layer_that_is_called_twice_is_one_module_and_vectors_are_each_their_own() -> None:
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "w", "b"], ["a"], name="one", kernel_shape=[1, 1]),
        make("Conv", ["a", "w", "b"], ["c"], name="two", kernel_shape=[1, 1]),
        make("Conv", ["c", "v", "b"], ["y"], name="three", kernel_shape=[1, 1]),
    ]
    constants = {"w": floats(4, 4, 1, 1), "v": floats(4, 4, 1, 1), "b": np.zeros(4, np.float32)}
    model = build(nodes, constants, ("n", 4, 2, 2), ("n", 4, 2, 2))
    rebuilt = of_shapes(model, x=(61, 4, 2, 2))
    assert_same(model, rebuilt, {"x": floats(2, 4, 2, 2)})
    assert len([part for part in rebuilt.module.modules() if isinstance(part, nn.Conv2d)]) == 2
    biases = [parameter for name, parameter in rebuilt.module.named_parameters() if name.endswith("bias")]
    assert len({id(bias) for bias in biases}) == 2


def test_names_that_python_has_not_are_kept_by_layers_and_changed_for_inputs() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="/body/0/MatMul")]
    model = build(nodes, {"w": floats(3, 4)}, ("n", 3), ("n", 4))
    model.graph.inputs[0].name, model.graph.outputs[0].name = "input.1", "class"
    rebuilt = of_shapes(model, **{"input.1": (61, 3)})
    assert rebuilt.parameters == {"input.1": "input_1"}
    assert isinstance(rebuilt.module.get_submodule("/body/0/MatMul"), nn.Linear)
    assert_same(model, rebuilt, {"input.1": floats(2, 3)})


def test_a_detectors_head_comes_out_the_same() -> None:
    """Upsampled, joined, padded as TensorFlow does, transposed convolution, decoded with constants of the batch."""
    make = helper.make_node
    nodes = [
        make("Conv", ["x", "w"], ["a"], auto_pad="SAME_UPPER", strides=[2, 2]),
        make("PRelu", ["a", "slope"], ["b"]),
        make("Resize", ["b", "", "scales"], ["up"], coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
        make("ConvTranspose", ["b", "t"], ["more"], strides=[2, 2]),
        make("Concat", ["up", "more"], ["joined"], axis=1),
        make("Transpose", ["joined"], ["last"], perm=[0, 2, 3, 1]),
        make("Reshape", ["last", "flat"], ["boxes"]),
        make("Slice", ["boxes", "from", "to", "axes"], ["part"]),
        make("Exp", ["part"], ["size"]),
        make("Mul", ["size", "priors"], ["y"]),
    ]
    constants = {
        "w": floats(4, 3, 3, 3),
        "slope": floats(4, 1, 1),
        "scales": np.array([1, 1, 2, 2], np.float32),
        "t": floats(4, 4, 2, 2),
        "flat": np.array([1, -1, 4], np.int64),
        "from": np.array([2], np.int64),
        "to": np.array([2**63 - 1], np.int64),
        "axes": np.array([2], np.int64),
        "priors": floats(1, 128, 2),
    }
    model = build(nodes, constants, (1, 3, 8, 8), (1, 128, 2))
    rebuilt = of_shapes(model, x=(1, 3, 8, 8))
    assert_same(model, rebuilt, {"x": floats(1, 3, 8, 8)})
    assert rebuilt.module(x=torch.randn(5, 3, 8, 8))["y"].shape == (5, 128, 2)


def test_what_is_unknown_is_counted_and_named() -> None:
    make = helper.make_node
    nodes = [
        *(make("Det", ["x"], [f"d{i}"], name=f"det{i}") for i in range(4)),
        make("Attention", ["x"], ["a"], name="fused", domain="com.microsoft"),
        make("Relu", ["x"], ["y"]),
    ]
    model = build(nodes, {}, (2, 2), (2, 2))
    text = r"no form in torch here: 4 Det \(det0, det1, det2, and 1 more\), 1 com.microsoft.Attention \(fused\)"
    with pytest.raises(RebuildError, match=text):
        of_shapes(model, x=(2, 2))


def test_halves_sizes_that_depend_on_data_and_odd_forms_are_refused_by_name() -> None:
    make = helper.make_node
    half = build([make("MatMul", ["x", "w"], ["y"])], {"w": floats(2, 2)}, ("n", 2), ("n", 2))
    half.graph.initializers["w"].const_value = ir.tensor(floats(2, 2).astype(np.float16), name="w")
    half.graph.initializers["w"].dtype = ir.DataType.FLOAT16
    with pytest.raises(RebuildError, match="1 weights of FLOAT16, where FLOAT is needed"):
        of_shapes(half, x=(61, 2))
    cast = [make("Cast", ["x"], ["s"], to=7), make("Reshape", ["table", "s"], ["y"], name="by_data")]
    table = {"table": floats(4, 4)}
    with pytest.raises(RebuildError, match="Reshape 'by_data': its sizes depend on data"):
        of_shapes(build(cast, table, (2,), (4, 4)), x=(2,))
    odd = [make("Pad", ["x", "pads"], ["y"], name="around", mode="wrap")]
    with pytest.raises(RebuildError, match="Pad 'around' with mode wrap has no form in torch here"):
        of_shapes(build(odd, {"pads": np.array([0, 1, 0, 1], np.int64)}, (2, 2), (2, 4)), x=(2, 2))


def test_a_range_of_broken_numbers_goes_up_to_a_size() -> None:
    make = helper.make_node
    nodes = [
        make("Shape", ["x"], ["sizes"], start=1),
        make("Cast", ["sizes"], ["row"], to=1),
        make("Squeeze", ["row"], ["count"]),
        make("Mul", ["count", "half"], ["end"]),
        make("Range", ["zero", "end", "half"], ["places"]),
        make("MatMul", ["x", "places"], ["y"]),
    ]
    model = build(nodes, {"zero": np.array(0, np.float32), "half": np.array(0.5, np.float32)}, ("n", "m"), ("n",))
    assert_same(model, of_shapes(model, x=(61, 7)), {"x": floats(2, 9)})


def test_names_that_all_modules_have_are_free_for_layers() -> None:
    nodes = [helper.make_node("MatMul", ["x", "train.fc.weight"], ["y"])]
    model = build(nodes, {"train.fc.weight": floats(3, 4)}, ("n", 3), ("n", 4))
    assert_same(model, of_shapes(model, x=(61, 3)), {"x": floats(2, 3)})


def test_a_product_that_is_an_output_is_given_without_the_bias_behind_it() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Add", ["product", "b"], ["y"])]
    model = graphs.build(
        nodes, {"w": floats(3, 4), "b": floats(4)}, {"x": ("n", 3)}, {"product": ("n", 4), "y": ("n", 4)}
    )
    assert_same(model, of_shapes(model, x=(61, 3)), {"x": floats(2, 3)})


def test_constants_that_no_layer_holds_are_kept_and_saved() -> None:
    node, shape = helper.make_node("Mul", ["x", "gain.1"], ["y"]), ("n", 3, 2)
    model = build([node], {"gain.1": floats(1, 3, 1)}, shape, shape)
    rebuilt = of_shapes(model, x=(61, 3, 2))
    assert_same(model, rebuilt, {"x": floats(2, 3, 2)})
    assert list(rebuilt.module.state_dict()) == ["gain_1"]
