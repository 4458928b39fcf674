"""Read what a graph takes and gives: its inputs and outputs as the manifest has them, a decoder's key-value cache."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from runtime.bundle.manifest import CROSS, SELF_PRESENT, KvCacheSpec
from runtime.bundle.tensors import TensorSpec

PAST = "past_key_values.{layer}.{kind}"
PRESENT = "present.{layer}.{kind}"
POSITIONS = "position_ids"
"""The value, inside the graph, that holds each token's position."""
MAX_LENGTH = "max_length"
"""Key of a model's metadata: the longest sequence it was made for."""
ATTENTION = "GroupQueryAttention"
CACHE_OUTPUTS = re.compile(
    "|".join(p.replace(".", r"\.").format(layer=r"\d+", kind="(key|value)") for p in (PRESENT, SELF_PRESENT, CROSS))
)
"""Names of outputs that are keys and values."""


def input_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    return _make_specs(model.graph.inputs)


def specs_fed(model: ir.Model, float_inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return what a graph reads: what the float graph does, but for a decoder, which may keep fewer keys and values."""
    keeps = any(is_cache(value.name or "") for value in model.graph.outputs)
    return input_specs(model) if keeps else float_inputs


def output_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    return _make_specs(model.graph.outputs)


def _make_specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """Return the values' specs. ValueError for one whose type or number of dimensions the graph does not say."""
    specs = []
    for value in values:
        if value.shape is None or value.dtype is None:
            raise ValueError(f"{value.name}: the graph does not say its type and shape")
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        specs.append(TensorSpec(value.name or "", str(value.dtype.numpy()), shape))
    return tuple(specs)


def past_name(layer: int, kind: str) -> str:
    return PAST.format(layer=layer, kind=kind)


def present_name(layer: int, kind: str) -> str:
    return PRESENT.format(layer=layer, kind=kind)


def is_cache(name: str) -> bool:
    """Return whether an output of that name is of keys and values, a decoder's or an encoder-decoder's."""
    return CACHE_OUTPUTS.fullmatch(name) is not None


def n_cached_layers(model: ir.Model) -> int:
    """Count the layers of the graph that keep keys and values; 0 where it is no decoder."""
    names = {value.name for value in model.graph.inputs}
    count = 0
    while past_name(count, "key") in names:
        count += 1
    return count


def cache_of(model: ir.Model) -> KvCacheSpec | None:
    """Return what a bundle says of a decoder's cache; None for a graph without one."""
    count = n_cached_layers(model)
    if not count:
        return None
    shared = any(node.op_type == ATTENTION for node in model.graph)
    return describe_cache(model, count, PAST, PRESENT, shared)


def describe_cache(model: ir.Model, n_layers: int, past: str, present: str, shared: bool = False) -> KvCacheSpec:
    """Return what a bundle says of a cache whose inputs and outputs have such names, by its first layer's keys.

    `past`, `present`: with {layer} and {kind}. `shared`: keys and values of earlier and new tokens lie in one buffer.
    """
    name = past.format(layer=0, kind="key")
    first = next(value for value in model.graph.inputs if value.name == name)
    assert first.shape is not None and first.dtype is not None
    heads, size = first.shape[1], first.shape[3]
    assert isinstance(heads, int) and isinstance(size, int)
    return KvCacheSpec(n_layers, heads, size, str(first.dtype.numpy()), shared, past, present)
