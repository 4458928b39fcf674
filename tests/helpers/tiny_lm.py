"""Tiny random language models of the usual architectures from their configurations, with a tokenizer and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CHARACTERS = "abcdefghijklmnopqrstuvwxyz"
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen": ("Qwen2Config", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "gemma": ("Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64}),
    "phi": ("Phi3Config", {"num_key_value_heads": 4}),
}
"""Name -> (transformers' configuration class, what differs from SMALL)."""
LIKELY: dict[str, Any] = {"unlike_norms": True, "initializer_range": 0.1}
"""Sizes of a Llama whose next tokens differ in likelihood. Tests that compress this one share what is cached of it."""
_MIXTURE = {"num_experts_per_tok": 2, "initializer_range": 0.1}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {**_MIXTURE, "num_local_experts": 4, "sliding_window": None}),
    "qwen-moe": ("Qwen3MoeConfig", {**_MIXTURE, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16}),
}
"""As ARCHITECTURES, of mixtures of experts."""


def language_folder(folder: Path, architecture: str = "llama", unlike_norms: bool = False, **sizes: Any) -> Path:
    """A random model of the architecture as a Hugging Face folder, and a tokenizer of words.

    `unlike_norms`: their weights differ, as a trained model's; of all ones an exported graph holds one for all.
    """
    import torch
    import transformers

    name, differs = {**ARCHITECTURES, **MIXTURES}[architecture]
    sizes = {**SMALL, **differs, **sizes}
    if "head_dim" in differs:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    config = getattr(transformers, name)(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if unlike_norms and parameter.ndim == 1:
                parameter.data.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE without merges, every character a token: what each tokenizer class of transformers can read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    words = ["<pad>", "<s>", "</s>", "<unk>", "\u0120", *CHARACTERS]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    config = {**names, "tokenizer_class": "TokenizersBackend", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_texts(path: Path, n: int, seed: int = 0, length: int = 24) -> Path:
    """`n` texts of random characters, of differing length up to `length`, with a space here and there."""
    rng = np.random.default_rng(seed)
    letters = list(CHARACTERS + " ")
    lines = ["".join(rng.choice(letters, rng.integers(length // 2, length))) for _ in range(n)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def language_recipe(folder: Path, passes: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    """Return a recipe about a tiny Llama in `folder`, which is written there with its texts.

    What is left between the passes is not measured: each model would be exported.
    """
    if not (folder / "lm").exists():
        language_folder(folder / "lm")
    write_texts(folder / "calibration.jsonl", 16)
    write_texts(folder / "evaluation.jsonl", 60, seed=1)
    return {
        "version": 1,
        "name": "tiny-lm",
        "model": {"source": "dir:lm", "task": "text-generation"},
        "data": {
            "calibration": {"source": "jsonl:calibration.jsonl"},
            "evaluation": {"source": "jsonl:evaluation.jsonl"},
        },
        "passes": passes,
        "validate": {"gates": [{"metric": "nll", "max": 20}], "benchmark": QUICK_DECODING, "steps": False},
        **parts,
    }


QUICK_DECODING: dict[str, Any] = {"warmup": 1, "iterations": 3, "processes": 1, "prompt_tokens": 8, "new_tokens": 4}
"""Benchmark settings under which nothing about speed can be said, which no test here does."""
