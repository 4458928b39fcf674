"""The graph of an encoder-decoder, and the two that it is cut into: where keys and values of the encoder's output are.

Passes see one graph, in which nothing is twice; a bundle holds two, so that a text is encoded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from compress.graph.edit import reroute, tidy, uses_of
from compress.graph.run import clone
from compress.graph.specs import input_specs
from runtime.bundle.manifest import CROSS, SELF_PAST, SELF_PRESENT, KvCacheSpec, find_cache

LEAST_SHARED, PAGE = 2**16, 4096
"""Bytes of a weight below which both files hold it; what a weight in a file of its own begins at, to be mapped."""


def split_halves(model: ir.Model) -> tuple[ir.Model, ir.Model]:
    """Return the encoder and the decoder of a whole graph, cut at what one gives to the other; the graph stays."""
    encoder, decoder = clone(model), clone(model)
    cross = cross_names(model)
    keep_outputs(encoder, cross)
    values = {value.name: value for value in decoder.graph.outputs}
    for name in cross:
        made = values[name]
        cut = ir.Value(name=name, type=made.type, shape=made.shape)
        made.name = f"{name}/made"
        reroute(uses_of(made), cut)
        decoder.graph.inputs.append(cut)
    keep_outputs(decoder, [value.name or "" for value in model.graph.outputs if value.name not in cross])
    for half in (encoder, decoder):
        tidy(half)
        drop_idle_inputs(half)
    return encoder, decoder


def cross_names(model: ir.Model) -> list[str]:
    """Return the names of the keys and values that the encoder gives; [] of any other graph."""
    given = {value.name for value in model.graph.outputs}
    names: list[str] = []
    while (name := CROSS.format(layer=len(names) // 2, kind=("key", "value")[len(names) % 2])) in given:
        names.append(name)
    return names


def share_weights(encoder: ir.Model, decoder: ir.Model, path: Path) -> None:
    """Let both halves read the large weights that they have in common from one file, in place; none, no file.

    A table of embeddings is a quarter of a small T5: it is stored once, whatever the halves call it.
    """
    ours, theirs = _group_by_content(encoder), _group_by_content(decoder)
    common = [content for content in ours if content in theirs]
    if not common:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for content in common:
            readers = [*ours[content], *theirs[content]]
            tensor = readers[0].const_value
            assert tensor is not None
            file.write(b"\0" * (-file.tell() % PAGE))
            offset = file.tell()
            file.write(tensor.tobytes())
            shape = ir.Shape(tuple(tensor.shape.numpy()))
            for value in readers:
                value.const_value = ir.ExternalTensor(
                    path.name,
                    offset,
                    tensor.nbytes,
                    tensor.dtype,
                    shape=shape,
                    name=value.name or "",
                    base_dir=path.parent,
                )


Content = tuple[ir.DataType, tuple[int, ...], bytes]
"""Type, shape and digest of a tensor."""


def _group_by_content(model: ir.Model) -> dict[Content, list[ir.Value]]:
    """Return the large weights of a graph: what they hold -> the initializers that hold it."""
    groups: dict[Content, list[ir.Value]] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= LEAST_SHARED:
            shape = tuple(int(size) for size in tensor.shape.numpy())
            content = tensor.dtype, shape, hashlib.sha256(tensor.tobytes()).digest()
            groups.setdefault(content, []).append(value)
    return groups


def same_content(one: ir.Value, other: ir.Value) -> bool:
    """Return whether two initializers hold the same numbers in the same form."""
    a, b = one.const_value, other.const_value
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a is b or a.tobytes() == b.tobytes()


def cache_of_decoder(model: ir.Model) -> KvCacheSpec:
    """Return what a bundle says of the cache of a whole graph's decoder."""
    cache = find_cache(input_specs(model), SELF_PAST, SELF_PRESENT)
    assert cache is not None
    return cache


def keep_outputs(model: ir.Model, names: Iterable[str]) -> None:
    """Leave the outputs of these names, in place."""
    values = {value.name: value for value in model.graph.outputs}
    kept = [values[name] for name in names]
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)


def drop_idle_inputs(model: ir.Model) -> None:
    """Remove inputs that nothing reads, in place."""
    given = {id(value) for value in model.graph.outputs}
    for value in list(model.graph.inputs):
        if not value.uses() and id(value) not in given:
            model.graph.inputs.remove(value)


def join_graphs(model: ir.Model, other: ir.Model, prefix: str) -> None:
    """Put another graph's nodes, inputs and outputs behind the model's own, in place.

    What both hold (a table of embeddings) is there once; a name that is taken gets `prefix`.
    """
    taken = _all_values(model.graph)
    inputs, outputs, weights = list(other.graph.inputs), list(other.graph.outputs), other.graph.initializers
    for name, value in list(weights.items()):
        own = model.graph.initializers.get(name)
        del weights[name]
        if own is not None and same_content(own, value):
            value.replace_all_uses_with(own)
            continue
        if name in taken:
            value.name = f"{prefix}/{name}"
        model.graph.register_initializer(value)
    nodes = list(other.graph)
    kept = {id(value) for value in outputs}
    names = {node.name for node in model.graph}
    other.graph.inputs.clear()
    other.graph.outputs.clear()
    other.graph.remove(nodes)
    for node in nodes:
        if node.name in names:
            node.name = f"{prefix}/{node.name}"
        for value in node.outputs:
            if id(value) not in kept and value.name in taken:
                value.name = f"{prefix}/{value.name}"
        model.graph.append(node)
    model.graph.inputs.extend(inputs)
    model.graph.outputs.extend(outputs)
    model.opset_imports.update(other.opset_imports)
    for key, function in other.functions.items():
        model.functions.setdefault(key, function)


def _all_values(graph: ir.Graph) -> set[str | None]:
    made = (value.name for node in graph for value in node.outputs)
    return {*made, *graph.initializers, *(value.name for value in graph.inputs)}
