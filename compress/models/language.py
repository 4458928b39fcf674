"""What a language model's folder says: its tokenizer, and what generating text needs to know.

The tokenizer is the one that transformers makes, which is not always what tokenizer.json says alone.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from compress.models.huggingface import quiet
from compress.models.source import Source, read_text_config
from compress.store.cache import ResultCache
from runtime.bundle.manifest import Generation

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")
"""What decides it."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
UNKNOWN_LENGTH = 2048
"""Tokens of a model whose configuration names no length."""


def tokenizer_folder(source: Source, cache: Path) -> tuple[Path | None, list[str]]:
    """Return the folder that holds the tokenizer.json to read, and notes. `cache`: keeps made ones, by content.

    Of a language model's folder transformers rebuilds the tokenizer (its class has rules of its own for unknown and
    special tokens); the model was measured with those, so calibration, evaluation and serving use them, too.
    """
    if not source.spec.decoder_only or source.kind != "huggingface" or source.folder is None:
        return source.folder, []
    notes: list[str] = []
    sha = hashlib.sha256(version("transformers").encode())
    for name in FILES:
        path = source.folder / name
        sha.update(f"\n{name} ".encode() + (path.read_bytes() if path.is_file() else b""))
    made, key = ResultCache(cache / "tokenizers", notes.append), sha.hexdigest()
    cached = made.get(key)
    if cached is None:
        try:
            text = _rebuild_tokenizer(source.folder, source.spec.trust_remote_code)
        except Exception as error:  # noqa: BLE001  (the tokenizers library raises Exception itself)
            notes.append(f"transformers cannot build the tokenizer ({error}); tokenizer.json is read as it is")
            return source.folder, notes
        cached = made.put(key, lambda folder: _write_tokenizer(folder, text))
    return cached.folder, notes


def _write_tokenizer(folder: Path, text: str) -> dict[str, str]:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return {}


def _rebuild_tokenizer(folder: Path, trust_remote_code: bool) -> str:
    from transformers import AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, use_fast=True
        )
    text: str = tokenizer.backend_tokenizer.to_str()
    return text


def has_chat_template(folder: Path | None) -> bool:
    """Return whether a model's folder has a chat template, as one of its files or in its tokenizer's. SourceError."""
    if folder is None:
        return False
    if (folder / "chat_template.jinja").is_file() or any(folder.glob("additional_chat_templates/*.jinja")):
        return True
    return bool(_read_json(folder / "tokenizer_config.json").get("chat_template"))


def read_generation(folder: Path, vocab_size: int) -> Generation:
    """Read generation_config.json over config.json (its text_config, where it has one). SourceError: not JSON."""
    config = read_text_config(folder)
    settings = {**config, **_read_json(folder / "generation_config.json")}
    ends = settings.get("eos_token_id")
    return Generation(
        context_length=next((int(config[name]) for name in LENGTHS if config.get(name)), UNKNOWN_LENGTH),
        vocab_size=vocab_size,
        bos_token_id=settings.get("bos_token_id"),
        eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        pad_token_id=settings.get("pad_token_id"),
        **{name: settings[name] for name in SAMPLING if settings.get(name) is not None},
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{path}: is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
