"""Tokenizers as GGUF stores them: the name of how texts are split, tokens and their types, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from compress.export.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    find_pre_tokenizer,
    read_vocabulary,
)

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = (
    "'(?i:[sdmt]|ll|ve|re)|[^\r\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]++[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def save(folder: Path, tokenizer: Tokenizer, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("steps", "ignore_merges", "name"),
    [
        ([BYTES | {"use_regex": True}], False, "gpt-2"),
        ([{"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True}], False, "smollm"),
        ([split(QWEN), BYTES], False, "qwen2"),
        ([split(CL100K), BYTES], True, "llama-bpe"),
        ([split(CL100K), BYTES], False, "dbrx"),
    ],
)
def test_the_name_is_found_by_the_expressions(steps: list[dict[str, Any]], ignore_merges: bool, name: str) -> None:
    assert find_pre_tokenizer(steps, ignore_merges) == name


def test_other_expressions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"splits texts by '\[a-z\]\+', which llama.cpp has no name for"):
        find_pre_tokenizer([split("[a-z]+"), BYTES], False)
    with pytest.raises(ValueError, match="a space before each text"):
        find_pre_tokenizer([BYTES | {"add_prefix_space": True}], False)


def byte_level() -> Tokenizer:
    words = ["<s>", "</s>", "a", "b", "c", "ab", "abc"]
    merges = [("a", "b"), ("ab", "c")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    folder = save(tmp_path / "t", byte_level(), bos_token="<s>", eos_token={"content": "</s>"}, chat_template="{{ x }}")
    values = read_vocabulary(folder, 10, {"eos_token_id": [1, 7]}).values
    assert values["tokenizer.ggml.model"] == "gpt2" and values["tokenizer.ggml.merges"] == ["a b", "ab c"]
    assert values["tokenizer.ggml.tokens"] == ["<s>", "</s>", "a", "b", "c", "ab", "abc", "<tool>", "[PAD8]", "[PAD9]"]
    types = [CONTROL, CONTROL, *[NORMAL] * 5, USER_DEFINED, UNUSED, UNUSED]
    assert values["tokenizer.ggml.token_type"] == types
    ends = values["tokenizer.ggml.eos_token_id"], values["tokenizer.ggml.eot_token_id"]
    assert ends == (1, 7) and values["tokenizer.ggml.bos_token_id"] == 0
    assert values["tokenizer.ggml.add_bos_token"] and not values["tokenizer.ggml.add_eos_token"]
    assert values["tokenizer.chat_template"] == "{{ x }}"
    with pytest.raises(ValueError, match="a token 7, and the embeddings have 5 rows"):
        read_vocabulary(folder, 5, {})


def sentencepiece(merges: list[tuple[str, str]]) -> Tokenizer:
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def test_a_sentencepiece_tokenizer_joins_the_earliest_merge_first(tmp_path: Path) -> None:
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "ab")]
    made = read_vocabulary(save(tmp_path / "t", sentencepiece(merges)), 263, {})
    values = made.values
    assert values["tokenizer.ggml.model"] == "llama" and values["tokenizer.ggml.add_space_prefix"]
    scores = dict(zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"], strict=True))
    assert scores["▁a"] == 0 > scores["ab"] > scores["▁ab"] > scores["a"]
    assert values["tokenizer.ggml.token_type"][:3] == [UNKNOWN, BYTE, BYTE] and not made.notes
    apart = read_vocabulary(save(tmp_path / "u", sentencepiece(merges[:3])), 263, {})
    assert "joins 1 pairs of tokens that the tokenizer's merges leave apart" in apart.notes[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizes texts by Lowercase"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}}, "its tokenizer is Unigram"),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, "splits texts by WhitespaceSplit"),
    ],
)
def test_what_llama_cpp_would_do_otherwise_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "t", byte_level())
    record = json.loads((folder / "tokenizer.json").read_text()) | change
    (folder / "tokenizer.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=words):
        read_vocabulary(folder, 10, {})
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        read_vocabulary(tmp_path, 10, {})
