"""What generating text needs to know of a language model, from the files of its folder. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from runtime.bundle.manifest import Generation

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
UNKNOWN_LENGTH = 2048


def read_generation(folder: Path, vocab_size: int) -> Generation:
    """Read generation_config.json over config.json (its text_config, where it has one). SourceError: not JSON."""
    config = _read_json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
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
