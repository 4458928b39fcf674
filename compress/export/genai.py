"""genai_config.json, by which onnxruntime-genai runs the folder of an exported decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compress.errors import ExportError
from compress.graph.specs import cache_of
from runtime.bundle.manifest import PAST, PRESENT

FILE = "genai_config.json"
TYPE = "decoder"
"""onnxruntime-genai's name for any decoder whose graph takes tokens, a mask and a cache."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SAMPLING: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "early_stopping": True,
    "min_length": 0,
}
"""Search options and what they are where generation_config.json does not say."""


def genai_config(
    graph: ir.Model,
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    filename: str = "model.onnx",
) -> dict[str, Any]:
    """Return what onnxruntime-genai needs to know of a decoder's graph: the contents of genai_config.json.

    `config` and `generation`: the contents of config.json and generation_config.json, the second one's token ids and
    sampling settings going first. `max_length`: tokens of prompt and answer together, by default those that the model
    was made for. Raises ExportError for a graph without a cache, or a config that names no length or end of text.
    """
    cache = cache_of(graph)
    if cache is None:
        raise ExportError(f"{FILE}: the graph has no key-value cache, which onnxruntime-genai needs")
    settings = {**config, **{name: value for name, value in (generation or {}).items() if value is not None}}
    length = max_length or config.get("max_position_embeddings") or config.get("n_positions")
    if not length:
        raise ExportError(f"{FILE}: config.json names no max_position_embeddings; give max_length")
    if settings.get("eos_token_id") is None:
        raise ExportError(f"{FILE}: neither config.json nor generation_config.json names an eos_token_id")
    tokens = {name: settings[name] for name in TOKENS if settings.get(name) is not None}
    ends = tokens["eos_token_id"]
    tokens.setdefault("pad_token_id", ends[0] if isinstance(ends, list) else ends)
    tokens.setdefault("bos_token_id", tokens["pad_token_id"])
    search = {name: default if settings.get(name) is None else settings[name] for name, default in SAMPLING.items()}
    return {
        "model": {
            **tokens,
            "type": TYPE,
            "context_length": int(length),
            "vocab_size": _read_vocabulary_size(graph),
            "decoder": {
                "filename": filename,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "head_size": cache.head_size,
                "hidden_size": int(settings.get("hidden_size") or settings.get("n_embd") or 0),
                "num_attention_heads": int(
                    settings.get("num_attention_heads") or settings.get("n_head") or cache.n_heads
                ),
                "num_hidden_layers": cache.n_layers,
                "num_key_value_heads": cache.n_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    **_name_cache_tensors("past", PAST),
                },
                "outputs": {"logits": "logits", **_name_cache_tensors("present", PRESENT)},
            },
        },
        "search": {**search, "max_length": int(length), "past_present_share_buffer": cache.shared_buffer},
    }


def write_genai_config(folder: Path, graph: ir.Model, max_length: int | None = None) -> Path:
    """Write genai_config.json beside model.onnx, from config.json and generation_config.json there. ExportError."""
    config, generation = (_read_json(folder / name) for name in ("config.json", "generation_config.json"))
    if config is None:
        raise ExportError(f"{folder}: has no config.json, from which {FILE} is made")
    path = folder / FILE
    text = json.dumps(genai_config(graph, config, generation, max_length), indent=2, sort_keys=True)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _read_json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _read_vocabulary_size(graph: ir.Model) -> int:
    logits = next(value for value in graph.graph.outputs if value.name == "logits")
    size = logits.shape[-1] if logits.shape is not None else None
    if not isinstance(size, int):
        raise ExportError(f"{FILE}: the graph does not say how many logits a token gets")
    return size


def _name_cache_tensors(prefix: str, pattern: str) -> dict[str, str]:
    """Return the names of cached keys and values as onnxruntime-genai's settings, with %d for the layer."""
    return {f"{prefix}_{kind}_names": pattern.format(layer="%d", kind=kind) for kind in ("key", "value")}
