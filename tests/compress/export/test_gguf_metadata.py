"""A configuration and sizes of tensors under GGUF's keys: each number in its place, and what no key says."""

from __future__ import annotations

from typing import Any

import pytest

from compress.export.gguf_metadata import Metadata, describe_config, end_with_window
from compress.export.gguf_tensors import GgufForm, TensorEntry

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
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
SCALED = {"rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ATTENTION = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
DENSE = {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
EXPERTS = {"ffn_gate_inp": (8, 64), "ffn_up_exps": (8, 32, 64), "ffn_down_exps": (8, 64, 32)}


def list_entries(*blocks: dict[str, tuple[int, ...]]) -> list[TensorEntry]:
    table = [TensorEntry("embed", "token_embd.weight", (100, 64), matrix=True)]
    return table + [
        TensorEntry(stem, f"blk.{i}.{stem}.weight", shape)
        for i, own in enumerate(blocks)
        for stem, shape in own.items()
    ]


def describe(*blocks: dict[str, tuple[int, ...]], listed: bool = True, **changes: Any) -> Metadata:
    entries = list_entries(*(blocks or (ATTENTION | DENSE,) * 2))
    return describe_config(LLAMA | changes, entries, GgufForm("any", listed=listed))


def test_the_numbers_of_a_dense_model() -> None:
    made = describe()
    values = made.values
    assert not made.problems and not made.notes
    assert values["block_count"] == 2 and values["vocab_size"] == 100 and values["feed_forward_length"] == 96
    assert values["attention.head_count_kv"] == 2 and values["attention.key_length"] == 16
    assert values["rope.freq_base"] == 5e5 and values["rope.dimension_count"] == 16
    assert values["attention.layer_norm_rms_epsilon"] == 1e-5 and values["context_length"] == 512
    assert not any(key.startswith(("expert", "ssm")) for key in values)


def test_experts_are_told_by_their_tensors() -> None:
    values = describe(ATTENTION | DENSE, ATTENTION | EXPERTS, num_experts_per_tok=2, norm_topk_prob=True).values
    assert (values["expert_count"], values["expert_used_count"], values["expert_feed_forward_length"]) == (8, 2, 32)
    assert values["leading_dense_block_count"] == 1 and values["feed_forward_length"] == 96
    assert values["expert_weights_norm"] is True


def test_a_hybrid_lists_the_heads_of_its_layers() -> None:
    recurrence = {"ssm_a": (4,), "ssm_conv1d": (96, 4), "ssm_out": (64, 64), "ssm_in": (132, 64)}
    blocks = (recurrence | DENSE, ATTENTION | DENSE)
    values = describe(*blocks, mamba_d_state=16, mamba_n_groups=1).values
    assert values["attention.head_count_kv"] == [0, 2] and values["ssm.conv_kernel"] == 4
    assert (values["ssm.inner_size"], values["ssm.time_step_rank"], values["ssm.state_size"]) == (64, 4, 16)
    assert describe(*blocks, listed=False).values["attention.head_count_kv"] == 2


def test_latent_keys_are_told_twice() -> None:
    latent = {"attn_q": (96, 64), "attn_kv_a_mqa": (40, 64), "attn_k_b": (4, 32, 16), "attn_v_b": (4, 16, 32)}
    sizes = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    values = describe(latent | DENSE, latent | DENSE, **sizes).values
    assert (values["attention.key_length"], values["attention.key_length_mla"]) == (40, 24)
    assert values["attention.head_count_kv"] == 1 and values["rope.dimension_count"] == 8


def test_scaled_rope() -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = describe(rope_parameters=LLAMA3).factors["rope_freqs.weight"]
    config = LlamaConfig(**LLAMA | {"rope_parameters": LLAMA3})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / torch.from_numpy(factors), scaled)
    linear = describe(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}).values
    assert linear["rope.scaling.type"] == "linear" and linear["rope.scaling.factor"] == 2.0


def test_a_window_is_written_or_ends_the_context() -> None:
    kinds = ["full_attention", "sliding_attention"]
    made = describe(sliding_window=32, layer_types=kinds)
    assert made.values["attention.sliding_window"] == 32
    assert made.values["attention.sliding_window_pattern"] == [False, True]
    end_with_window(made, 32, "any")
    assert made.values["context_length"] == 32 and "attention.sliding_window" not in made.values
    assert "ends with it, at 32 tokens" in made.notes[0]
    assert "attention.sliding_window" not in describe(sliding_window=32, layer_types=["full_attention"] * 2).values


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4}, "rope is scaled by dynamic"),
        (SCALED | {"rope_type": "yarn", "attention_factor": 2.0}, "yarn's attention_factor is 2.0"),
    ],
)
def test_what_no_key_says_is_refused(rope: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in describe(rope_parameters=rope).problems)
