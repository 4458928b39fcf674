"""The token that texts were scored behind, written where engines look for it: in a folder's tokenizer and config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.errors import ExportError
from compress.export.checkpoint_config import write_json
from compress.facts import Note
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import PreprocessSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")
"""Types of post-processors that put tokens beside a text's own."""


def write_first_token(folder: Path, preprocess: PreprocessSpec) -> list[Note]:
    """Let the tokenizer in `folder` start texts with the first token of `preprocess`, and the configuration name it.

    Files are changed in place; without a first token they stay, and a note says where the tokenizer adds one of its
    own. ExportError: the tokenizer lacks the token.
    """
    path = folder / TOKENIZER
    if not isinstance(preprocess, LanguagePreprocess) or not path.is_file():
        return []
    token_id = preprocess.bos_token_id
    if token_id is None:
        return _note_unscored_tokens(path)
    token = _load_tokenizer(path).id_to_token(token_id)
    if token is None:
        raise ExportError(
            f"preprocess.bos_token_id: {path.name} has no token {token_id}: give one that it has, or copy the model's "
            "own tokenizer.json"
        )
    token = str(token)
    # transformers 5 and onnxruntime-genai go by the post-processor, transformers 4 by add_bos_token
    if _find_added_tokens(path) != ([token_id], []):
        record = json.loads(path.read_text(encoding="utf-8"))
        record["post_processor"] = _make_post_processor(token, token_id, record.get("post_processor"))
        path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _update_json(folder / "tokenizer_config.json", {"bos_token": token, "add_bos_token": True})
    _update_json(folder / "special_tokens_map.json", {"bos_token": token})
    for name in ("config.json", "generation_config.json"):
        _update_json(folder / name, {"bos_token_id": token_id})
    return []


def _note_unscored_tokens(path: Path) -> list[Note]:
    """Return a warning where a tokenizer puts tokens beside a text that were not there when texts were scored."""
    first, last = _find_added_tokens(path)
    if not first and not last:
        return []
    what = " and ".join(f"{ids} {where} each" for ids, where in ((first, "before"), (last, "after")) if ids)
    text = f"texts were scored alone, and the model's tokenizer puts {what}"
    return [Note("warning", f"{text}; preprocess.bos_token_id sets the first token")]


def _find_added_tokens(path: Path) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer itself puts before and after a text."""
    tokenizer = _load_tokenizer(path)
    whole, bare = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _load_tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _make_post_processor(token: str, token_id: int, before: dict[str, Any] | None) -> dict[str, Any]:
    """Return a post-processor that adds this token alone; what the one before did beside adding tokens stays."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    text, other = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, {"SpecialToken": {"id": token, "type_id": 1}}, other],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
    parts = [] if before is None else before["processors"] if before["type"] == "Sequence" else [before]
    kept = [part for part in parts if part["type"] not in ADDING]
    return {"type": "Sequence", "processors": [*kept, template]} if kept else template


def _update_json(path: Path, values: dict[str, Any]) -> None:
    """Set keys of a JSON object where they say something else; no file is made."""
    if not path.is_file():
        return
    record = json.loads(path.read_text(encoding="utf-8"))
    changed = {name: value for name, value in values.items() if _unwrap_token(record.get(name)) != value}
    if changed:
        write_json(path, {**record, **changed})


def _unwrap_token(value: Any) -> Any:
    """Return a token's text where it is given with its properties; other values as they are."""
    return value.get("content") if isinstance(value, dict) else value
