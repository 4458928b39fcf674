"""What torch's exporter looks up anew each time is looked up once; what it writes stays the same."""

from __future__ import annotations

from contextlib import nullcontext

import onnx_ir as ir
import torch
import torch._export.utils
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from compress.export.onnx import silence
from compress.export.operator_tables import keep_operator_tables


def test_the_graph_is_torchs_own_and_operators_are_listed_once() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8)).eval()
    listing, listed = torch._export.utils._materialize_cpp_cia_ops, []

    def count() -> None:
        listed.append(1)
        listing()

    written = []
    torch._export.utils._materialize_cpp_cia_ops = count
    try:
        for context in (nullcontext(), keep_operator_tables(), keep_operator_tables()):
            listed.clear()
            with silence(), context:
                program = torch.onnx.export(net, (torch.ones(2, 4),), dynamo=True, opset_version=20, verbose=False)
            assert program is not None
            written.append((ir.to_proto(program.model).graph, len(listed)))
        assert torch._export.utils._materialize_cpp_cia_ops is count
    finally:
        torch._export.utils._materialize_cpp_cia_ops = listing
    assert all(graph == written[0][0] for graph, _ in written)
    assert written[0][1] > 1 and [n for _, n in written[1:]] == [1, 1]


def test_what_one_export_adds_the_next_has_not() -> None:
    operator, own = torch.ops.aten._is_all_true.default, ONNXRegistry.__dict__["from_torchlib"]
    known = []
    for _ in range(2):
        with keep_operator_tables():
            table = ONNXRegistry().from_torchlib(opset_version=20)
            known.append(table.is_registered(operator))
            table.register_op(operator, lambda x: x)
    assert known == [False, False]
    assert ONNXRegistry.__dict__["from_torchlib"] is own
