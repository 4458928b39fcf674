"""A GGUF file as a source: unpacked once, as transformers reads it; refused where it is none, split or has no room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hosts import Host
from safetensors.torch import load_file
from tiny_lm import language_folder, language_recipe, write_texts

import compress
from compress.errors import SourceError
from compress.models.gguf_source import save_unpacked, unpack
from compress.planning.draft import find_model_source

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of eight bits, as llama.cpp has it."""
    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = language_folder(folder / "lm", num_hidden_layers=1) / "tokenizer.json"
    words = json.loads(tokenizer.read_text())  # of a tokenizer without merges transformers reads no file
    words["model"]["vocab"]["ab"], words["model"]["merges"] = len(words["model"]["vocab"]), [["a", "b"]]
    tokenizer.write_text(json.dumps(words))
    passes = [{"kind": "rtn", "scheme": "W8A16", "group_size": 32}]
    recipe = language_recipe(folder, passes, target="llama.cpp", export=[{"kind": "gguf"}], validate={"gates": []})
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    compress.apply(compress.load_recipe(folder / "recipe.yaml"), folder / "b", cache=folder / "cache", quiet=True)
    return folder / "b/model/model.gguf"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files are unpacked: an empty cache."""
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_it_is_unpacked_once_and_compressed_as_any_folder(file: Path, places: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = unpack(file)
    assert unpack(file) == folder and folder.is_relative_to(places / "cache")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(4, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=0)
    write_texts(places / "texts.jsonl", 8)
    recipe = {
        "version": 1,
        "name": "again",
        "model": {"source": f"gguf:{file}", "task": "text-generation"},
        "data": {"evaluation": {"source": "jsonl:texts.jsonl"}},
        "passes": [{"kind": "rtn", "scheme": "W4A16", "group_size": 32}],
        "validate": {"gates": [], "benchmark": {"prompt_tokens": 16, "new_tokens": 8}},
    }
    (places / "recipe.yaml").write_text(json.dumps(recipe))
    plan = compress.plan(compress.load_recipe(places / "recipe.yaml"))
    assert any(decision.action != "kept" for step in plan.steps for decision in step.decisions)
    assert find_model_source(str(file), places) == f"gguf:{file}"


def test_what_is_saved_has_float32_weights(file: Path, tmp_path: Path) -> None:
    save_unpacked(str(file), str(tmp_path))
    assert {str(tensor.dtype) for tensor in load_file(tmp_path / "model.safetensors").values()} == {"torch.float32"}


@pytest.mark.parametrize(
    ("name", "cut", "said"),
    [
        ("none.gguf", lambda data: b"PK" + data[2:], "is no GGUF file"),
        ("model-00001-of-00002.gguf", lambda data: data, "join them"),
        ("half.gguf", lambda data: data[:2000], "copy or download it again"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, cut: Any, said: str, file: Path, places: Path) -> None:
    (places / name).write_bytes(cut(file.read_bytes()))
    with pytest.raises(SourceError, match=said):
        unpack(places / name)
    assert not [folder for folder in (places / "cache").glob("*") if folder.name != ".digests"]


def test_an_architecture_that_transformers_does_not_know(file: Path, places: Path) -> None:
    (places / "odd.gguf").write_bytes(file.read_bytes().replace(b"llama", b"lxama"))
    with pytest.raises(SourceError, match=r"transformers cannot unpack it: .*lxama"):
        unpack(places / "odd.gguf")


def test_without_memory_it_is_refused(file: Path, places: Path, host: Host) -> None:
    host.memory_bytes = 1 << 20
    with pytest.raises(SourceError, match=r"of memory, and 1\.0 MiB are free; give the model's own folder"):
        unpack(file)
