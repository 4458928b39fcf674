"""Root-mean-square normalisations written so that ONNX Runtime computes each as one operator.

The exporter writes x times the reciprocal of a root; the fusion into SimplifiedLayerNormalization looks for x divided
by the root. The quotient is the same number but for rounding, and standard ONNX as before.
"""

from __future__ import annotations

import onnx_ir as ir

from compress.graph.edit import alone_reads, append, reroute, tidy, uses_of


def divide_by_root(model: ir.Model) -> int:
    """Turn each Mul(x, Reciprocal(Sqrt(...))) into Div(x, Sqrt(...)), in place; returns how many."""
    matches = [(node, parts) for node in model.graph if (parts := _match_root(node)) is not None]
    for node, (x, root) in matches:
        old = node.outputs[0]
        quotient = append(model, "Div", [x, root], f"{old.name}/divided")
        quotient.type, quotient.shape = old.type, old.shape
        reroute(uses_of(old), quotient)
    if matches:
        tidy(model)
    return len(matches)


def _match_root(mul: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """Return (x, root) of a Mul that is x / root and no output of the graph, else None."""
    if mul.op_type != "Mul" or mul.outputs[0].is_graph_output():
        return None
    for x, other in (mul.inputs, tuple(mul.inputs)[::-1]):
        reciprocal = other.producer() if other is not None else None
        if reciprocal is None or reciprocal.op_type != "Reciprocal" or not alone_reads(mul, reciprocal.outputs[0]):
            continue
        root = reciprocal.inputs[0]
        maker = root.producer() if root is not None else None
        if x is not None and root is not None and maker is not None and maker.op_type == "Sqrt":
            return x, root
    return None
