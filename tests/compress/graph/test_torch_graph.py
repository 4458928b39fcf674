"""ONNX graphs run in torch: every operator as ONNX Runtime computes it, gradients, what is trained, what is refused."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from compress.graph.run import Feeds, open_session
from compress.graph.torch_graph import OPERATORS, TorchGraph, check_operators, trainable

RANDOM = np.random.default_rng(0)


def floats(*shape: int, low: float = -2.0) -> np.ndarray:
    return RANDOM.uniform(low, 2, shape).astype(np.float32)


def whole(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


IMAGE, LINE, SERIES, MATRIX = floats(2, 4, 7, 7), floats(2, 4, 9), floats(2, 3, 5), floats(4, 6)
SCALES = np.array([1, 1, 2, 3], np.float32)
POSITIVE, NUMBERS = floats(2, 3, low=0.1), RANDOM.integers(-9, 9, (3, 4))
CASES: list[tuple[str, list[np.ndarray | None], dict[str, Any]]] = [
    *((op, [MATRIX], {}) for op in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "HardSwish", "IsNaN", "Mish", "Neg")),
    *((op, [MATRIX], {}) for op in ("Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Tanh", "Elu", "LeakyRelu")),
    *((op, [MATRIX], {}) for op in ("Celu", "Softsign", "Tan")),
    *((op, [MATRIX, floats(6), floats(4, 1)], {}) for op in ("Mean", "Sum")),
    *(("Mod", [MATRIX, floats(6, low=0.5)], {"fmod": 1}), ("Mod", [NUMBERS, np.full((), 4)], {})),
    ("ArgMax", [MATRIX], {"axis": 1, "keepdims": 0}),
    *((op, [POSITIVE], {}) for op in ("Log", "Reciprocal", "Sqrt")),
    *((op, [MATRIX, floats(6)], {}) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu")),
    *((op, [MATRIX, MATRIX.round()], {}) for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    *((op, [MATRIX > 0, floats(4, 6) > 0], {}) for op in ("And", "Or", "Xor")),
    ("Not", [MATRIX > 0], {}),
    ("Div", [NUMBERS, np.full((), 4)], {}),
    ("Pow", [POSITIVE, np.array(1.5, np.float32)], {}),
    ("Where", [MATRIX > 0, MATRIX, floats(6)], {}),
    ("Clip", [MATRIX, np.float32(-0.5), None], {}),
    ("Clip", [MATRIX, None, np.float32(0.5)], {}),
    ("Gelu", [MATRIX], {}),
    ("Gelu", [MATRIX], {"approximate": "tanh"}),
    ("HardSigmoid", [MATRIX], {"alpha": 1 / 6}),
    ("MatMul", [floats(2, 3, 4), floats(4, 5)], {}),
    ("Gemm", [floats(3, 4), floats(5, 3), floats(5)], {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}),
    ("Einsum", [floats(2, 3), floats(3, 4)], {"equation": "ij,jk->ik"}),
    ("Conv", [IMAGE, floats(6, 2, 3, 3), floats(6)], {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    ("Conv", [IMAGE, floats(6, 4, 3, 3)], {"dilations": [2, 2], "pads": [0, 1, 2, 1]}),
    ("Conv", [LINE, floats(5, 4, 3)], {"pads": [1, 1]}),
    ("ConvTranspose", [IMAGE, floats(4, 2, 3, 3), floats(2)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("MaxPool", [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ("ConvTranspose", [IMAGE, floats(4, 2, 3, 3)], {"strides": [2, 2], "pads": [0, 1, 1, 0]}),
    *(
        ("Conv", [IMAGE, floats(6, 4, 4, 3)], {"auto_pad": how, "strides": [2, 1]})
        for how in ("SAME_UPPER", "SAME_LOWER")
    ),
    ("MaxPool", [IMAGE], {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}),
    ("MaxPool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "count_include_pad": 1, "pads": [0, 0, 1, 1]}),
    ("AveragePool", [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ("AveragePool", [IMAGE], {"kernel_shape": [2, 2], "count_include_pad": 1, "pads": [1, 1, 1, 1]}),
    *((op, [IMAGE], {}) for op in ("GlobalAveragePool", "GlobalMaxPool")),
    ("LRN", [IMAGE], {"size": 3, "alpha": 0.5}),
    ("LpNormalization", [SERIES], {"axis": 1, "p": 1}),
    *(("DepthToSpace", [IMAGE], {"blocksize": 2, "mode": mode}) for mode in ("DCR", "CRD")),
    ("SpaceToDepth", [floats(2, 3, 4, 6)], {"blocksize": 2}),
    ("Resize", [IMAGE, None, SCALES], {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
    ("Resize", [IMAGE, None, SCALES], {}),
    ("Resize", [IMAGE, None, None, whole(2, 4, 5, 9)], {"mode": "linear"}),
    ("Resize", [IMAGE, None, SCALES], {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("Resize", [IMAGE, None, None, whole(2, 4, 14, 21)], {"mode": "cubic"}),
    ("BatchNormalization", [IMAGE, floats(4), floats(4), floats(4), floats(4, low=0.5)], {"epsilon": 1e-3}),
    ("LayerNormalization", [SERIES, floats(5), floats(5)], {"epsilon": 1e-3}),
    ("LayerNormalization", [SERIES, floats(3, 5)], {"axis": 1}),
    ("InstanceNormalization", [IMAGE, floats(4), floats(4)], {}),
    ("GroupNormalization", [IMAGE, floats(2), floats(2)], {"num_groups": 2}),
    ("Softmax", [SERIES], {"axis": 1}),
    ("LogSoftmax", [SERIES], {}),
    *((op, [SERIES, whole(-1)], {"keepdims": 0}) for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin")),
    *((op, [SERIES, whole(0, 2)], {}) for op in ("ReduceL1", "ReduceL2", "ReduceSumSquare")),
    ("ReduceSum", [SERIES], {}),
    ("ReduceMean", [SERIES, whole()], {"noop_with_empty_axes": 1}),
    ("Reshape", [SERIES, whole(0, -1)], {}),
    ("Flatten", [IMAGE], {"axis": 2}),
    ("Transpose", [SERIES], {"perm": [2, 0, 1]}),
    ("Transpose", [SERIES], {}),
    ("Squeeze", [floats(1, 3, 1)], {}),
    ("Squeeze", [floats(1, 3, 1), whole(-1)], {}),
    ("Unsqueeze", [MATRIX, whole(-1, 0)], {}),
    ("Concat", [MATRIX, floats(2, 6)], {"axis": 0}),
    ("Slice", [SERIES, whole(1), whole(2**63 - 1), whole(2), whole(2)], {}),
    ("Slice", [SERIES, whole(-1, 0), whole(-9, 2), whole(2, 1), whole(-1, 1)], {}),
    ("Slice", [SERIES, whole(0), whole(1)], {}),
    ("Pad", [IMAGE, whole(0, 1, 0, 0, 0, 2, 0, 1), np.float32(3.0)], {}),
    ("Pad", [IMAGE, whole(1, 2, 1, 0), None, whole(2, 3)], {"mode": "reflect"}),
    ("Pad", [IMAGE, whole(0, 0, 2, 1, 0, 0, 1, 1)], {"mode": "edge"}),
    ("Expand", [floats(3, 1), whole(2, 1, 4)], {}),
    ("Tile", [MATRIX, whole(2, 1)], {}),
    ("Gather", [MATRIX, np.array([[0, -1], [2, 1]])], {"axis": 0}),
    ("Gather", [SERIES, np.array(1)], {"axis": 2}),
    ("GatherElements", [MATRIX, np.array([[0, -1], [2, 1]])], {"axis": 1}),
    ("GatherND", [SERIES, np.array([[0, 1], [1, 2]])], {}),
    ("GatherND", [SERIES, np.array([[[0]], [[2]]])], {"batch_dims": 1}),
    ("Shape", [SERIES], {"start": 1}),
    ("Shape", [SERIES], {"end": -1}),
    ("Size", [SERIES], {}),
    ("Range", [np.array(1), np.array(9), np.array(3)], {}),
    ("ConstantOfShape", [whole(2, 3)], {"value": numpy_helper.from_array(np.array([7], np.int64))}),
    ("CumSum", [NUMBERS, np.array(1)], {}),
    ("Trilu", [MATRIX, np.array(1)], {"upper": 0}),
    ("Cast", [MATRIX], {"to": TensorProto.INT64}),
    ("CastLike", [NUMBERS, MATRIX], {}),
    ("Identity", [MATRIX], {}),
    ("Dropout", [MATRIX], {}),
]


def single(op: str, inputs: list[np.ndarray | None], attributes: dict[str, Any], outputs: int = 1) -> ir.Model:
    """One node. Float inputs are the graph's, others constants."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    given = {name: np.asarray(x) for name, x in zip(names, inputs, strict=True) if x is not None}
    made = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op, names, made, name="node", **attributes)],
        "single",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in given.items()],
        [helper.make_empty_tensor_value_info(name) for name in made],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def feeds_of(inputs: list[np.ndarray | None]) -> Feeds:
    return {f"x{i}": np.asarray(x) for i, x in enumerate(inputs) if x is not None}


def in_torch(model: ir.Model, feeds: Feeds) -> list[np.ndarray]:
    found = TorchGraph(model, trainable(model))(**{name: torch.from_numpy(x) for name, x in feeds.items()})
    return [value.detach().numpy() for value in found.values()]


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_an_operator_is_what_onnx_runtime_computes(
    op: str, inputs: list[np.ndarray | None], attributes: dict[str, Any]
) -> None:
    model, feeds = single(op, inputs, attributes), feeds_of(inputs)
    (expected,) = open_session(model, 1).run(None, feeds)
    (found,) = in_torch(model, feeds)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("sizes", [None, whole(1, 2, 3)])
def test_a_split_gives_all_its_parts(sizes: np.ndarray | None) -> None:
    inputs = [MATRIX] if sizes is None else [MATRIX, sizes]
    attributes = {"axis": 1, "num_outputs": 3} if sizes is None else {"axis": 1}
    model, feeds = single("Split", inputs, attributes, 3), feeds_of(inputs)
    expected = open_session(model, 1).run(None, feeds)
    for one, other in zip(expected, in_torch(model, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("largest", [0, 1])
def test_the_largest_come_with_their_places(largest: int) -> None:
    model, feeds = single("TopK", [SERIES, whole(2)], {"axis": 1, "largest": largest}, 2), feeds_of([SERIES, whole(2)])
    for one, other in zip(open_session(model, 1).run(None, feeds), in_torch(model, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_root_mean_square_norm_is_its_definition() -> None:  # of opset 23, which ONNX Runtime may not have
    gain = floats(5)
    (found,) = in_torch(single("RMSNormalization", [SERIES, gain], {"epsilon": 1e-3}), feeds_of([SERIES, gain]))
    expected = SERIES / np.sqrt((SERIES**2).mean(-1, keepdims=True) + 1e-3) * gain
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


def test_every_operator_is_tried() -> None:
    assert set(OPERATORS) == {op for op, _, _ in CASES} | {"Split", "Constant", "TopK", "RMSNormalization"}


@pytest.mark.parametrize(
    ("model", "feeds"), [(graphs.residual_cnn(), graphs.images(1)), (graphs.transformer(), graphs.tokens(1))]
)
def test_a_graph_is_what_onnx_runtime_computes(model: ir.Model, feeds: list[Feeds]) -> None:
    np.testing.assert_allclose(in_torch(model, feeds[0])[0], graphs.run(model, feeds)[0], rtol=1e-4, atol=1e-5)


def test_layers_and_norms_are_trained_and_nothing_else() -> None:
    model = graphs.residual_cnn(batchnorm=True)
    names = trainable(model)
    assert set(names) == {n for n in model.graph.initializers if n.endswith((".weight", ".bias", ".gamma"))}
    module = TorchGraph(model, names)
    module(**{name: torch.from_numpy(x) for name, x in graphs.images(1)[0].items()})["logits"].square().sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in module.parameters() if p.grad is not None)
    assert len([p for p in module.parameters() if p.grad is not None]) == len(names)
    assert not dict(module.named_buffers()).keys() & module.state_dict().keys()


def test_an_operator_without_a_form_in_torch_is_named() -> None:
    model = single("Det", [floats(3, 3)], {})
    with pytest.raises(
        ValueError, match=r"cannot be trained through: operators that have no form in torch here: 1 Det"
    ):
        check_operators(model)


def test_operators_of_an_older_opset_are_not_taken_for_todays() -> None:  # of 11: axes were an attribute
    model = single("Squeeze", [floats(1, 3, 1)], {"axes": [0]})
    model.opset_imports[""] = 11
    with pytest.raises(ValueError, match=r"its opset is 11, and operators are known as they are from 17 on"):
        check_operators(model)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "what"),
    [
        ("ArgMax", [MATRIX], {"select_last_index": 1}, "select_last_index"),
        (
            "AveragePool",
            [IMAGE],
            {"kernel_shape": [2, 2], "dilations": [2, 2]},
            "dilations, or uneven pads with ceil_mode",
        ),
        ("BatchNormalization", [IMAGE, *[floats(4)] * 4], {"training_mode": 1}, "training_mode"),
        ("ConvTranspose", [IMAGE, floats(4, 4, 3, 3)], {"output_shape": [9, 9]}, "output_shape or auto_pad"),
        ("CumSum", [MATRIX, np.array(0)], {"reverse": 1}, "exclusive or reverse"),
        ("LRN", [IMAGE], {"size": 2}, "an even size"),
        ("Pad", [IMAGE, whole(*[0] * 8)], {"mode": "wrap"}, "mode wrap"),
        (
            "Resize",
            [IMAGE, None, whole(1, 1, 2, 2).astype(np.float32)],
            {"antialias": 1, "mode": "linear"},
            "antialias",
        ),
        ("Resize", [IMAGE, None, None, whole(2, 4, 3, 3)], {"nearest_mode": "ceil"}, "nearest at half_pixel, ceil"),
        (
            "Resize",
            [IMAGE, None, whole(1, 1, 2, 2).astype(np.float32)],
            {"coordinate_transformation_mode": "half_pixel_symmetric"},
            "nearest at half_pixel_symmetric",
        ),
        ("Resize", [IMAGE, None, whole(1, 2, 2, 1).astype(np.float32)], {}, "scales of the batch or the channels"),
        ("Constant", [], {"value_float": 1.0}, "a value that is no tensor"),
    ],
)
def test_a_form_that_torch_has_not_is_named(
    op: str, inputs: list[np.ndarray | None], attributes: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=rf"{op} 'node' with {what} has no form in torch here"):
        in_torch(single(op, inputs, attributes), feeds_of(inputs))
