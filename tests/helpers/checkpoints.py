"""Tiny random models with random quantized weights, as passes over blocks would leave them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from compress.blocks.layers import layer_type, weight_shape
from compress.blocks.materialise import copy_without_weights, memory_store
from compress.blocks.store import Packed, WeightStore, pack_tensors
from compress.blocks.streamed import StreamedModel
from compress.facts import Structure
from compress.formats.schemes import PRESETS, Scheme
from compress.models.facts import architecture, is_layer, plain
from compress.rounding.grid import round_to_grid
from compress.rounding.quantized_weight import QuantizedWeight

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
FEEDS: dict[str, dict[str, Any]] = {
    "feature-extraction": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ((8,), "int64")),
    "text-generation": dict.fromkeys(("input_ids", "attention_mask"), ((8,), "int64")),
}
"""Task -> input -> shape and dtype of a sample."""
IDS = torch.arange(1, 19).reshape(2, 9)


def scheme(name: str, group: int = 32) -> Scheme:
    """A preset, its groups small enough for a tiny model."""
    found = PRESETS[name]
    return found.with_group(group) if found.weights.group_size > 0 and found.weights.kind == "int" else found


def decoder(kind: str = "Llama", **more: Any) -> nn.Module:
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **special, **more})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def linears(module: nn.Module, but: tuple[str, ...] = ("lm_head", "classifier", "decoder")) -> list[str]:
    found = [n for n, part in module.named_modules() if is_layer(part) and layer_type(part) in ("Linear", "Conv1D")]
    return [name for name in found if not any(word in name for word in but)]


def random_weight(shape: tuple[int, int], chosen: Scheme, rng: np.random.Generator) -> QuantizedWeight:
    """The full range of integers, scales of both signs where they may be, zero points that touch both ends."""
    weights, (rows, columns) = chosen.weights, shape
    if weights.kind == "float" and weights.group_size > 0:  # scales that the format can hold
        return round_to_grid(torch.from_numpy(rng.normal(size=shape).astype(np.float32) / 20), weights)
    groups = columns // weights.group_size if weights.group_size > 0 else 1
    scales = rng.uniform(0.5, 1.5, (1, 1) if weights.group_size == 0 else (rows, groups)) / 2**weights.bits / 4
    if weights.kind == "float":
        values = (rng.normal(size=shape) * 64).astype(ml_dtypes.float8_e4m3fn)
        return QuantizedWeight(values, scales.astype(np.float32), None, 8, weights.group_size)
    low, high = weights.integer_range
    values = rng.integers(low, high + 1, shape).astype(np.int8 if weights.symmetric else np.uint8)
    values[0, :2] = low, high
    if weights.symmetric:
        scales *= rng.choice([-1, 1], scales.shape)
        return QuantizedWeight(values, scales.astype(np.float32), None, weights.bits, weights.group_size)
    zero_points = rng.integers(0, high + 1, scales.shape).astype(np.uint8)
    zero_points[:2, 0] = 0, high
    return QuantizedWeight(values, scales.astype(np.float32), zero_points, weights.bits, weights.group_size)


def streamed(module: nn.Module, schemes: Mapping[str, Scheme], work: Path, **more: Any) -> StreamedModel:
    """`module` with random weights for the layers of `schemes`, which lie in a file under `work`."""
    rng, parts = np.random.default_rng(0), {plain(n): part for n, part in module.named_modules()}
    held = memory_store(module)
    entries, tensors = {name: held.read(name) for name in held.names() if name not in held.tied}, {}
    for layer, chosen in schemes.items():
        weight = random_weight(weight_shape(parts[layer]), chosen, rng)
        tensors |= pack_tensors(layer, weight)
        zeros, conv1d = weight.zero_points is not None, type(parts[layer]).__name__ == "Conv1D"
        file = work / "finished.safetensors"
        stored = tuple(weight.stored)
        entries[f"{layer}.weight"] = Packed(file, layer, weight.bits, weight.group_size, zeros, conv1d, stored=stored)
    work.mkdir(parents=True, exist_ok=True)
    save_file(tensors, work / "finished.safetensors")
    build = functools.partial(copy.deepcopy, copy_without_weights(module))
    scales = dict.fromkeys((n for n, s in schemes.items() if s.activations and s.activations.has_stored_scale), 0.02)
    given: dict[str, Any] = {"schemes": schemes, "activation_scales": scales, "architecture": architecture(module)}
    return StreamedModel(build, WeightStore(entries, held.tied), Structure(()), {}, **(given | more))
