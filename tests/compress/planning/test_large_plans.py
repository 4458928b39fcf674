"""A plan reads no weights: it takes digests that are remembered, and `apply` settles its keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import makers
import pytest
from hollow_models import hollow_llama
from tiny_lm import write_texts

from compress.planning.make_plan import make_plan, settle_keys
from compress.recipe.load import load_recipe
from compress.store.cache import ResultCache

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}


def recipe_of(folder: Path, model: Path) -> Path:
    texts = {"source": f"jsonl:{write_texts(folder / 'texts.jsonl', 4)}"}
    return makers.write_recipe(
        folder / "recipe.yaml",
        {
            "version": 1,
            "name": "hollow",
            "model": {"source": f"dir:{model}", "task": "text-generation"},
            "preprocess": {"kind": "language", "max_length": 32},
            "data": {"calibration": texts, "evaluation": texts},
            "target": "transformers",
            "passes": [{"kind": "rtn", "bits": 4, "group_size": 128}],
            "export": [{"kind": "checkpoint"}],
        },
    )


@pytest.mark.slow
@pytest.mark.usefixtures("host")
def test_a_plan_of_a_large_model_reads_none_of_its_weights(tmp_path: Path, read_files: list[Path]) -> None:
    model = hollow_llama(tmp_path / "70b", num_hidden_layers=12)  # as wide as one of 80
    plan = make_plan(load_recipe(recipe_of(tmp_path, model)), tmp_path / "cache")
    files = list(model.glob("*.safetensors"))
    assert sorted(plan.inputs.unread) == sorted(files) and len(files) == 6 and not {*files} & {*read_files}
    assert sum(os.stat(file).st_blocks for file in files) < 2**14, "the files are holes still"
    assert plan.before.n_bytes > 45e9 and any("no digest of the weights" in note.text for note in plan.notes)
    assert len(plan.before.structure.blocks) == 12


def test_the_weights_of_a_small_model_are_read_once(tmp_path: Path, read_files: list[Path]) -> None:
    model = hollow_llama(tmp_path / "tiny", **SMALL)
    planned = make_plan(load_recipe(recipe_of(tmp_path, model)), tmp_path / "cache")
    settled = settle_keys(planned, ResultCache(tmp_path / "cache"))
    assert settled.keys == planned.keys and sorted(read_files) == sorted(model.glob("*.safetensors"))


def test_keys_are_settled_by_what_the_weights_are(tmp_path: Path) -> None:
    model = hollow_llama(tmp_path / "tiny", **SMALL | {"vocab_size": 2**20})  # two tables of 256 MiB
    cache, path = tmp_path / "cache", recipe_of(tmp_path, model)
    first = make_plan(load_recipe(path), cache)
    settled = settle_keys(first, ResultCache(cache))
    assert first.inputs.unread and not settled.inputs.unread
    assert {work.key for work in settled.steps}.isdisjoint(work.key for work in first.steps)
    again = make_plan(load_recipe(path), cache)
    assert again.keys == settled.keys and not again.inputs.unread, "what was read is remembered"
    elsewhere = Path(os.path.join(tmp_path, "copied"))
    model.rename(elsewhere)
    path.write_text(path.read_text().replace(str(model), str(elsewhere)))
    moved = make_plan(load_recipe(path), cache)
    assert moved.inputs.unread and settle_keys(moved, ResultCache(cache)).keys == settled.keys
    weights: Any = next(elsewhere.glob("*.safetensors"))
    with weights.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x80\x3f")
    changed = make_plan(load_recipe(path), cache, verify=True)
    assert changed.keys != settled.keys and not changed.inputs.unread
