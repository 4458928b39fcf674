"""A decoder that computes the logits of as few of the last tokens as it is asked for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer
from compress.graph.layers import is_constant
from runtime.bundle.manifest import LOGITS_TO_KEEP

PRODUCTS = ("MatMul", "MatMulNBits", "Gemm", "MatMulInteger")
ROUNDING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast")
"""What a product's input passes through first, and what ONNX Runtime fuses with the product."""


def keep_last_logits(model: ir.Model) -> bool:
    """Give a decoder's graph the input LOGITS_TO_KEEP, in place; return False where the product's input is not found.

    It is an initializer, too, so that whoever does not know it, or takes it for a constant, gets the logits of all
    tokens. A prompt needs those of its last: of Qwen2.5-Coder 0.5B the head is 27 % of a prompt's multiplications, and
    its logits of 4,096 tokens take 2.5 GB.
    """
    hidden, readers = _find_hidden(model)
    if hidden is None:
        return False
    keep = initializer(model, LOGITS_TO_KEEP, np.zeros(1, np.int64))
    model.graph.inputs.append(keep)
    end = initializer(model, f"{LOGITS_TO_KEEP}/end", np.array([np.iinfo(np.int64).max], np.int64))
    axis = initializer(model, f"{LOGITS_TO_KEEP}/axis", np.ones(1, np.int64))
    start = append(model, "Neg", [keep], f"{LOGITS_TO_KEEP}/start")
    last = append(model, "Slice", [hidden, start, end, axis], f"{LOGITS_TO_KEEP}/hidden")
    last.type = hidden.type
    for node in readers:
        for index, value in enumerate(node.inputs):
            if value is hidden:
                node.replace_input_with(index, last)
    model.graph.sort()
    return True


def _find_hidden(model: ir.Model) -> tuple[ir.Value | None, list[ir.Node]]:
    """Return what the product that gives the logits reads [batch, sequence, width], and the nodes between both.

    Going back from the logits, it is the first value, behind a product and what rounds its input, that alone decides
    them.
    """
    ids, logits = model.graph.inputs[0], model.graph.outputs[0]
    open_values, passed, product = {logits}, list[ir.Node](), False
    for node in reversed(list(model.graph)):
        if open_values.isdisjoint(node.outputs):
            continue
        if product and len(open_values) == 1 and node.op_type not in ROUNDING:
            break
        read = {value for value in node.inputs if value is not None and not is_constant(value)}
        open_values = (open_values - set(node.outputs)) | read
        passed.append(node)
        product = product or node.op_type in PRODUCTS
    hidden = next(iter(open_values), None)
    if not product or len(open_values) != 1 or hidden is None or hidden.shape is None or ids.shape is None:
        return None, []
    rows = len(hidden.shape) == 3 and hidden.shape[1] == ids.shape[1]
    return (hidden, passed) if rows else (None, [])
