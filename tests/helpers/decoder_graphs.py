"""Tiny random language models of the architectures that people use, and their graphs, each exported once a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import nn

from compress.export.decoder import export_decoder
from compress.graph.run import clone, open_session
from compress.graph.specs import cache_pairs

VOCABULARY = 101
LENGTH = 64
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
GPT2 = {
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": VOCABULARY,
    "n_positions": LENGTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT: dict[str, Any] = {
    name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")
}
CONFIGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("LlamaConfig", 2, {**SIZES, "attention_bias": True}),
    "qwen2": ("Qwen2Config", 1, SIZES),
    "qwen3": ("Qwen3Config", 1, {**SIZES, "head_dim": 16}),
    "mistral": ("MistralConfig", 1, {**SIZES, "sliding_window": 6}),
    "gemma2": ("Gemma2Config", 1, {**SIZES, **GEMMA}),
    "gemma3": ("Gemma3TextConfig", 2, {**SIZES, **GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3Config", 1, SIZES),
    "phi": ("PhiConfig", 1, {**SIZES, "partial_rotary_factor": 0.5}),
    "gpt2": ("GPT2Config", 1, GPT2),
    "opt": ("OPTConfig", 1, {**OPT, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("BloomConfig", 1, {"hidden_size": 64, "n_head": 4, "vocab_size": VOCABULARY}),
    "mamba": ("MambaConfig", 1, {"hidden_size": 32, "vocab_size": VOCABULARY, "state_size": 4}),
}
"""Name -> (transformers' configuration, layers, its fields)."""
ALWAYS = ("llama", "gemma3", "gpt2")
"""Between them: biases, a window, norms of queries and keys, a table that is tied, learned positions, Conv1D."""


def kinds(names: Iterable[str], always: Collection[str] = ALWAYS) -> list[Any]:
    """Return parameters of a test; those beside `always`, five seconds each, run if COMPRESS_ARCHITECTURES is set."""
    unset = not os.environ.get("COMPRESS_ARCHITECTURES")
    more = pytest.mark.skipif(unset, reason="needs COMPRESS_ARCHITECTURES=1: five seconds for each architecture")
    return [pytest.param(name, marks=[] if name in always else [more]) for name in names]


@cache
def make(kind: str) -> nn.Module:
    """The model with weights that make its layers matter."""
    import transformers

    name, layers, fields = CONFIGS[kind]
    count = {"n_layer" if "GPT2" in name or "Bloom" in name else "num_hidden_layers": layers}
    return build(getattr(transformers, name)(**fields, **count))


def build(config: Any) -> nn.Module:
    """Make a random model whose layers all matter."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.eval().requires_grad_(False).parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model


@cache
def _exported(kind: str) -> ir.Model:
    return export_decoder(make(kind))


def exported(kind: str) -> ir.Model:
    """A graph of one's own."""
    return clone(_exported(kind))


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCABULARY, (rows, length))


def torch_logits(kind: str, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """All logits in one call without a cache, positions counted from the mask."""
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    with torch.no_grad():
        logits: np.ndarray = make(kind)(
            **{name: torch.from_numpy(array) for name, array in feeds.items()}
        ).logits.numpy()
    return logits


class Decoder:
    """A graph with its cache, called as a runtime would. `length`: of its buffers, where it has any; 0: they grow."""

    def __init__(
        self, model: ir.Model, length: int = 0, open_: Callable[..., ort.InferenceSession] = open_session
    ) -> None:
        self.session = open_(model, threads=1)
        self.pairs = cache_pairs(model)
        self.length = length
        self.past: dict[str, np.ndarray] = {}

    def start(self, rows: int) -> None:
        shapes = {value.name: value for value in self.session.get_inputs()}
        for past in self.pairs:
            dtype = np.int8 if shapes[past].type == "tensor(int8)" else np.float32
            free = {"length": self.length}
            sizes = [size if isinstance(size, int) else free.get(size, 0) for size in shapes[past].shape[1:]]
            self.past[past] = np.zeros((rows, *sizes), dtype)

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Logits [B, S, V]; the present becomes the past."""
        names = [value.name for value in self.session.get_outputs()]
        found = dict(
            zip(names, self.session.run(names, {"input_ids": ids, "attention_mask": mask, **self.past}), strict=True)
        )
        logits: np.ndarray = found.pop("logits")
        self.past = {name.replace("present", "past_key_values"): value for name, value in found.items()}
        return logits


def stepwise(decoder: Decoder, ids: np.ndarray, mask: np.ndarray, prompt: int) -> np.ndarray:
    """Logits of every token: the first `prompt` at once, the others one by one."""
    decoder.start(len(ids))
    parts = [decoder(ids[:, :prompt], mask[:, :prompt])]
    for at in range(prompt, ids.shape[1]):
        parts.append(decoder(ids[:, at : at + 1], mask[:, : at + 1]))
    return np.concatenate(parts, axis=1)


def relative(expected: np.ndarray, got: np.ndarray) -> float:
    return float(np.abs(expected - got).max() / np.abs(expected).max())
