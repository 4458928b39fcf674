"""Engines start texts with the token that they were scored behind: what AutoTokenizer makes of an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from compress.errors import ExportError
from compress.export.first_token import write_first_token
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import TensorPreprocess

WORDS = ["<s>", "</s>", "a", "b"]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def template(*single: str) -> dict[str, Any]:
    """A post-processor that puts special tokens around $A."""
    parts = [
        {"Sequence": {"id": "A", "type_id": 0}} if part == "$A" else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in single
    ]
    special = {part: {"id": part, "ids": [WORDS.index(part)], "tokens": [part]} for part in single if part != "$A"}
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": special}


BEFORE: dict[str, Any] = {
    "none": None,
    "its own": template("<s>", "$A"),
    "another": template("</s>", "$A"),
    "one at the end": template("<s>", "$A", "</s>"),
    "offsets of bytes": BYTES,
    "several": {"type": "Sequence", "processors": [BYTES, template("$A", "</s>")]},
}


def write_folder(folder: Path, post_processor: Any = None, **config: Any) -> Path:
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    record = {**json.loads(tokenizer.to_str()), "post_processor": post_processor}
    (folder / "tokenizer.json").write_text(json.dumps(record))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend", **config}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    return folder


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.parametrize("before", BEFORE)
def test_the_exported_tokenizer_starts_with_it_and_adds_nothing_else(before: str, tmp_path: Path) -> None:
    write_folder(tmp_path, BEFORE[before])
    assert write_first_token(tmp_path, LanguagePreprocess(bos_token_id=0)) == []
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("ab") == [0, 2, 3] and tokenizer.encode("ab", add_special_tokens=False) == [2, 3]
    assert tokenizer.bos_token_id == 0
    assert read(tmp_path / "tokenizer_config.json")["add_bos_token"] is True
    assert read(tmp_path / "config.json")["bos_token_id"] == 0
    assert not (tmp_path / "generation_config.json").exists()
    kept = json.dumps(read(tmp_path / "tokenizer.json")["post_processor"])
    assert ("ByteLevel" in kept) == ("ByteLevel" in json.dumps(BEFORE[before]))


def test_files_that_say_it_already_keep_their_bytes(tmp_path: Path) -> None:
    write_folder(tmp_path, template("<s>", "$A"), bos_token={"content": "<s>", "lstrip": False}, add_bos_token=True)
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 0}')
    (tmp_path / "config.json").write_text('{"bos_token_id":0}')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_first_token(tmp_path, LanguagePreprocess(bos_token_id=0))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_tokens_behind_which_nothing_was_scored_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, template("<s>", "$A", "</s>"))
    (note,) = write_first_token(tmp_path, LanguagePreprocess())
    assert note.level == "warning"
    assert note.text == (
        "texts were scored alone, and the model's tokenizer puts [0] before each and [1] after each; "
        "preprocess.bos_token_id sets the first token"
    )
    write_folder(tmp_path)
    assert write_first_token(tmp_path, LanguagePreprocess()) == []
    assert write_first_token(tmp_path, TensorPreprocess()) == []


def test_a_token_that_the_tokenizer_lacks_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ExportError, match=r"preprocess\.bos_token_id: tokenizer\.json has no token 9: give one"):
        write_first_token(tmp_path, LanguagePreprocess(bos_token_id=9))
