"""Folders of models of any size whose weights are holes: headers as they are in real ones, and no byte behind them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARD_BYTES = 5 * 10**9
LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def hollow_llama(folder: Path, **sizes: Any) -> Path:
    """A Llama in bfloat16, in shards with an index, and a tokenizer; a sparse file takes no room on the disk."""
    from tiny_lm import write_tokenizer

    sizes = {**LLAMA_70B, **sizes}
    folder.mkdir()
    more = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 8192, "tie_word_embeddings": False}
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps({**about, **sizes, **more, **tokens}))
    write_tokenizer(folder)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, shape in _list_tensors(sizes):
        room -= 2 * math.prod(shape)
        if room < 0:
            shards.append({})
            room = SHARD_BYTES - 2 * math.prod(shape)
        shards[-1][name] = shape
    places = {}
    for number, tensors in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_header(folder / file, tensors)
        places |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def _list_tensors(sizes: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    narrow = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    yield "model.embed_tokens.weight", (vocabulary, width)
    for block in range(sizes["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (narrow, width),
            "self_attn.v_proj": (narrow, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }.items():
            yield f"model.layers.{block}.{name}.weight", shape
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocabulary, width)


def _write_header(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
