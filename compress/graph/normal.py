"""Bringing a graph that someone else made into the one form that the other rooms expect."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveInitializersFromInputsPass


def normalize(model: ir.Model) -> None:
    """Make constants initializers, take initializers from the inputs, and name every node, in place."""
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveInitializersFromInputsPass()(model)
    for index, node in enumerate(model.graph):
        if not node.name:
            node.name = f"{node.op_type}_{index}"
