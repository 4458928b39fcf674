"""A causal language model as one float graph with an explicit key-value cache: prefill, decoding, batches, padding.

Inputs: input_ids [batch, sequence], attention_mask [batch, total] (int64, 1 where a token is; total = past + sequence),
past_key_values.{layer}.key and .value [batch, kv_heads, past, head_size]. Outputs: logits [batch, sequence, vocab],
present.{layer}.key and .value [batch, kv_heads, total, head_size]. Positions are counted from the mask, so that padding
may stand on the left.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compress.errors import ExportError
from compress.export.onnx import Weight, export_program
from compress.export.repeated import Reread, repeat_blocks
from compress.graph.edit import append, initializer, reroute, tidy, uses_of
from compress.graph.layers import WRAPPER, find_layers, node_scope
from compress.graph.specs import MAX_LENGTH, POSITIONS, past_name, present_name
from compress.graph.stored import StoredTensor, make_stored_weight
from compress.structure.alike import cut_chain

EXAMPLE = {"batch": 2, "sequence": 3, "past": 5}
"""Sizes that the exporter traces with: all above 1, which it would fix, and their sum unlike any of them."""


@dataclass(frozen=True)
class CacheShape:
    """What each layer keeps for a token: keys and values of [n_heads, head_size] each."""

    n_layers: int
    n_heads: int
    head_size: int


class CachedDecoder(nn.Module):
    """The model as a function of tensors: the past comes in, and the present goes out, as a flat list of tensors."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for index in range(0, len(past), 2):
            cache.update(past[index], past[index + 1], index // 2)
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask}
        # without them the model counts positions from the mask itself
        if "position_ids" in inspect.signature(self.wrapped.forward).parameters:
            feeds["position_ids"] = position_ids
        result = self.wrapped(**feeds, past_key_values=cache, use_cache=True, return_dict=True)
        layers = result.past_key_values.layers
        return result.logits, [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def export_decoder(
    module: nn.Module, opset: int = 21, weights: Mapping[str, Weight] | None = None, repeat: bool = True
) -> ir.Model:
    """Export a transformers causal language model (eager attention, eval mode) as a float32 graph with a cache.

    Layers keep the names of their modules. A table that embeds tokens and makes logits is one initializer until
    either is quantized. `weights`: as of `export_program`; then, with `repeat`, a deep model's first blocks alone are
    exported, and the others are made like them (`repeat_blocks`). Raises ExportError: a cache that is not keys and
    values of one shape in every layer, or what the exporter said.
    """
    from onnxscript.optimizer import fold_constants_ir

    with cut_chain(module, repeated=True) if weights is not None and repeat else nullcontext() as cut:
        model = _export_cached(module, opset, weights)
    if cut is not None and not repeat_blocks(model, cut, _rereading(module, weights or {})):
        model = _export_cached(module, opset, weights)
    if weights is not None:
        fold_constants_ir(model)
    _name_tied_tables(model)
    _count_positions(model)
    length = getattr(module.config, "max_position_embeddings", None) or getattr(module.config, "n_positions", None)
    if length:
        model.metadata_props[MAX_LENGTH] = str(length)
    tidy(model)
    return model


def _rereading(module: nn.Module, weights: Mapping[str, Weight]) -> Reread:
    """Return what gives the tensors of blocks that were not exported: of their files, or held by the module."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def reread(name: str, like: ir.TensorProtocol) -> ir.TensorProtocol:
        if isinstance(like, StoredTensor) and like.origin is not None:
            shape, read = weights[name]
            return make_stored_weight(name, shape, read, like.origin[1])
        return ir.tensor(held[name].detach().numpy())

    return reread


def _export_cached(module: nn.Module, opset: int, weights: Mapping[str, Weight] | None) -> ir.Model:
    with nullcontext() if weights is None else shapes_alone():
        shape = cache_shape(module)
    sizes = EXAMPLE
    batch, sequence, past = (sizes[name] for name in ("batch", "sequence", "past"))
    dims = {name: torch.export.Dim(name, min=0 if name == "past" else 1) for name in (*sizes, "total")}
    kept = torch.zeros(batch, shape.n_heads, past, shape.head_size)
    names = [(layer, kind) for layer in range(shape.n_layers) for kind in ("key", "value")]
    model = export_program(
        CachedDecoder(module).eval(),
        type(module).__name__,
        kwargs={
            "input_ids": torch.zeros(batch, sequence, dtype=torch.int64),
            "attention_mask": torch.ones(batch, past + sequence, dtype=torch.int64),
            "position_ids": torch.arange(past, past + sequence).repeat(batch, 1),
            "past": [kept.clone() for _ in names],
        },
        input_names=["input_ids", "attention_mask", POSITIONS, *(past_name(*name) for name in names)],
        output_names=["logits", *(present_name(*name) for name in names)],
        dynamic_shapes={
            "input_ids": {0: dims["batch"], 1: dims["sequence"]},
            "attention_mask": {0: dims["batch"], 1: dims["total"]},
            "position_ids": {0: dims["batch"], 1: dims["sequence"]},
            "past": [{0: dims["batch"], 2: dims["past"]} for _ in names],
        },
        opset=opset,
        weights=weights,
    )
    _declare_shapes(model, names, shape)
    return model


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Compute shapes and no values while the context is open: a module without its weights can be run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def cache_shape(module: nn.Module) -> CacheShape:
    """Return what the model keeps, found by running it on two tokens. ExportError for a cache of another kind."""
    name = type(module).__name__
    layers = _find_cache_layers(module, name)
    shapes = set()
    for index, layer in enumerate(layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.ndim == values.ndim == 4):
            raise ExportError(
                f"{name}: layer {index} keeps a {type(layer).__name__}, not keys and values; only attention with a "
                "key-value cache in every layer can be exported"
            )
        shapes |= {(tensor.shape[1], tensor.shape[3]) for tensor in (keys, values)}
    if len(shapes) != 1:
        shown = ", ".join(f"{heads} heads of {size}" for heads, size in sorted(shapes))
        raise ExportError(f"{name}: keys and values differ in shape ({shown}); the exported cache has one shape")
    heads, size = shapes.pop()
    return CacheShape(len(layers), heads, size)


def _find_cache_layers(module: nn.Module, name: str) -> Sequence[object]:
    from transformers import DynamicCache

    if "past_key_values" not in inspect.signature(module.forward).parameters:
        raise ExportError(f"{name}: its forward pass takes no past_key_values; a key-value cache cannot be exported")
    _refuse_other_layers(module, name)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    try:
        with torch.no_grad():
            result = module(
                input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=DynamicCache(), use_cache=True
            )
    except (AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError, NotImplementedError) as error:
        raise ExportError(f"{name}: does not run with a plain key-value cache: {error}") from error
    cache = getattr(result, "past_key_values", None)
    if not isinstance(cache, DynamicCache) or not cache.layers:
        raise ExportError(f"{name}: gives back {type(cache).__name__} and not a filled key-value cache")
    return cache.layers


def _refuse_other_layers(module: nn.Module, name: str) -> None:
    """Refuse what transformers itself would keep another cache for: states of convolutions, linear attention, ..."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    config: Any = module.config
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if not isinstance(layer, DynamicLayer):  # a sliding window's is one too: it becomes a full cache and a mask
            raise ExportError(
                f"{name}: layer {index} keeps a {type(layer).__name__}, not keys and values; only attention with a "
                "key-value cache in every layer can be exported"
            )


def _name_tied_tables(model: ir.Model) -> None:
    """Name embedding tables after the embedding, in place, where the exporter took the name of a layer tied to it."""
    for layer in find_layers(model):
        scope = node_scope(layer.node)
        if layer.op == "Gather" and scope and layer.name != scope:
            name = f"{WRAPPER}{scope}.weight"
            if name not in model.graph.initializers:
                _rename_initializer(model, layer.weight, name)


def _rename_initializer(model: ir.Model, value: ir.Value, name: str) -> None:
    tensor = value.const_value
    assert tensor is not None
    del model.graph.initializers[value.name or ""]
    value.name = tensor.name = name
    model.graph.register_initializer(value)


def _count_positions(model: ir.Model) -> None:
    """Compute position_ids in the graph instead of reading it: tokens before each of the last `sequence` ones."""
    positions = next(value for value in model.graph.inputs if value.name == POSITIONS)
    ids, mask = (next(v for v in model.graph.inputs if v.name == name) for name in ("input_ids", "attention_mask"))
    model.graph.inputs.remove(positions)
    one, zero = (initializer(model, f"positions/{i}", np.array([i], np.int64)) for i in (1, 0))
    axis = initializer(model, "positions/axis", np.array(1, np.int64))
    end = initializer(model, "positions/end", np.array([np.iinfo(np.int64).max], np.int64))
    count = append(model, "CumSum", [mask, axis], "positions/count")
    before = append(model, "Sub", [count, one], "positions/before")
    valid = append(model, "Max", [before, zero], "positions/valid")
    sizes = [append(model, "Shape", [v], f"positions/{n}", {"start": 1}) for v, n in ((mask, "total"), (ids, "length"))]
    start = append(model, "Sub", sizes, "positions/start")
    uses = uses_of(positions)
    positions.name = "positions/input"
    last = append(model, "Slice", [valid, start, end, one], POSITIONS)
    last.type, last.shape = positions.type, positions.shape
    reroute(uses, last)


def _declare_shapes(model: ir.Model, names: Sequence[tuple[int, str]], shape: CacheShape) -> None:
    """Set the shape of every input and output, in place, with dimensions by name."""
    sizes = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "total")}
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    for name, dims in sizes.items():
        values[name].shape = ir.Shape(dims)
    for layer, kind in names:
        values[past_name(layer, kind)].shape = ir.Shape(("batch", shape.n_heads, "past", shape.head_size))
        values[present_name(layer, kind)].shape = ir.Shape(("batch", shape.n_heads, "total", shape.head_size))
