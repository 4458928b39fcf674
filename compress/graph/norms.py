"""Residual sums before a layer normalisation, written so that ONNX Runtime leaves them apart.

Its CPU kernel for the fused SkipLayerNormalization takes several times as long as an addition and a LayerNormalization
(measured on 1.31: 255 against 36 microseconds at 128 x 384). The fusion looks for Add; Sum of the same two tensors is
the same number.
"""

from __future__ import annotations

import onnx_ir as ir


def keep_norms_apart(model: ir.Model) -> int:
    """Turn each Add of two activations that a LayerNormalization reads into Sum, in place; returns how many."""
    changed = 0
    for node in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        source = node.inputs[0].producer() if node.inputs[0] is not None else None
        if (
            source is not None
            and source.op_type == "Add"
            and not any(v.const_value is not None for v in source.inputs if v)
        ):
            source.op_type = "Sum"
            changed += 1
    return changed
