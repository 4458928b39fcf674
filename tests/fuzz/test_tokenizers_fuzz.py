"""tokenizer.json and tokenizer_config.json, changed in any way: tokens, or a typed error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import assert_done_or_refused, fuzz
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from compress.models.language import tokenizer_folder
from compress.models.source import locate
from compress.specs import ModelSpec
from runtime.bundle.tensors import TensorSpec
from runtime.encode.language import LanguagePreprocess, make_language_encoder

VALUES = st.sampled_from(
    [None, True, -1, 0, 2**63, 10**30, 1.5, "", "a", "\ud800", [], {}, [[]], {"a": 1}, "<s>", "ByteLevel"]
)
INPUTS = (TensorSpec("input_ids", "int64", ("batch", "sequence")),)


def original() -> str:
    """A byte-level tokenizer of single characters."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "\u0120", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    text: str = tokenizer.to_str()
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every position in a JSON value, but for single words of the vocabulary."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if path[-1:] == ("vocab",):
        return [path]
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))][bool(not path) :]


@st.composite
def tokenizers(draw: st.DrawFn) -> bytes:
    """The text of a tokenizer.json: a few values replaced or removed, and at times cut or with a byte changed."""
    document = json.loads(original())
    for _ in range(draw(st.integers(0, 3))):
        *way, last = draw(st.sampled_from(places(document)))
        holder = document
        for key in way:
            holder = holder[key]
        if draw(st.booleans()) and isinstance(holder, dict):
            del holder[last]
        else:
            holder[last] = draw(VALUES)
    text = json.dumps(document).encode()
    at = draw(st.integers(0, len(text) - 1))
    how = draw(st.sampled_from(["whole", "whole", "whole", "cut", "byte"]))
    return (
        text
        if how == "whole"
        else text[:at]
        if how == "cut"
        else text[:at] + draw(st.binary(max_size=2)) + text[at + 1 :]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that a tokenizer is looked for in; its weights are never read."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 31}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@fuzz(share=0.03, quick=15)
@given(content=tokenizers())
def test_any_tokenizer_reads_texts_or_is_refused(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)

    def encode() -> None:
        spec = ModelSpec(source=f"dir:{folder}", task="text-generation")
        found, _ = tokenizer_folder(locate(spec, folder), folder / "cache")
        encoder = make_language_encoder(LanguagePreprocess(kind="language", max_length=16), INPUTS, found, 31)
        encoder.sequences({"text": ["a cat", "dogs"]})

    assert_done_or_refused("tokenizers", encode, allowed=(1, 2))
