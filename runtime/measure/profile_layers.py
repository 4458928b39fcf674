"""Which layer of the file a product is that a runtime executed: traced through what was fused and renamed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from runtime.bundle.onnx_file import Graph, GraphNode
from runtime.measure.profile import PRODUCTS, NodeTime, Profile

_RENAMED = re.compile(r"(_token_\d+|_nchwc|_nhwc|_quant|_QuantizeLinear|_DynamicQuantizeMatMul|/MatMulAddFusion)+$")
"""What ONNX Runtime and its quantizer put behind the name of a node that they replace."""
_PASSED_THROUGH = 8
"""Nodes between a product and the activation that was fused into it, at most."""
_UNPACKING = ("DequantizeLinear", "Reshape", "Transpose", "Cast", "Identity")


def trace_layers(profile: Profile, file: Graph, layers: Sequence[str] = ()) -> Profile:
    """Return the profile with the file's node and layer of each product.

    A runtime keeps a node's name, puts something behind it, or keeps the name of a tensor that the node or what was
    fused into it gives. A layer's name is its weight's before ".weight", or what of it `layers`
    knows; the node's where there is neither.
    """
    makers = {output: node for node in file.nodes for output in node.outputs}
    named = {node.name: node for node in file.nodes if node.name}
    products = {node.name: node for node in named.values() if node.operator in PRODUCTS}

    def find_source(node: NodeTime) -> GraphNode | None:
        for name in (node.name, _RENAMED.sub("", node.name), *node.source.split(",")):
            if (known := products.get(name)) is not None:
                return known
        starts = [makers.get(tensor.name) for tensor in node.outputs]
        starts += [named.get(_RENAMED.sub("", node.name)), makers.get(_RENAMED.sub("", node.name))]
        return next((source for start in starts if (source := _walk_to_product(start, makers)) is not None), None)

    traced = []
    for node in profile.nodes:
        source = find_source(node) if node.is_product else None
        layer = name_layer(source, file, makers, layers) if source is not None else ""
        own = source.name if source is not None else ""
        traced.append(replace(node, source=own, layer=layer or node.name) if node.is_product else node)
    return replace(profile, nodes=tuple(traced), file=file)


def _walk_to_product(node: GraphNode | None, makers: Mapping[str, GraphNode]) -> GraphNode | None:
    """Return the product that a fused activation, sum or quantization stands behind; None where there is none near."""
    for _ in range(_PASSED_THROUGH):
        if node is None or node.operator in PRODUCTS:
            return node
        node = next((maker for name in node.inputs if (maker := makers.get(name)) is not None), None)
    return None


def name_layer(source: GraphNode, file: Graph, makers: Mapping[str, GraphNode], layers: Sequence[str] = ()) -> str:
    """Return the name of the layer that a product of the file is."""
    known = set(layers)
    for tensor in find_constants(source, file, makers):
        stem = re.split(r"[/.](?:weight|kernel|bias)\b", tensor)[0]
        if stem in known or stem != tensor:
            return stem
    return source.name


def find_constants(source: GraphNode, file: Graph, makers: Mapping[str, GraphNode]) -> list[str]:
    """Return the constants that a node reads, directly or through nodes that unpack them; the weight's names first."""
    found = []
    for name in source.inputs:
        for _ in range(4):
            found.append(name)
            maker = makers.get(name)
            if maker is None or maker.operator not in _UNPACKING:
                break
            name = maker.inputs[0]
        if name not in file.constants:
            del found[-1:]
    return found
