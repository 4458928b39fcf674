"""What a GGUF file says of a model beside its tensors: a config.json's numbers, and its tensors' sizes, as GGUF's keys.

llama.cpp has a graph of its own for each architecture, which reads the keys that it knows and passes over others; so
all that a configuration says under a usual name is written. Whether that is enough, `gguf_trial` tries. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from compress.export.gguf_tensors import GgufForm, TensorEntry, count_blocks, count_turned

FULL, SLIDING = "full_attention", "sliding_attention"
_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("hidden_size", int, "embedding_length"),
    ("num_attention_heads", int, "attention.head_count"),
    ("n_group", int, "expert_group_count"),
    ("topk_group", int, "expert_group_used_count"),
    ("(num_)?experts_per_tok(en)?|moe_(top)?_?k|top_k_experts|num_selected_experts", int, "expert_used_count"),
    (
        "routed_scaling_factor|route_scale|router_scaling_factor|moe_router_scaling_factor",
        float,
        "expert_weights_scale",
    ),
    ("norm_topk_prob|route_norm|moe_renormalize", bool, "expert_weights_norm"),
    ("q_lora_rank", int, "attention.q_lora_rank"),
    ("kv_lora_rank", int, "attention.kv_lora_rank"),
    ("num_kv_shared_layers", int, "attention.shared_kv_layers"),
    ("sliding_window", int, "attention.sliding_window"),
    ("attn_logit_softcapping", float, "attn_logit_softcapping"),
    ("final_logit_softcapping", float, "final_logit_softcapping"),
    ("router_logit_softcapping", float, "router_logit_softcapping"),
    ("embedding_multiplier", float, "embedding_scale"),
    ("residual_multiplier", float, "residual_scale"),
    ("logits_scaling|logit_scale", float, "logit_scale"),
    ("attention_multiplier", float, "attention.scale"),
    ("attention_value_scale", float, "attention.value_scale"),
    ("clip_qkv", float, "attention.clamp_kqv"),
    ("alibi_bias_max", float, "attention.max_alibi_bias"),
    ("use_parallel_residual|parallel_attn", bool, "use_parallel_residual"),
    ("(mamba_|ssm_)?(d_state|state_size)|linear_key_head_dim", int, "ssm.state_size"),
    ("(mamba_)?n_groups|linear_num_key_heads", int, "ssm.group_count"),
    ("full_attention_interval", int, "full_attention_interval"),
    ("hidden_size_per_layer_input", int, "embedding_length_per_layer_input"),
    ("altup_active_idx", int, "altup.active_idx"),
    ("altup_num_inputs", int, "altup.num_inputs"),
    ("index_n_heads", int, "attention.indexer.head_count"),
    ("index_head_dim", int, "attention.indexer.key_length"),
    ("index_topk", int, "attention.indexer.top_k"),
    ("swiglu_limit", float, "swiglu_clamp_exp"),
)
"""A configuration's name for a number, as an expression, its kind, and GGUF's key for it."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class Metadata:
    """`values`: GGUF's key without the architecture -> value. `factors`: tensors of factors of rope's frequencies.

    `problems`: why the model cannot be written, as sentences; `notes`: what the user should know.
    """

    values: dict[str, Any]
    factors: dict[str, np.ndarray]
    problems: list[str]
    notes: list[str]


def describe_config(config: Mapping[str, Any], tensors: Sequence[TensorEntry], form: GgufForm) -> Metadata:
    """Translate a configuration, with the defaults of its class, and the tensors' sizes into GGUF's keys."""
    made = Metadata({}, {}, [], [])
    config = _flatten(config)
    made.values["block_count"] = count_blocks(config)
    # a model without positions has 2^20, as llama.cpp's converter says it
    made.values["context_length"] = int(next((config[key] for key in _LENGTHS if config.get(key)), 2**20))
    for names, kind, key in _NUMBERS:
        value = next((v for n, v in config.items() if re.fullmatch(names, n) and _is_number(v)), None)
        if value is not None:
            made.values[key] = kind(value)
    named = (v for k, v in config.items() if re.search(r"norm.*eps", k) and isinstance(v, float))
    epsilon = config.get("norm_epsilon") or next(named, 1e-5)
    made.values["attention.layer_norm_rms_epsilon"] = made.values["attention.layer_norm_epsilon"] = float(epsilon)
    sizes = _Sizes(tensors, made.values["block_count"])
    made.values["vocab_size"] = sizes.find("token_embd", 0) or config.get("vocab_size", 0)
    _add_layers(config, sizes, form, made)
    _add_experts(config, sizes, form, made)
    _add_recurrence(config, sizes, made)
    _add_rope(config, made)
    _add_window(config, made)
    return made


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with those within it that speak of attention, experts or recurrence beside its own."""
    inner = [value for key, value in config.items() if isinstance(value, Mapping) and key.endswith("_config")]
    return {key: value for part in (*inner, config) for key, value in part.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


class _Sizes:
    """Sizes of the file's tensors."""

    def __init__(self, tensors: Sequence[TensorEntry], n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.shapes = {
            (entry.stem, entry.block): entry.shape for entry in tensors if not entry.written.endswith("bias")
        }

    def find(self, stem: str, axis: int, block: int | None = None) -> int:
        """Return the size of a tensor along an axis; 0 where there is none. Without a block: of the first that has."""
        own = self.shapes.get((stem, block))
        if own is None and block is None:
            own = next((shape for (kind, _), shape in self.shapes.items() if kind == stem), None)
        return own[axis] if own is not None else 0

    def blocks_with(self, *stems: str) -> list[int]:
        """Return the numbers of the blocks that have one of these."""
        return sorted({block for stem, block in self.shapes if stem in stems and block is not None})

    def along(self, stem: str, axis: int) -> list[int]:
        """Return the size of each block's."""
        return [self.find(stem, axis, block) if (stem, block) in self.shapes else 0 for block in range(self.n_blocks)]


def _one_or_all(values: list[int]) -> int | list[int]:
    """Return the number that all are, or the list."""
    return values[0] if len(set(values)) == 1 else values


def _add_layers(config: Mapping[str, Any], sizes: _Sizes, form: GgufForm, made: Metadata) -> None:
    """Tell what each layer has: heads, their sizes, and how wide its feed-forward part is."""
    wide = [a or b for a, b in zip(sizes.along("ffn_down", 1), sizes.along("ffn_down_exps", 2), strict=True)]
    dense = [width for width in sizes.along("ffn_down", 1) if width]
    named = config.get("intermediate_size")
    if any(wide) and (not all(wide) or len(set(dense)) > 1):
        made.values["feed_forward_length"] = wide
    else:
        first = named if isinstance(named, int) else max(wide, default=0)
        made.values["feed_forward_length"] = dense[0] if dense else first
    heads = config.get("num_attention_heads") or 0
    made.values["attention.head_count"] = heads
    attending = sizes.blocks_with("attn_q", "attn_qkv", "attn_q_b", "attn_k", "attn_kv_a_mqa")
    if not attending or not heads:
        made.values["attention.head_count"] = 0
        return
    keys = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        keys = 1
    size = config.get("head_dim") or config["hidden_size"] // heads
    rows = {rows for rows in sizes.along("attn_k", 0) if rows}
    if isinstance(keys, int) and len(rows) == 1 and max(rows) % keys == 0:
        size = max(rows) // keys
    made.values["attention.key_length"] = made.values["attention.value_length"] = size
    if config.get("kv_lora_rank") and sizes.blocks_with("attn_kv_a_mqa"):
        _add_latent(config, bool(sizes.blocks_with("attn_k_b")), made)
        keys = 1 if sizes.blocks_with("attn_k_b") else keys
    elif len(rows) > 1:
        _add_unlike(config, sizes, made)
        keys = made.values["attention.head_count_kv"]
    elif isinstance(keys, int) and (value := sizes.find("attn_v", 0)) and value != sizes.find("attn_k", 0):
        made.values["attention.value_length"] = value // keys
    if form.listed and isinstance(keys, int) and len(attending) < sizes.n_blocks:
        keys = [keys if block in attending else 0 for block in range(sizes.n_blocks)]
    made.values["attention.head_count_kv"] = keys


def _add_latent(config: Mapping[str, Any], absorbed: bool, made: Metadata) -> None:
    turned, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + turned, config["v_head_dim"]
    made.values["attention.key_length_mla"], made.values["attention.value_length_mla"] = key, value
    made.values["attention.key_length"] = rank + turned if absorbed else key
    made.values["attention.value_length"] = rank if absorbed else value


def _add_unlike(config: Mapping[str, Any], sizes: _Sizes, made: Metadata) -> None:
    """Tell heads of layers that are not all alike: those that see all, and those that see a window."""
    kinds = config.get("layer_types") or [FULL] * sizes.n_blocks
    queries, heads = sizes.along("attn_q", 0), config["num_attention_heads"]
    each = [rows // heads for rows in queries]
    keys = [rows // size if size else 0 for rows, size in zip(sizes.along("attn_k", 0), each, strict=True)]
    for kind, ending in ((FULL, ""), (SLIDING, "_swa")):
        if size := next((size for size, own in zip(each, kinds, strict=False) if own == kind and size), 0):
            made.values[f"attention.key_length{ending}"] = made.values[f"attention.value_length{ending}"] = size
            made.values[f"rope.dimension_count{ending}"] = size
    # a layer without keys of its own takes another's
    usual = {kind: next((n for n, own in zip(keys, kinds, strict=False) if own == kind and n), 0) for kind in kinds}
    made.values["attention.head_count_kv"] = _one_or_all(
        [n or (usual[kind] if rows else 0) for n, kind, rows in zip(keys, kinds, queries, strict=False)]
    )


def _add_experts(config: Mapping[str, Any], sizes: _Sizes, form: GgufForm, made: Metadata) -> None:
    """Tell how many experts there are, how wide, and in which blocks."""
    blocks = sizes.blocks_with("ffn_down_exps")
    if not blocks:
        for key in [key for key in made.values if key.startswith("expert")]:
            del made.values[key]
        return
    width = sizes.find("ffn_down_exps", 2)
    made.values["expert_count"] = sizes.find("ffn_down_exps", 0)
    made.values["expert_feed_forward_length"] = width
    made.values["leading_dense_block_count"] = blocks[0]
    step = blocks[1] - blocks[0] if len(blocks) > 1 else 1
    made.values["interleave_moe_layer_step"] = made.values["moe_every_n_layers"] = step
    if form.gating:
        made.values["expert_gating_func"] = form.gating
    shared = sizes.find("ffn_down_shexp", 1)
    named = next((v for k, v in config.items() if re.search(r"n(um)?_shared_experts?$", k) and isinstance(v, int)), 0)
    made.values["expert_shared_count"] = named or -(-shared // width)
    if shared:
        made.values["expert_shared_feed_forward_length"] = shared


def _add_recurrence(config: Mapping[str, Any], sizes: _Sizes, made: Metadata) -> None:
    if kernel := sizes.find("shortconv.conv", -1):
        made.values["shortconv.l_cache"] = kernel
    blocks = sizes.blocks_with("ssm_a")
    if not blocks:
        for key in [key for key in made.values if key.startswith("ssm.")]:
            del made.values[key]
        return
    made.values["ssm.conv_kernel"] = sizes.find("ssm_conv1d", -1) or sizes.find("ssm_conv1d_q", -1)
    made.values["ssm.inner_size"] = sizes.find("ssm_out", 1)
    made.values["ssm.time_step_rank"] = sizes.find("ssm_dt", 1) or sizes.find("ssm_a", 0)
    made.values.setdefault("ssm.group_count", 0)
    made.values["ssm.dt_b_c_rms"] = "mixer_rms_eps" in config
    kinds = list(config.get("layer_types") or ())
    if FULL in kinds:
        made.values.setdefault("full_attention_interval", kinds.index(FULL) + 1)
    if sizes.find("ssm_conv1d_q", -1):
        made.values["kda.head_dim"] = sizes.find("ssm_f_b", 0) // max(
            1, sizes.find("ssm_a", -1) * sizes.find("ssm_a", 0)
        )


def _add_rope(config: Mapping[str, Any], made: Metadata) -> None:
    """Translate rope's base, its scaling and its partial rotation; nothing for a model without rotary positions."""
    both = config.get("rope_parameters") or {}
    rope = dict(both.get(FULL, both) or {})
    theta = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base")
    if "attention.key_length" not in made.values or not (theta or config.get("rotary_dim")):
        return
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    turned = count_turned(config, size)
    made.values.setdefault("rope.dimension_count", turned)
    if local := both.get(SLIDING):
        made.values["rope.freq_base_swa"] = float(local["rope_theta"])
        if local.get("rope_type", "default") != "default":
            made.problems.append(f"rope of sliding layers is scaled ({local['rope_type']}), which has no key")
    if sections := rope.get("mrope_section") or config.get("mrope_section"):
        made.values["rope.dimension_sections"] = [*sections, 0, 0, 0, 0][:4]
    if (alpha := rope.get("alpha")) and rope.get("rope_type") == "dynamic":
        theta, rope["rope_type"] = theta * alpha ** (size / (size - 2)), "default"
    made.values["rope.freq_base"] = float(theta or 10000.0)
    if positions := config.get("position_embedding_type"):
        made.values["rope.scaling.finetuned"] = positions == "rope"
    if beta := rope.get("llama_4_scaling_beta"):
        made.values["attention.temperature_scale"] = float(beta)
        made.values["attention.temperature_length"] = int(rope.get("original_max_position_embeddings", 0))
    _add_scaling(config, rope | {"rope_theta": theta}, turned, made)


def _add_scaling(config: Mapping[str, Any], rope: Mapping[str, Any], turned: int, made: Metadata) -> None:
    kind, longest = rope.get("rope_type", "default"), made.values["context_length"]
    original = int(
        rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    )
    factor = float(rope.get("factor") or longest / original)
    if kind == "default":
        return
    if kind not in ("linear", "yarn", "llama3", "longrope", "proportional"):
        made.problems.append(f"rope is scaled by {kind}, which GGUF has no key for")
    elif kind == "llama3":
        made.factors["rope_freqs.weight"] = _llama3_factors(rope, turned)
    elif kind == "proportional":
        size = made.values["attention.key_length"]
        still = size // 2 - int(rope.get("partial_rotary_factor", 1.0) * size // 2)
        factors = np.ones(size // 2, np.float32)
        factors[size // 2 - still :] = 1e30  # turned by nothing
        made.factors["rope_freqs.weight"] = factors
    elif kind == "longrope":
        made.values.update({"rope.scaling.type": kind, "rope.scaling.original_context_length": original})
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        made.values["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or default)
        for name in ("long", "short"):
            made.factors[f"rope_factors_{name}.weight"] = np.asarray(rope[f"{name}_factor"], np.float32)
        made.notes.append(f"llama.cpp takes the long factors of rope where its context is set beyond {original} tokens")
    else:
        made.values.update({"rope.scaling.type": kind, "rope.scaling.factor": factor})
        if kind == "yarn":
            _add_yarn(rope, factor, original, made)


def _add_yarn(rope: Mapping[str, Any], factor: float, original: int, made: Metadata) -> None:
    made.values["rope.scaling.original_context_length"] = original
    for key in ("beta_fast", "beta_slow"):
        if rope.get(key) is not None:
            made.values[f"rope.scaling.yarn_{key}"] = float(rope[key])
    if rope.get("mscale_all_dim"):
        made.values["rope.scaling.yarn_log_multiplier"] = 0.1 * float(rope["mscale_all_dim"])
        return
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    if abs((rope.get("attention_factor") or usual) - usual) > 1e-6:
        made.problems.append(f"yarn's attention_factor is {rope['attention_factor']}, and llama.cpp's {usual:.4f}")


def _llama3_factors(rope: Mapping[str, Any], turned: int) -> np.ndarray:
    """Return what each of Llama 3's frequencies is divided by, float32 [turned / 2] (transformers' rope utilities)."""
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, turned, 2) / turned)
    lengths = 2 * math.pi / frequencies
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = np.where(lengths < original / high, 1.0, np.where(lengths > original / low, factor, between))
    return factors.astype(np.float32)


def _add_window(config: Mapping[str, Any], made: Metadata) -> None:
    """Tell which layers see a window alone, and what else is told of each layer."""
    n_layers = made.values["block_count"]
    kinds = list(config.get("layer_types") or ())
    window = made.values.get("attention.sliding_window")
    if not window or not config.get("use_sliding_window", True) or (kinds and SLIDING not in kinds):
        made.values.pop("attention.sliding_window", None)
    elif kinds:
        made.values["attention.sliding_window_pattern"] = [kind == SLIDING for kind in kinds[:n_layers]]
    if sparsity := config.get("activation_sparsity_pattern"):
        made.values["activation_sparsity_scale"] = [
            NormalDist().inv_cdf(share) if share > 0 else -math.inf for share in sparsity
        ]


def end_with_window(made: Metadata, window: int, architecture: str) -> None:
    """Let the context end with the window that the layers see, in place: the architecture has none."""
    if window < made.values["context_length"]:
        made.values["context_length"] = window
        made.notes.append(
            f"llama.cpp's {architecture} has no such window: the file's context ends with it, at {window} tokens"
        )
    for key in [key for key in made.values if key.startswith("attention.sliding_window")]:
        del made.values[key]


def write_all(writer: Any) -> None:
    """Write what a GGUFWriter was given, its tensors in memory, and close its file."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def add_key(writer: Any, key: str, value: Any) -> None:
    """Add a key to what a GGUFWriter will write, under the type that its value has."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
