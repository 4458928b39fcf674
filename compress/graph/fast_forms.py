"""Write a finished graph in the forms that ONNX Runtime is fast on, or that are smaller, with the same numbers.

Each function rewrites the graph in place and returns how many places it changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx import defs

from compress.formats.targets import TWO_BIT_BLOCKS
from compress.graph.attention import DOMAIN
from compress.graph.edit import alone_reads, append, initializer, reroute, take_over, tidy, uses_of
from compress.graph.layers import (
    WRAPPER,
    constant,
    constant_shape,
    int_attribute,
    ints_attribute,
    is_constant,
    node_scope,
    text_attribute,
)
from compress.graph.specs import ATTENTION
from compress.graph.stored import StoredTensor, join_last

CHANNEL_MULTIPLE = 4
"""Input channels of a convolution that ONNX Runtime's integer kernels read at once."""
INT8_ACCURACY = 4
"""Inputs are rounded to int8, block by block: the level at which ONNX Runtime fuses int4 weights too."""

POOL_OPSET, PLAIN_OPSET = 18, 20
"""The last opset whose AveragePool has a fast kernel, and the last of which a graph may be called one of that."""
MORE_TYPES = {
    *("AveragePool", "Cast", "CastLike", "Constant", "ConstantOfShape", "DequantizeLinear", "Equal", "Identity", "If"),
    *("IsInf", "IsNaN", "Loop", "Pad", "QuantizeLinear", "Reshape", "Scan", "Shape", "Size"),
}
"""Operators that between these two got attributes, texts and small floats, and nothing else."""


def keep_pools_fast(model: ir.Model) -> int:
    """Call a graph with an AveragePool one of opset 18 where all of it means the same there; returns 1 if so, else 0.

    ONNX Runtime's kernel for the AveragePool of opset 19 and later takes 7.5 times as long as that of earlier ones
    (measured on 1.31: 1,290 against 172 microseconds, windows of 3 x 3 over 136 x 56 x 56).
    """
    opset, nodes = model.opset_imports.get("", 0), list(ir.traversal.RecursiveGraphIterator(model.graph))
    if not POOL_OPSET < opset <= PLAIN_OPSET or all(node.op_type != "AveragePool" for node in nodes):
        return 0
    if not all(_means_the_same(node, opset) for node in nodes):
        return 0
    model.opset_imports[""] = POOL_OPSET
    return 1


def _means_the_same(node: ir.Node, opset: int) -> bool:
    """Return whether a node of `opset` is the same in POOL_OPSET."""
    if node.domain not in ("", "ai.onnx") or defs.get_schema(node.op_type, opset).since_version <= POOL_OPSET:
        return True
    if node.op_type not in MORE_TYPES or text_attribute(node, "mode", "") == "wrap":
        return False
    types = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None and value.dtype is not None}
    if any(dtype == ir.DataType.STRING or (dtype.is_floating_point() and dtype.bitwidth < 32) for dtype in types):
        return False
    return node.attributes.keys() <= defs.get_schema(node.op_type, POOL_OPSET).attributes.keys()


def keep_norms_apart(model: ir.Model) -> int:
    """Turn each Add of two activations that a LayerNormalization reads into Sum, in place; returns how many.

    ONNX Runtime's CPU kernel for the fused SkipLayerNormalization takes several times as long as an addition and a
    LayerNormalization (measured on 1.31: 255 against 36 microseconds at 128 x 384). The fusion looks for Add; Sum of
    the same two tensors is the same number.
    """
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


def divide_by_root(model: ir.Model) -> int:
    """Turn each Mul(x, Reciprocal(Sqrt(...))) into Div(x, Sqrt(...)), in place; returns how many.

    The exporter writes x times the reciprocal of a root; the fusion into SimplifiedLayerNormalization looks for x
    divided by the root. The quotient is the same number but for rounding, and standard ONNX as before.
    """
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


def pad_input_channels(model: ir.Model) -> int:
    """Pad the quantized input of every ungrouped Conv whose channels are no multiple, in place; returns how many.

    ONNX Runtime's direct int8 convolution needs the input channels in multiples of four; an image's three send the
    first, and largest, layer through im2col instead (measured: 32 against 18 + 4 microseconds on a 32 x 32 image). A
    fourth channel that holds the zero point meets zero weights, so every sum stays the same.
    """
    matches = [(node, pair) for node in model.graph if node.op_type == "Conv" and (pair := _match_operands(node))]
    for node, (source, weight) in matches:
        values = constant(weight.inputs[0])
        missing = -values.shape[1] % CHANNEL_MULTIPLE
        shape = (values.shape[0], missing, *values.shape[2:])
        name = f"{weight.inputs[0].name}/padded"  # type: ignore[union-attr]
        wider = np.concatenate([values, np.zeros(shape, np.int8)], axis=1)
        weight.replace_input_with(0, initializer(model, name, wider))
        weight.outputs[0].shape = ir.Shape(wider.shape)  # a stale one makes ONNX Runtime warn at every load
        pads = np.zeros(2 * values.ndim, np.int64)
        pads[values.ndim + 1] = missing
        spec = initializer(model, f"{node.name}/channel_padding", pads)
        quantized, scale, zero_point = source.inputs[0], source.inputs[1], source.inputs[2]
        padded = append(model, "Pad", [quantized, spec, zero_point], f"{node.name}/padded")
        restored = append(model, "DequantizeLinear", [padded, scale, zero_point], f"{node.name}/padded/dequantized")
        node.replace_input_with(0, restored)
    if matches:
        tidy(model)
    return len(matches)


def _match_operands(conv: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Return (DequantizeLinear of the input, that of the weight) of an int8 Conv that needs padding, else None."""
    source, weight = (value.producer() if value is not None else None for value in conv.inputs[:2])
    if source is None or weight is None or source.op_type != "DequantizeLinear" or weight.op_type != "DequantizeLinear":
        return None
    if int_attribute(conv, "group", 1) != 1:
        return None
    if not is_constant(weight.inputs[0]) or len(source.inputs) < 3 or source.inputs[2] is None:
        return None
    if weight.outputs[0].is_graph_output() or len(list(weight.outputs[0].uses())) != 1:
        return None
    return (source, weight) if constant(weight.inputs[0]).shape[1] % CHANNEL_MULTIPLE else None


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
        kinds = tuple(value.dtype for value in self.weight.inputs if value is not None)
        return (
            *kinds,
            constant_shape(self.weight.inputs[0])[0],
            int_attribute(self.weight, "block_size", 0),
            self.add is None,
        )

    @property
    def width(self) -> int:
        return constant_shape(self.weight.inputs[0])[1]


def merge_products(model: ir.Model) -> int:
    """Merge block-wise quantized products that read one value, in place; returns how many are gone.

    Decoding multiplies one row: a kernel call then costs as much as it computes, and each call rounds the row to int8
    again. The numbers are the same.
    """
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
    return uses[0] if is_constant(other) and len(constant_shape(other)) == 1 else None


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
    tensors = [value.const_value for value in values if value is not None and value.const_value is not None]
    return join_last(tensors)


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


def to_two_bits(model: ir.Model) -> int:
    """Write each product with block-wise int4 weights that need two bits as MatMulNBits, in place; returns how many.

    ONNX's DequantizeLinear has no type of two bits that ONNX Runtime multiplies by, so a graph holds them as int4
    first.
    """
    matches = [(node, weight) for node in model.graph if (weight := _match_two_bits(node)) is not None]
    for node, weight in matches:
        _write_product(model, node, weight)
    if matches:
        model.opset_imports[DOMAIN] = 1
        tidy(model)
    return len(matches)


def _match_two_bits(node: ir.Node) -> ir.Node | None:
    """Return the DequantizeLinear that gives a MatMul's weight, if two bits hold its integers."""
    weight = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
    if weight is None or weight.op_type != "DequantizeLinear" or not all(is_constant(v) for v in weight.inputs):
        return None
    kind = weight.inputs[0].dtype if weight.inputs[0] is not None else None
    if kind not in (ir.DataType.INT4, ir.DataType.UINT4) or int_attribute(weight, "axis", 1) != 0:
        return None
    if int_attribute(weight, "block_size", 0) not in TWO_BIT_BLOCKS:
        return None
    tensor = weight.inputs[0].const_value if weight.inputs[0] is not None else None
    if isinstance(tensor, StoredTensor) and tensor.bits > 2:
        return None
    low, high = (-2, 1) if kind == ir.DataType.INT4 else (0, 3)
    parts = [constant(value).astype(np.int8) for value in (weight.inputs[0], *weight.inputs[2:])]
    return weight if all(part.min() >= low and part.max() <= high for part in parts) else None


def _write_product(model: ir.Model, node: ir.Node, weight: ir.Node) -> None:
    quantized, scales, zeros = [*weight.inputs, None][:3]
    assert quantized is not None and scales is not None
    name, block = quantized.name or node.name, int_attribute(weight, "block_size", 0)
    offset = 2 if quantized.dtype == ir.DataType.INT4 else 0  # MatMulNBits holds unsigned numbers around 2
    values = constant(quantized).astype(np.int8).T + np.int8(offset)  # [out, in]
    n_outputs, n_inputs = values.shape
    blocks = n_inputs // block
    inputs = [
        node.inputs[0],
        initializer(model, f"{name}/2bit", _pack_bytes(values).reshape(n_outputs, blocks, block // 4)),
        initializer(model, f"{name}/2bit/scale", np.ascontiguousarray(constant(scales).T)),
    ]
    if zeros is not None:
        padded = np.pad(constant(zeros).astype(np.int8).T + np.int8(offset), ((0, 0), (0, -blocks % 4)))
        inputs.append(initializer(model, f"{name}/2bit/zero_point", _pack_bytes(padded)))
    attributes = {"K": n_inputs, "N": n_outputs, "bits": 2, "block_size": block, "accuracy_level": INT8_ACCURACY}
    old = node.outputs[0]
    take_over(model, old, append(model, "MatMulNBits", inputs, f"{old.name}/2bit", attributes, domain=DOMAIN))


def _pack_bytes(values: np.ndarray) -> np.ndarray:
    """Pack four numbers of 0 to 3 along the last axis into each byte, the first one lowest."""
    parts = values.astype(np.uint8).reshape(*values.shape[:-1], -1, 4)
    packed: np.ndarray = parts[..., 0] | parts[..., 1] << 2 | parts[..., 2] << 4 | parts[..., 3] << 6
    return packed


@dataclass(frozen=True, eq=False)
class _Table:
    """A DequantizeLinear of a constant table [rows, width] in blocks along its width, that a Gather looks up in.

    `values`: unsigned [rows, width]; `zeros` [rows, blocks], None where all are the middle of the range.
    """

    weight: ir.Node
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    bits: int

    @property
    def block(self) -> int:
        return int_attribute(self.weight, "block_size", 0)

    def is_product(self, other: ir.Node) -> bool:
        """Return whether the DequantizeLinear `other` gives the table's transpose from the same integers."""
        stored = other.inputs[0]
        if stored is not None and stored.shape is not None and tuple(stored.shape)[::-1] != self.values.shape:
            return False  # before its values are read
        product = _read_blocks(other, axis=0)
        if product is None or product.block != self.block or product.bits != self.bits:
            return False
        if not np.array_equal(self.values, product.values) or not np.array_equal(self.scales, product.scales):
            return False
        if self.zeros is None or product.zeros is None:
            return self.zeros is product.zeros
        return np.array_equal(self.zeros, product.zeros)


def look_up_in_blocks(model: ir.Model) -> int:
    """Write each look-up in a block-wise table as GatherBlockQuantized, in place; returns how many.

    Of a DequantizeLinear and a Gather, ONNX Runtime would dequantize the whole table on every call. Products with the
    table's transpose become MatMulNBits on the same bytes, as onnxruntime-genai's builder has it.
    """
    found = _find_lookups(model)
    for node, table in found:
        _write_lookup(model, node, table)
    if found:
        model.opset_imports[DOMAIN] = 1
        tidy(model)
    return len(found)


def share_blocks(model: ir.Model) -> int:
    """Let each product with the transpose of a block-wise table that is looked up in read that table, in place.

    For runtimes that turn a constant as they load it, as OpenVINO does. Returns how many.
    """
    changed = 0
    for _, table in _find_lookups(model):
        source = table.weight.outputs[0]
        for node in _find_products(model, table):
            turned = append(model, "Transpose", [source], f"{node.outputs[0].name}/turned", {"perm": [1, 0]})
            turned.type = source.type
            node.replace_input_with(1, turned)
            changed += 1
    if changed:
        tidy(model)
    return changed


def _find_lookups(model: ir.Model) -> list[tuple[ir.Node, _Table]]:
    return [
        (node, table)
        for node in model.graph
        if node.op_type == "Gather"
        and not int_attribute(node, "axis", 0)
        and node.inputs[0] is not None
        and (table := _read_blocks(node.inputs[0].producer(), axis=1)) is not None
    ]


def _find_products(model: ir.Model, table: _Table) -> list[ir.Node]:
    """Return the products with the table's transpose, held as the same integers."""
    found = []
    for node in model.graph:
        weight = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        if weight is not None and weight.op_type == "DequantizeLinear" and table.is_product(weight):
            found.append(node)
    return found


def _read_blocks(weight: ir.Node | None, axis: int) -> _Table | None:
    """Return what a DequantizeLinear of constants holds, its blocks along `axis` turned to lie along rows; or None."""
    if weight is None or weight.op_type != "DequantizeLinear" or not all(is_constant(v) for v in weight.inputs):
        return None
    block, quantized = int_attribute(weight, "block_size", 0), weight.inputs[0]
    assert quantized is not None
    # GatherBlockQuantized reads blocks of 16 and larger powers of two
    if int_attribute(weight, "axis", 1) != axis or block < 16 or block & (block - 1):
        return None
    bits = 4 if quantized.dtype in (ir.DataType.INT4, ir.DataType.UINT4) else 8
    signed = quantized.dtype in (ir.DataType.INT4, ir.DataType.INT8)
    middle = 1 << (bits - 1) if signed else 0
    values, scales, *zeros = (constant(value) for value in weight.inputs)
    if axis == 0:
        values, scales, zeros = values.T, scales.T, [part.T for part in zeros]
    values = (values.astype(np.int16) + middle).astype(np.uint8)
    shifted = [(part.astype(np.int16) + middle).astype(np.uint8) for part in zeros]
    given = shifted[0] if shifted and not (signed and (shifted[0] == middle).all()) else None
    if not signed and given is None:
        given = np.zeros(scales.shape, np.uint8)
    return _Table(weight, values, np.ascontiguousarray(scales), given, bits)


def _write_lookup(model: ir.Model, gather: ir.Node, table: _Table) -> None:
    rows, width = table.values.shape
    name, per_byte = table.weight.outputs[0].name, 8 // table.bits
    packed = _pack_parts(table.values, table.bits)  # [rows, width / per_byte]
    blocks = packed.reshape(rows, width // table.block, table.block // per_byte)
    inputs = [
        initializer(model, f"{name}/packed", blocks),
        initializer(model, f"{name}/packed/scale", table.scales),
    ]
    if table.zeros is not None:
        inputs.append(initializer(model, f"{name}/packed/zero_point", _pack_parts(table.zeros, table.bits)))
    shape = initializer(model, f"{name}/packed/shape", np.array(packed.shape, np.int64))
    flat = append(model, "Reshape", [inputs[0], shape], f"{name}/packed/rows")
    about = {"bits": table.bits, "block_size": table.block}
    old = gather.outputs[0]
    attributes = about | {"gather_axis": 0, "quantize_axis": 1}
    found = append(
        model, "GatherBlockQuantized", [flat, gather.inputs[1], *inputs[1:]], f"{old.name}/rows", attributes, DOMAIN
    )
    take_over(model, old, found)
    sizes = about | {"K": width, "N": rows, "accuracy_level": INT8_ACCURACY}
    for node in _find_products(model, table):
        result, operands = node.outputs[0], [node.inputs[0], *inputs]
        take_over(model, result, append(model, "MatMulNBits", operands, f"{result.name}/product", sizes, DOMAIN))


def _pack_parts(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned numbers [rows, n] of 4 bits two to a byte along each row, the first one lowest; others stay."""
    if bits == 8:
        return np.ascontiguousarray(values)
    pairs = np.pad(values, ((0, 0), (0, -values.shape[1] % 2))).reshape(len(values), -1, 2)
    packed: np.ndarray = pairs[..., 0] | pairs[..., 1] << 4
    return packed


def share_tables(model: ir.Model) -> int:
    """Let each MatMul by an embedding's transpose read the embedding's table, in place; returns how many.

    ONNX Runtime folds the Transpose when it loads the graph: what runs is the same.
    """
    tables = [node.inputs[0] for node in model.graph if node.op_type == "Gather" and is_constant(node.inputs[0])]
    products = [node.inputs[1] for node in model.graph if node.op_type == "MatMul" and is_constant(node.inputs[1])]
    pairs = [(t, w) for t in dict.fromkeys(tables) for w in dict.fromkeys(products) if t and w and _is_transpose(t, w)]
    for table, weight in pairs:
        turned = append(model, "Transpose", [table], f"{weight.name}/turned", {"perm": [1, 0]})
        turned.type, turned.shape = weight.type, weight.shape
        reroute(uses_of(weight), turned)
    if pairs:
        tidy(model)
    return len(pairs)


def own_transposes(model: ir.Model) -> int:
    """Give each MatMul by the transpose of a constant that others read a constant of its own; returns how many.

    The exporter writes an output layer that shares the embeddings' table so; as a constant it is a layer to be rounded.
    """
    changed = 0
    for node in list(model.graph):
        turn = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
        scope = node_scope(node)
        if turn is None or turn.op_type != "Transpose" or not is_constant(turn.inputs[0]) or not scope:
            continue
        table = constant(turn.inputs[0])
        if table.ndim == 2 and ints_attribute(turn, "perm", [1, 0]) == [1, 0]:
            own = initializer(model, f"{WRAPPER}{scope}.weight", np.ascontiguousarray(table.T))
            node.replace_input_with(1, own)
            changed += 1
    if changed:
        tidy(model)
    return changed


def _is_transpose(table: ir.Value, weight: ir.Value) -> bool:
    """Return whether `weight` is the transpose of `table`, both float matrices."""
    a, b = table.const_value, weight.const_value
    if a is None or b is None or a.dtype != b.dtype or len(a.shape) != 2:
        return False
    if tuple(a.shape.numpy()) != tuple(b.shape.numpy())[::-1]:
        return False
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):  # their values are not read for this
        return a.origin is not None and b.origin is not None and a.origin[0] == b.origin[0]
    return np.array_equal(constant(table).T, constant(weight))
