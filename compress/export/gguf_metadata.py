"""What a GGUF file says of a model beside its tensors: its architecture, and a config.json's numbers under GGUF's keys.

llama.cpp has a graph of its own for each architecture; a file names one and gives its numbers. What those graphs are
that config.json does not say (which rows rope turns together, what is added to a norm's weight) is in `ARCHITECTURES`,
for those whose outputs `benchmarks/interop_gguf.py` compares with transformers'. A model is refused where it does
anything that its architecture has no key for. No torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_QKV = ("attn_q", "attn_k", "attn_v", "attn_qkv")
_FFN = ("ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm", "output_norm")
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes one of its architectures (src/models of its source, release b7000 and later).

    `paired`: rope turns neighbouring rows of q and k, where transformers turns row i with row i + half; those rows are
    written in that order. `norm_offset`: what transformers adds to a norm's weight as it computes. `biases`: tensors
    that may have one. `sliding`: layers may see a window alone. `tied`: output and embeddings may be (None), must be
    (True) or must not be (False) one tensor. `square`: heads fill the width. `partial`: rope may turn a part of a head.
    `factors`: rope's frequencies may have factors. `keys`: configuration -> GGUF key, for what this one alone has.
    `scalar`: queries are divided by the root of `query_pre_attn_scalar`, which must be the head's size, or, with so
    many layers, the width over the heads. `required`: what the configuration must say, as the graph computes it.
    """

    name: str
    paired: bool = False
    activation: tuple[str, ...] = SILU
    norm_offset: float = 0.0
    biases: tuple[str, ...] = _QKV
    sliding: bool = False
    tied: bool | None = None
    square: bool = False
    partial: bool = False
    factors: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    scalar: int | None = None
    required: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = Architecture("llama", paired=True, biases=(*_QKV, "attn_output", *_FFN), factors=True)
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Architecture("qwen2", square=True),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture(
        "qwen3moe", required={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    ),
    "gemma": Architecture("gemma", activation=GELU, norm_offset=1.0, tied=True),
    "gemma2": Architecture(
        "gemma2", activation=GELU, norm_offset=1.0, tied=True, sliding=True, keys=_SOFTCAPS, scalar=46
    ),
    "gemma3_text": Architecture(
        "gemma3",
        activation=GELU,
        norm_offset=1.0,
        sliding=True,
        keys={"final_logit_softcapping": "final_logit_softcapping"},
        scalar=62,
    ),
    "phi3": Architecture("phi3", square=True, partial=True, factors=True),
    "olmo2": Architecture("olmo2", tied=False, square=True),
    "granite": Architecture(
        "granite",
        paired=True,
        biases=(*_QKV, "attn_output", *_FFN),
        factors=True,
        keys={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
            "attention_multiplier": "attention.scale",
        },
    ),
    "starcoder2": Architecture(
        "starcoder2", activation=GELU, biases=(*_QKV, "attn_output", *_FFN, *_NORMS), square=True
    ),
}
"""transformers' `model_type` -> the architecture that computes the same."""

_SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "vocab_size": "vocab_size",
}
_EXPERTS = {
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_EPSILONS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}
_PECULIAR = re.compile(r"multiplier|scale|scaling|softcap|clip|alibi|no_rope|parallel_(attn|residual)|bidirectional")
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, [], {}, "")
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Metadata:
    """`values`: GGUF's key without the architecture -> value. `factors`: tensors of factors of rope's frequencies.

    `problems`: why the model cannot be written, as sentences; `notes`: what the user should know.
    """

    values: dict[str, Any]
    factors: dict[str, np.ndarray]
    problems: list[str]
    notes: list[str]


def describe_config(config: Mapping[str, Any], architecture: Architecture) -> Metadata:
    """Translate a config.json, with the defaults of its class, into the keys of a GGUF architecture."""
    made = Metadata({}, {}, [], [])
    for key, name in _SIZES.items():
        if isinstance(config.get(key), int):
            made.values[name] = config[key]
        else:
            made.problems.append(f"config.json has no {key}, which GGUF needs")
    for key, name in _EPSILONS.items():
        if config.get(key) is not None:
            made.values[name] = float(config[key])
    made.values.update({name: config[key] for key, name in _EXPERTS.items() if config.get(key)})
    if made.problems:
        return made
    _add_heads(config, architecture, made)
    _add_rope(config, architecture, made)
    _add_window(config, architecture, made)
    _add_peculiarities(config, architecture, made)
    return made


def _add_heads(config: Mapping[str, Any], architecture: Architecture, made: Metadata) -> None:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim") or width // heads
    made.values["attention.head_count_kv"] = config.get("num_key_value_heads") or heads
    made.values["attention.key_length"] = made.values["attention.value_length"] = size
    if architecture.square and size * heads != width:
        made.problems.append(
            f"{heads} heads of {size} are not the width {width}, which llama.cpp's {architecture.name} takes them for"
        )
    scalar = config.get("query_pre_attn_scalar")
    if architecture.scalar is not None and scalar is not None:
        wanted = width // heads if config["num_hidden_layers"] == architecture.scalar else size
        if scalar != wanted:
            made.problems.append(
                f"query_pre_attn_scalar is {scalar}, and llama.cpp's {architecture.name} computes with {wanted}"
            )


def _add_rope(config: Mapping[str, Any], architecture: Architecture, made: Metadata) -> None:
    """Translate rope's base, its scaling and its partial rotation."""
    both = config.get("rope_parameters") or {}
    rope = dict(both.get(FULL, both))
    local = both.get(SLIDING)
    if not rope.get("rope_theta"):
        made.problems.append("config.json has no rope_theta; only models with rotary positions are written")
        return
    made.values["rope.freq_base"] = float(rope["rope_theta"])
    size = made.values["attention.key_length"]
    turned = int(size * rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    if turned != size and not architecture.partial:
        made.problems.append(f"rope turns {turned} of a head's {size} rows, and llama.cpp's {architecture.name} all")
    made.values["rope.dimension_count"] = turned
    if local is not None:
        made.values["rope.freq_base_swa"] = float(local["rope_theta"])
        if local.get("rope_type", "default") != "default":
            made.problems.append(f"rope of sliding layers is scaled ({local['rope_type']}), which has no key")
    _add_scaling(config, rope, turned, architecture, made)


def _add_scaling(
    config: Mapping[str, Any], rope: Mapping[str, Any], turned: int, architecture: Architecture, made: Metadata
) -> None:
    kind = rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    original = int(original or config["max_position_embeddings"])
    factor = float(rope.get("factor") or config["max_position_embeddings"] / original)
    odd = sorted(set(rope) & {"mscale", "mscale_all_dim", "mrope_section", "truncate"})
    if kind == "default":
        return
    if odd or kind not in ("linear", "yarn", "llama3", "longrope"):
        made.problems.append(f"rope is scaled by {kind}{f' with {odd[0]}' if odd else ''}, which GGUF has no key for")
    elif kind in ("llama3", "longrope") and not architecture.factors:
        made.problems.append(
            f"rope has frequency factors ({kind}), which llama.cpp's {architecture.name} does not read"
        )
    elif kind == "llama3":
        made.factors["rope_freqs.weight"] = _llama3_factors(rope, turned)
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
            made.values["rope.scaling.original_context_length"] = original
            for key in ("beta_fast", "beta_slow"):
                if rope.get(key) is not None:
                    made.values[f"rope.scaling.yarn_{key}"] = float(rope[key])
            usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
            if abs((rope.get("attention_factor") or usual) - usual) > 1e-6:
                made.problems.append(
                    f"yarn's attention_factor is {rope['attention_factor']}, and llama.cpp's {usual:.4f}"
                )


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


def _add_window(config: Mapping[str, Any], architecture: Architecture, made: Metadata) -> None:
    """Tell which layers see a window alone; where the architecture has none, the context ends with the window."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    kinds = list(config.get("layer_types") or ([SLIDING] * layers))
    if odd := sorted(set(kinds) - {FULL, SLIDING}):
        made.problems.append(f"layers of type {odd[0]} are unknown to llama.cpp's {architecture.name}")
    if not window or not config.get("use_sliding_window", True) or SLIDING not in kinds:
        if architecture.sliding and window:
            made.values.update({"attention.sliding_window": 0})
        return
    if architecture.sliding:
        made.values["attention.sliding_window"] = window
        made.values["attention.sliding_window_pattern"] = [kind == SLIDING for kind in kinds]
    elif window < config["max_position_embeddings"]:
        made.values["context_length"] = window
        made.notes.append(
            f"llama.cpp's {architecture.name} has no sliding window: the file's context ends with it, "
            f"at {window} tokens"
        )


def _add_peculiarities(config: Mapping[str, Any], architecture: Architecture, made: Metadata) -> None:
    """Translate what this architecture alone has; report what none of its keys says."""
    name = architecture.name
    for key, written in architecture.keys.items():
        if config.get(key) is not None:
            made.values[written] = float(config[key])
    for key, wanted in architecture.required.items():
        if config.get(key, wanted) != wanted:
            made.problems.append(f"{key} is {config[key]}, and llama.cpp's {name} computes with {wanted}")
    act = config.get("hidden_activation") or config.get("hidden_act")
    if act not in architecture.activation:
        made.problems.append(f"its activation is {act}, and that of llama.cpp's {name} is {architecture.activation[0]}")
    known = {*architecture.keys, "rope_scaling"}
    for key, value in config.items():
        if _PECULIAR.search(key) and key not in known and value not in _NEUTRAL:
            made.problems.append(f"config.json has {key}: {value}, which llama.cpp's {name} has no key for")
    tied = bool(config.get("tie_word_embeddings"))
    if architecture.tied and not tied:
        made.problems.append(f"its output layer has values of its own, and llama.cpp's {name} takes the embeddings")
