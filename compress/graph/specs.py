"""Read what a graph takes and gives: its inputs and outputs as the manifest has them, a decoder's key-value cache."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from runtime.bundle.manifest import CROSS, PAST, PRESENT, SELF_PRESENT, KvCacheSpec, find_cache
from runtime.bundle.tensors import TensorSpec
from runtime.encode.language import CACHE

POSITIONS = "position_ids"
"""The value, inside the graph, that holds each token's position."""
MAX_LENGTH = "max_length"
"""Key of a model's metadata: the longest sequence it was made for."""
ATTENTION = "GroupQueryAttention"
CACHE_OUTPUTS = re.compile(
    "|".join(p.replace(".", r"\.").format(layer=r"\d+", kind="[a-z0-9_]+") for p in (PRESENT, SELF_PRESENT, CROSS))
)
"""Names of outputs that the next call reads."""


def input_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    """Return the specs of what has to be given. ValueError."""
    return _make_specs([value for value in model.graph.inputs if not value.is_initializer()])


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
    """Return whether an output of that name is of the cache, a decoder's or an encoder-decoder's."""
    return CACHE_OUTPUTS.fullmatch(name) is not None


def attention_layers(model: ir.Model) -> list[int]:
    """Return the layers of a decoder's graph that keep keys and values, by their numbers."""
    names = {value.name for value in model.graph.inputs}
    return [n for n in range(len(names)) if {past_name(n, "key"), past_name(n, "value")} <= names]


def cache_pairs(model: ir.Model) -> dict[str, str]:
    """Return what a decoder's graph keeps, past -> present; {} where it is no decoder."""
    cache = cache_of(model)
    return {} if cache is None else dict(cache.pairs())


def cache_of(model: ir.Model) -> KvCacheSpec | None:
    """Return what a bundle says of a decoder's cache; None for a graph without one."""
    specs = _make_specs([value for value in model.graph.inputs if (value.name or "").startswith(CACHE)])
    return find_cache(specs, shared=shared_pasts(model))


def shared_pasts(model: ir.Model) -> list[str]:
    """Return the names of the pasts that are one buffer with their presents."""
    nodes = [node for node in model.graph if node.op_type == ATTENTION]
    names = [value.name or "" for node in nodes for value in node.inputs if value is not None]
    return [name for name in names if name.startswith(CACHE)]
