"""What generating text needs to know of a language model, from the files of its folder. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from runtime.manifest import Generation

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
UNKNOWN_LENGTH = 2048


def read_generation(folder: Path, vocab_size: int) -> Generation:
    """generation_config.json over config.json (of a nested text model where there is one). SourceError: not JSON."""
    config = _json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    said = {**config, **_json(folder / "generation_config.json")}
    ends = said.get("eos_token_id")
    return Generation(
        context_length=next((int(config[name]) for name in LENGTHS if config.get(name)), UNKNOWN_LENGTH),
        vocab_size=vocab_size,
        bos_token_id=said.get("bos_token_id"),
        eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        pad_token_id=said.get("pad_token_id"),
        **{name: said[name] for name in SAMPLING if said.get(name) is not None},
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{path}: is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
