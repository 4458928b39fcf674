"""A config.json under GGUF's keys: each number in its place, and refusals of what no key says."""

from __future__ import annotations

from typing import Any

import pytest

from compress.export.gguf_metadata import ARCHITECTURES, Metadata, describe_config

LLAMA: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def describe(kind: str, **changes: Any) -> Metadata:
    return describe_config(LLAMA | changes, ARCHITECTURES[kind])


def test_the_numbers_of_a_llama() -> None:
    made = describe("llama")
    values = made.values
    assert not made.problems and not made.notes
    assert values["attention.head_count_kv"] == 2 and values["attention.key_length"] == 16
    assert values["rope.freq_base"] == 5e5 and values["rope.dimension_count"] == 16
    assert values["attention.layer_norm_rms_epsilon"] == 1e-5 and values["context_length"] == 512


def test_scaled_rope() -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = describe("llama", rope_parameters=LLAMA3).factors["rope_freqs.weight"]
    config = LlamaConfig(**LLAMA | {"rope_parameters": LLAMA3})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / torch.from_numpy(factors), scaled)
    linear = describe("qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}).values
    assert linear["rope.scaling.type"] == "linear" and linear["rope.scaling.factor"] == 2.0


def test_a_window_is_written_or_ends_the_context() -> None:
    kinds = ["full_attention", "sliding_attention"]
    gemma = {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 32, "query_pre_attn_scalar": 16, "layer_types": kinds}
    values = describe("gemma2", tie_word_embeddings=True, **gemma).values
    assert values["attention.sliding_window"] == 32 and values["attention.sliding_window_pattern"] == [False, True]
    mistral = describe("mistral", sliding_window=128)
    assert mistral.values["context_length"] == 128 and "ends with it, at 128 tokens" in mistral.notes[0]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"hidden_act": "relu"}, "its activation is relu"),
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier: 0.5, which llama.cpp's llama has no key for"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "turns 8 of a head's 16 rows",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope is scaled by dynamic"),
        ("qwen3", {"rope_parameters": LLAMA3}, "llama.cpp's qwen3 does not read"),
        ("qwen2", {"head_dim": 32}, "4 heads of 32 are not the width 64"),
        ("gemma2", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8, and llama.cpp's gemma2 computes with 16"),
        ("gemma2", {"tie_word_embeddings": False}, "llama.cpp's gemma2 takes the embeddings"),
        ("llama", {"vocab_size": None}, "no vocab_size"),
        (
            "qwen3_moe",
            {"norm_topk_prob": False},
            "norm_topk_prob is False, and llama.cpp's qwen3moe computes with True",
        ),
    ],
)
def test_what_no_key_says_is_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in describe(kind, **changes).problems)
