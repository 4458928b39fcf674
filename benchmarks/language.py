"""Language models of the claims scripts: the real ones' one score, and the random ones that are timed.

torch and transformers on the CPU. Whoever made a folder, its score comes from the same two functions here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

STORIES = "data/tinystories/stories.jsonl"
EVALUATED = (200, 400)
CALIBRATED = (400, 656)
BOS = 1
MAX_TOKENS = 512

QUICK = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
"""Of the random Llama whose compression is timed; QUICK stands in for it where nothing is measured."""
VOCABULARY = 32000
DECODER_LAYERS = 12
"""Of the random Llama whose decoding is timed: 220 million parameters, 33 million of them only looked up."""


def read_stories(bench: Path, span: tuple[int, int]) -> list[str]:
    """Stories [first, last) of the file."""
    lines = (bench / STORIES).read_text(encoding="utf-8").splitlines()[slice(*span)]
    return [json.loads(line)["text"] for line in lines]


def encode_stories(folder: Path, stories: Sequence[str]) -> list[list[int]]:
    """Each without special tokens, behind token 1, cut at 512."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [[BOS, *tokenizer.encode(text, add_special_tokens=False)][:MAX_TOKENS] for text in stories]


def load_causal(folder: Path, dequantize: bool = False) -> nn.Module:
    """A folder as transformers loads it, in float32 and eval mode; compressed-tensors checkpoints included.

    With `dequantize`, or where transformers reads them so alone, their weights are unpacked as they are read, otherwise
    at the first call.
    """
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    from compress.models.packed import loads_as_floats, quantization_of

    dequantize = dequantize or loads_as_floats(quantization_of(folder))
    more = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
    return model.eval()


@torch.no_grad()
def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """The model with the weights of a .safetensors file in place of its own, changed in place. KeyError for a name
    that it lacks."""
    from safetensors.torch import load_file

    own = model.state_dict()
    for name, weight in load_file(path).items():
        own[name].copy_(weight)
    return model


@torch.no_grad()
def nats_per_token(model: nn.Module, stories: Sequence[Sequence[int]]) -> float:
    """Cross-entropy of all predicted tokens over their number, in nats; each story is read alone."""
    total, n_tokens = 0.0, 0
    for story in stories:
        ids = torch.tensor([story])  # [1, T]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()  # [T - 1, vocabulary]
        nats = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")  # in float64 15 times as long
        total += float(nats.sum(dtype=torch.float64))
        n_tokens += len(story) - 1
    return total / n_tokens


def write_outliers(folder: Path, out: Path, n_channels: int = 3, factor: float = 64.0) -> Path:
    """A Llama's folder with some channels of each norm inside its blocks made larger, and the weights that read them
    smaller by the same power of two: the same function in float, outliers where inputs are rounded. Returns `out`."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}
    for name in sorted(weights):
        block, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm in readers:
            factors = torch.ones(len(weights[name]))
            factors[torch.randperm(len(factors), generator=generator)[:n_channels]] = factor
            weights[name] = weights[name] * factors
            for key in weights:
                if key.startswith(f"{block}.") and key.split(".")[-2] in readers[norm]:
                    weights[key] = weights[key] / factors
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def write_wider_heads(folder: Path, out: Path) -> Path:
    """A Llama's folder with heads twice as wide, of zeros: the same function, for engines that take no small heads.

    Channel i of a head of n turns with i + n / 2 at base^(-2i / n); in a head of 2n, channels 2i and 2i + n turn as
    fast, so that they go there. Queries grow by the root of 2, which the softmax's scale takes back. Returns `out`.
    """
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    n_heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // n_heads
    places = torch.arange(size) * 2  # i -> 2i, and i + n / 2 -> 2i + n
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        layer = name.split(".")[-2]
        if layer in ("q_proj", "k_proj", "v_proj"):
            heads = weight.reshape(-1, size, weight.shape[1])  # [heads, size, in]
            wide = heads.new_zeros(len(heads), 2 * size, weight.shape[1])
            wide[:, places] = heads * 2**0.5 if layer == "q_proj" else heads
            weights[name] = wide.reshape(-1, weight.shape[1])
        elif layer == "o_proj":
            heads = weight.reshape(len(weight), n_heads, size)  # [out, heads, size]
            wide = heads.new_zeros(len(weight), n_heads, 2 * size)
            wide[:, :, places] = heads
            weights[name] = wide.reshape(len(weight), -1)
    if config.get("tie_word_embeddings") and "lm_head.weight" in weights:
        weights["model.embed_tokens.weight"] = weights.pop(
            "lm_head.weight"
        )  # vLLM reads a tied table by this name only
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    text = json.dumps({**config, "head_dim": 2 * size}, indent=2)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    return out


def write_random_llama(folder: Path, shape: dict[str, Any], seed: int = 0) -> Path:
    """A Llama of random weights as a folder (float32, shards of at most 1 GB), with a tokenizer; returns it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, **shape)
    LlamaForCausalLM(config).float().save_pretrained(folder, max_shard_size="1GB")
    write_tokenizer(folder, shape["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer whose token i is the word "w<i>": the tools that want a tokenizer get one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    whole.save_pretrained(folder)


def random_llama(folder: Path, n_layers: int, quick: bool) -> Path:
    """The random Llama with so many layers."""
    shape = QUICK if quick else SMALL
    vocabulary = 512 if quick else VOCABULARY
    return write_random_llama(folder, shape | {"num_hidden_layers": n_layers, "vocab_size": vocabulary})


def random_tokens(n_samples: int, length: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """int64 [n_samples, length]: ids uniform over the vocabulary but for the first three."""
    return np.random.default_rng(seed).integers(3, vocabulary, (n_samples, length))
