"""Tiny random models of the architectures people use, from their configurations; and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 8}
_MIXTURE = {**_GROUPED, "num_experts_per_tok": 2}
_GPT2 = {k: v for k, v in _SMALL.items() if k.endswith("_id") or k == "vocab_size"}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _HEADS),
    "mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _HEADS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _HEADS),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _HEADS),
    "phi": ("PhiForCausalLM", "PhiConfig", _GROUPED),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_MIXTURE, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**_MIXTURE, "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_MIXTURE, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 24},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **_MIXTURE,
            "head_dim": 8,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "bert": ("BertModel", "BertConfig", _SMALL),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 61, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**{k: v for k, v in _SMALL.items() if "size" in k or "num" in k}, "image_size": 16, "patch_size": 8},
    ),
}
"""Name -> (model class, configuration class, arguments)."""


def build(name: str, attention: str = "eager", seed: int = 0, **more: Any) -> nn.Module:
    """In float64, in eval mode, its norms' weights and all biases random."""
    model_class, config_class, arguments = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(hf, config_class)(**arguments, **more, attn_implementation=attention)
    config._experts_implementation = "eager"
    module = getattr(hf, model_class)(config).double().eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.copy_(torch.rand_like(parameter) + 0.5)
        else:
            parameter.mul_(4)  # so that attention and activations are not almost linear
    return module


def feeds(name: str, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn((2, 3, 16, 16), generator=generator, dtype=torch.float64)}
    ids = torch.randint(3, 61, (2, 8), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def run(module: nn.Module, name: str) -> Tensor:
    with torch.no_grad():
        return module(**feeds(name))[0]
