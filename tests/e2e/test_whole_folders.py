"""A checkpoint holds every tensor of its source, rounded or as it is, in names that its reader has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_graphs import build
from makers import apply
from safetensors.torch import load_file, save_file
from tiny_lm import SMALL, language_folder, language_recipe, write_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

GPTQ: dict[str, Any] = {"kind": "gptq", "scheme": "W4A16", "group_size": 32}
STACKED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Families whose files hold experts in stacks: transposed, interleaved and with biases; under other names."""


def recipe_for(folder: Path, target: str) -> dict[str, Any]:
    export = [{"kind": "checkpoint", "target": target}]
    return language_recipe(folder, [GPTQ], target=target, export=export, validate={"gates": [], "steps": False})


def read_names(folder: Path) -> set[str]:
    """The names of a folder's tensors, a rounded weight's under its own."""
    names = {name.removesuffix("_packed") for name in load_file(folder / "model.safetensors")}
    return {name for name in names if not name.endswith(("weight_scale", "weight_shape"))}


@pytest.mark.slow
def test_tensors_that_are_no_part_of_the_model_are_copied(tmp_path: Path) -> None:
    """Blocks for next-token prediction, and a tower: byte for byte, and no reader takes them for rounded ones."""
    language_folder(tmp_path / "lm", num_nextn_predict_layers=1)
    source = load_file(tmp_path / "lm/model.safetensors")
    extra = {name.replace("layers.0", "layers.2"): t.clone() for name, t in source.items() if "layers.0" in name}
    extra["vision_tower.proj.weight"] = torch.randn(16, 32).bfloat16()
    save_file(source | extra, tmp_path / "lm/model.safetensors", {"format": "pt"})
    apply(recipe_for(tmp_path, "transformers"), tmp_path / "out", tmp_path / "cache", tmp_path)
    folder = tmp_path / "out/model"
    written = load_file(folder / "model.safetensors")
    assert read_names(folder) == {*source, *extra}
    for name, tensor in extra.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    ignore = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"vision_tower.proj", "model.layers.2.mlp.down_proj"} <= set(ignore)
    AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.tensor([[1, 5]]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", STACKED)
def test_experts_in_stacks_have_a_reader(kind: str, tmp_path: Path) -> None:
    """They stay float for transformers, which has no other form of them, and are packed one by one for vLLM."""
    build(AutoConfig.for_model(kind, **{**SMALL, **STACKED[kind]})).save_pretrained(tmp_path / "lm")
    write_tokenizer(tmp_path / "lm")
    source = set(load_file(tmp_path / "lm/model.safetensors"))
    for target, reader in (("transformers", "transformers 5"), ("vllm", "compress (transformers reads experts in")):
        report = apply(recipe_for(tmp_path, target), tmp_path / target, tmp_path / "cache", tmp_path)
        notes = [row["reason"] for row in report.layers if row["type"] == "note"]
        assert any(note.startswith(f"model: loaded back by {reader}") for note in notes), notes
        told = [note for note in notes if "gptq: 24 layers (" in note]
        names = read_names(tmp_path / target / "model")
        if target == "transformers":
            assert names == source
            assert "stay float: transformers reads them as floats alone" in told[0]
        else:
            assert not told and sum(".experts." in name for name in names) >= 24
