"""Shape arithmetic on arrays is what ONNX Runtime computes of tensors, and follows the symbols of an export."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from compress.graph.run import open_session
from compress.graph.size_ops import SIZE_OPERATORS, holds_sizes, to_tensor


def whole(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


ROW, OTHER, TRUE = whole(7, -3, 8), whole(2, 2, -3), np.array([True, False, True])
CASES: list[tuple[str, list[np.ndarray], dict[str, Any]]] = [
    *((op, [ROW, OTHER], {}) for op in ("Add", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mul", "Sub")),
    *((op, [ROW], {}) for op in ("Abs", "Identity", "Neg")),
    *((op, [ROW.astype(np.float32) / 4], {}) for op in ("Ceil", "Floor")),
    *((op, [TRUE, ~TRUE], {}) for op in ("And", "Or")),
    ("Not", [TRUE], {}),
    ("Mod", [ROW, OTHER], {}),
    *(("Cast", [ROW], {"to": to}) for to in (TensorProto.FLOAT, TensorProto.BOOL)),
    ("Cast", [ROW / np.float32(2)], {"to": TensorProto.INT64}),
    ("Concat", [ROW, OTHER], {"axis": 0}),
    ("Expand", [whole(5), whole(3)], {}),
    ("Gather", [ROW, np.array(-1)], {}),
    ("Gather", [ROW, whole(2, 0)], {}),
    *((op, [ROW, whole(0)], {"keepdims": 0}) for op in ("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum")),
    ("Reshape", [ROW, whole(1, -1)], {}),
    ("Slice", [ROW, whole(0), whole(2**63 - 1), whole(0), whole(2)], {}),
    ("Slice", [ROW, whole(-1), whole(-9), whole(0), whole(-1)], {}),
    ("Squeeze", [whole(4)], {}),
    ("Squeeze", [whole(4), whole(0)], {}),
    ("Unsqueeze", [np.array(4), whole(0)], {}),
    ("Where", [TRUE, ROW, OTHER], {}),
]


@pytest.mark.parametrize(("op", "inputs", "attributes"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_sizes_are_what_onnx_runtime_computes(op: str, inputs: list[np.ndarray], attributes: dict[str, Any]) -> None:
    names = [f"x{i}" for i in range(len(inputs))]
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in zip(names, inputs, strict=True)
    ]
    node = helper.make_node(op, names, ["y"], **attributes)
    graph = helper.make_graph([node], "one", given, [helper.make_empty_tensor_value_info("y")])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    (expected,) = open_session(model, 1).run(None, dict(zip(names, inputs, strict=True)))
    symbols = [x.astype(object) for x in inputs]  # as they are when sizes are symbols
    for arrays in (inputs, symbols):
        found = SIZE_OPERATORS[op](next(iter(model.graph)))(*arrays)
        assert found.shape == expected.shape and found.tolist() == expected.tolist()


def test_every_operator_is_tried() -> None:
    assert set(SIZE_OPERATORS) == {op for op, _, _ in CASES}


def test_a_few_whole_numbers_are_sizes_and_tables_are_not() -> None:
    assert holds_sizes(whole(1, 2)) and holds_sizes(np.array(0.5)) and holds_sizes(np.ones((1, 1), np.float32))
    assert not holds_sizes(np.ones(2, np.float32))
    assert not holds_sizes(np.ones((2, 2), np.int64)) and not holds_sizes(np.ones(65, np.int64))


def test_sizes_become_tensors_of_their_kind() -> None:
    like = torch.zeros(1)
    assert torch.equal(to_tensor(np.array([2, 3], dtype=object), like), torch.tensor([2, 3]))
    assert to_tensor(np.array(True, dtype=object), like).dtype == torch.bool
    assert to_tensor(np.float32([0.5]), None).dtype == torch.float32
