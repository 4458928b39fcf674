"""Tiny random decoders whose layers keep something else than keys and values of one shape, by their configurations."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

VOCABULARY = 101
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
SSM = {
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3n_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "intermediate_size": [96] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "deepseek_v3": {
        **LATENT,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {
        **LATENT,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "olmo_hybrid": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minimax": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mimo_v2_flash": {
        **EXPERTS,
        "head_dim": 16,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "sliding_window": 6,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "jamba": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "falcon_h1": {**SSM, "mamba_d_ssm": 128},
    "bamba": {**SSM, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **SSM,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention"],
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 16,
        "num_hidden_layers": 3,
    },
    "zamba2": {
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "attention_head_dim": 32,
        "num_mem_blocks": 1,
    },
    "deepseek_v32": {
        **LATENT,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 16,
    },
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 6, "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 64, "context_length": 64},
    "kimi_linear": {**LATENT, **EXPERTS, "num_experts": 4, "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16, "linear_num_heads": 4, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {
        **LATENT,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "minicpm3": {**LATENT, "num_key_value_heads": 4},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    "zaya": {},
    "longcat_flash": {},
    "youtu": {**LATENT, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {**DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "glm_moe_dsa": {
        **LATENT,
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 16,
    },
    "bailing_hybrid": {**LATENT, **EXPERTS, "num_experts": 4, "num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"], "n_group": 1, "topk_group": 1, "linear_head_dim": 16, "linear_num_heads": 4},
    "zamba": {
        "mamba_d_state": 8,
        "n_mamba_heads": 2,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
        "attention_head_dim": 32,
    },
}


@cache
def make(kind: str) -> nn.Module:
    """The model with weights that make its layers matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**SIZES, **CONFIGS[kind]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.eval().requires_grad_(False).parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model
