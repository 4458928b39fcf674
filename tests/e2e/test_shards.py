"""A folder is rounded by the names of its tensors, without the model's class: the same bytes as with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import apply
from safetensors.torch import load_file
from tiny_lm import language_folder, language_recipe, write_tokenizer

RTN: dict[str, Any] = {"kind": "rtn", "scheme": "W4A16", "group_size": 32}


def shards_recipe(passes: list[dict[str, Any]], target: str = "transformers", **parts: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "tiny-shards",
        "model": {"source": "shards:lm", "task": "text-generation"},
        "target": target,
        "passes": passes,
        "export": [{"kind": "checkpoint", "target": target}],
        **parts,
    }


def with_class(folder: Path, passes: list[dict[str, Any]], target: str = "transformers") -> dict[str, Any]:
    export = [{"kind": "checkpoint", "target": target}]
    return language_recipe(folder, passes, target=target, export=export, validate={"gates": [], "steps": False})


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.slow
def test_a_llama(tmp_path: Path) -> None:
    language_folder(tmp_path / "lm")
    apply(with_class(tmp_path, [RTN]), tmp_path / "class", tmp_path / "cache", tmp_path)
    report = apply(shards_recipe([RTN]), tmp_path / "names", tmp_path / "cache", tmp_path)
    ours, theirs = tmp_path / "names/model", tmp_path / "class/model"
    assert_same(read_all(ours), read_all(theirs))
    config, other = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
    assert config["quantization_config"] == other["quantization_config"]
    assert report.verdict == "unjudged"
    print(report)
