"""The tokenizer of a language model as transformers makes it, which is not always what tokenizer.json says alone."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

from compress.models.huggingface import quiet
from compress.models.source import locate
from compress.schema import ModelSpec

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json")
"""What decides it."""
FAILURES = (OSError, ValueError, KeyError, AttributeError, TypeError, ImportError)


def tokenizer_folder(spec: ModelSpec, root: Path, cache: Path) -> tuple[Path | None, list[str]]:
    """The folder that holds the tokenizer.json to read, and notes. `cache`: where made ones are kept, by content.

    Of a language model's folder transformers rebuilds the tokenizer (its class has rules of its own for unknown and
    special tokens); the model was measured with those, so calibration, evaluation and serving use them, too.
    """
    source = locate(spec, root)
    if spec.task != "text-generation" or source.kind != "huggingface" or source.folder is None:
        return source.folder, []
    made = cache / "tokenizers" / _digest(source.folder)
    if (made / "tokenizer.json").is_file():
        return made, []
    try:
        text = _rebuilt(source.folder, spec.trust_remote_code)
    except FAILURES as error:
        return source.folder, [f"transformers cannot build the tokenizer ({error}); tokenizer.json is read as it is"]
    made.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=made, suffix=".draft", delete=False, encoding="utf-8") as draft:
        draft.write(text)
    os.replace(draft.name, made / "tokenizer.json")
    return made, []


def _rebuilt(folder: Path, trust_remote_code: bool) -> str:
    from transformers import AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, use_fast=True
        )
    text: str = tokenizer.backend_tokenizer.to_str()
    return text


def _digest(folder: Path) -> str:
    sha = hashlib.sha256(version("transformers").encode())
    for name in FILES:
        path = folder / name
        sha.update(f"\n{name} ".encode() + (path.read_bytes() if path.is_file() else b""))
    return sha.hexdigest()
