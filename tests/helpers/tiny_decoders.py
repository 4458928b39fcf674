"""Tiny random decoders whose layers keep something else than keys and values of one shape, by their configurations."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from decoder_graphs import VOCABULARY, build
from tiny_lm import write_tokenizer
from torch import nn

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
HYBRID = ["linear_attention", "full_attention"]
DELTA: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": HYBRID,
}
SSM: dict[str, Any] = {
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
SLIDING: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 6,
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "olmo_hybrid": {**DELTA, "linear_num_value_heads": 2},
    "kimi_linear": {
        **LATENT,
        **EXPERTS,
        "num_experts": 4,
        "num_hidden_layers": 2,
        "layer_types": HYBRID,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gemma4_text": {**SLIDING, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "deepseek_v2": {**LATENT, **ROUTED, "first_k_dense_replace": 0},
    "deepseek_v3": {**LATENT, **ROUTED},
    "deepseek_v32": {**LATENT, **ROUTED, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
    "mimo_v2_flash": {**ROUTED, "head_dim": 16, "v_head_dim": 8, "swa_head_dim": 16, "swa_v_head_dim": 8},
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "num_hidden_layers": 1,
    },
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "falcon_h1": {**SSM, "mamba_d_ssm": 64, "num_hidden_layers": 1},
    "granitemoehybrid": {
        **SSM,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"],
    },
    "minimax": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": HYBRID},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 6, "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32, "context_length": 64},
}
"""transformers' name of a configuration -> its fields beside SIZES."""
REFUSED = ("minimax", "recurrent_gemma", "rwkv")
"""Those of which no graph is made."""


@cache
def make(kind: str) -> nn.Module:
    return _build(kind)


def tiny_folder(kind: str, folder: Path) -> None:
    """Write the model as a folder of transformers, of 64 channels, with the tokenizer of `tiny_lm`."""
    _build(kind, hidden_size=64).save_pretrained(folder)
    write_tokenizer(folder)


def _build(kind: str, **sizes: Any) -> Any:
    """The model with weights that make its layers matter."""
    from transformers import AutoConfig

    return build(AutoConfig.for_model(kind, **{**SIZES, **CONFIGS[kind], **sizes}))
