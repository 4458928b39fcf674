"""Products of one input with several quantized weights, computed as one product with the weights side by side.

Decoding multiplies one row: a kernel call then costs as much as it computes, and each call rounds the row to int8
again. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.graph.cache import ATTENTION
from compress.graph.edit import append, initializer, reroute, tidy, uses_of
from compress.graph.layers import constant, int_attribute, is_constant


@dataclass(frozen=True, eq=False)
class _Product:
    """x [.., in] times a weight that DequantizeLinear gives from blocks along the inputs."""

    node: ir.Node
    weight: ir.Node
    add: ir.Node | None
    """The Add of a constant [out] that alone reads the product."""

    @property
    def result(self) -> ir.Value:
        return (self.add or self.node).outputs[0]

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what products must share to be one."""
        parts = [constant(value) for value in self.weight.inputs]
        kinds = tuple(part.dtype for part in parts)
        return (*kinds, parts[0].shape[0], int_attribute(self.weight, "block_size", 0), self.add is None)

    @property
    def width(self) -> int:
        return int(constant(self.weight.inputs[0]).shape[1])


def merge_products(model: ir.Model) -> int:
    """Merge block-wise quantized products that read one value, in place; returns how many are gone."""
    by_input: dict[tuple[object, ...], list[_Product]] = {}
    for node in model.graph:
        product = _match_product(node)
        if product is not None:
            by_input.setdefault((node.inputs[0], *product.kind), []).append(product)
    groups = [products for products in by_input.values() if len(products) > 1]
    for products in groups:
        _merge_group(model, products)
    tidy(model)
    return sum(len(products) - 1 for products in groups)


def _match_product(node: ir.Node) -> _Product | None:
    weight = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
    if weight is None or weight.op_type != "DequantizeLinear" or not all(is_constant(v) for v in weight.inputs):
        return None
    if int_attribute(weight, "axis", 1) != 0 or not int_attribute(weight, "block_size", 0):
        return None
    if node.outputs[0].is_graph_output():
        return None
    return _Product(node, weight, _find_bias_add(node))


def _find_bias_add(node: ir.Node) -> ir.Node | None:
    uses = [use.node for use in node.outputs[0].uses()]
    if len(uses) != 1 or uses[0].op_type != "Add" or uses[0].outputs[0].is_graph_output():
        return None
    other = next((v for v in uses[0].inputs if v is not node.outputs[0]), None)
    return uses[0] if is_constant(other) and constant(other).ndim == 1 else None


def _merge_group(model: ir.Model, products: Sequence[_Product]) -> None:
    reader = _find_attention(products)
    if reader is not None:
        products = sorted(products, key=lambda p: list(reader.inputs).index(p.result))  # query, key, value
    name = "+".join(str(p.result.name) for p in products)
    parts = []
    for index, suffix in enumerate(("int", "scale", "zero_point")[: len(products[0].weight.inputs)]):
        joined = _join_constants([p.weight.inputs[index] for p in products])
        parts.append(initializer(model, f"{name}/{suffix}", joined))
    attributes = {"axis": 0, "block_size": int_attribute(products[0].weight, "block_size", 0)}
    weight = append(model, "DequantizeLinear", parts, f"{name}/weight", attributes)
    result = append(model, "MatMul", [products[0].node.inputs[0], weight], f"{name}/product")
    if products[0].add is not None:
        biases = [next(v for v in p.add.inputs if v is not p.node.outputs[0]) for p in products if p.add is not None]
        bias = initializer(model, f"{name}/bias", _join_constants(biases))
        result = append(model, "Add", [result, bias], f"{name}/biased")
    old = products[0].result
    result.type = old.type
    if old.shape is not None:
        result.shape = ir.Shape((*list(old.shape)[:-1], sum(p.width for p in products)))
    if reader is not None:
        for index, value in enumerate((result, None, None)):
            reader.replace_input_with(index, value)
    else:
        _split_result(model, result, products, name)


def _join_constants(values: Sequence[ir.Value | None]) -> ir.TensorProtocol:
    """Join constants side by side along their last axis, in their own type."""
    arrays = [constant(value) for value in values]
    first = values[0]
    assert first is not None and first.const_value is not None
    return ir.Tensor(np.ascontiguousarray(np.concatenate(arrays, axis=-1)), dtype=first.const_value.dtype)


def _find_attention(products: Sequence[_Product]) -> ir.Node | None:
    """Return the attention that alone reads three products as its query, key and value: it takes them as one."""
    readers = {use.node for p in products for use in p.result.uses()}
    if len(products) != 3 or len(readers) != 1 or any(len(list(p.result.uses())) != 1 for p in products):
        return None
    reader = readers.pop()
    same = set(reader.inputs[:3]) == {p.result for p in products}
    return reader if reader.op_type == ATTENTION and same else None


def _split_result(model: ir.Model, value: ir.Value, products: Sequence[_Product], name: str) -> None:
    widths = initializer(model, f"{name}/widths", np.array([p.width for p in products], np.int64))
    node = ir.node("Split", [value, widths], {"axis": -1}, num_outputs=len(products), name=f"{name}/split")
    model.graph.append(node)
    for product, part in zip(products, node.outputs, strict=True):
        part.name, part.type, part.shape = f"{product.result.name}/part", product.result.type, product.result.shape
        reroute(uses_of(product.result), part)
