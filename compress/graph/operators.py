"""Every ONNX operator that torch computes here, and whether a graph has others."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from compress.facts import LOWEST_OPSET
from compress.graph.torch_images import IMAGE_OPERATORS
from compress.graph.torch_moves import MOVE_OPERATORS
from compress.graph.torch_ops import VALUE_OPERATORS, Make

OPERATORS: dict[str, Make] = {**VALUE_OPERATORS, **MOVE_OPERATORS, **IMAGE_OPERATORS}
"""Operator -> what makes a node's function."""
MOST_NAMED = 3
"""Nodes of one operator that an error names."""


def list_unknown(model: ir.Model, known: Collection[str] = ()) -> list[str]:
    """Return why torch cannot compute a graph's nodes, in sentences; [] where it can.

    `known`: operators of any domain beside OPERATORS. Operators are counted, and their first nodes named.
    """
    unknown: dict[str, list[str]] = {}
    for node in model.graph:
        standard = node.domain in ("", "ai.onnx") and node.op_type in OPERATORS
        if not standard and node.op_type not in known:
            unknown.setdefault(name_operator(node), []).append(node.name or "unnamed")
    problems, opset = [], model.opset_imports.get("", LOWEST_OPSET)
    if unknown:
        counts = ", ".join(_count_nodes(operator, nodes) for operator, nodes in unknown.items())
        problems.append(f"operators that have no form in torch here: {counts}")
    if opset < LOWEST_OPSET:  # attributes have become inputs, and defaults others, since then
        problems.append(f"its opset is {opset}, and operators are known as they are from {LOWEST_OPSET} on")
    return problems


def name_operator(node: ir.Node) -> str:
    """Return the operator of a node, with its domain where that is not ONNX's own."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


def _count_nodes(operator: str, nodes: list[str]) -> str:
    more = f", and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    return f"{len(nodes)} {operator} ({', '.join(nodes[:MOST_NAMED])}{more})"
