"""A decoder loses heads and neurons, and may be quantized then: a plain smaller model for transformers and for ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from makers import apply, changed
from test_language import BOTH, CHECKPOINT, load_checkpoint, reported, torch_nll
from tiny_lm import LIKELY, language_folder, language_recipe

PRUNE: dict[str, Any] = {"kind": "prune_channels", "ratio": 0.5, "round_to": 32}
GPTQ: dict[str, Any] = {"kind": "gptq", "scheme": "W4A16", "group_size": 32}


def test_a_pruned_decoder_is_a_plain_smaller_one_and_the_row_between_what_ends_there(
    cache: Path, tmp_path: Path
) -> None:
    """Loaded from its own config.json it has the nats of the ONNX file: the same weights, heads and neurons."""
    language_folder(tmp_path / "lm", **LIKELY)
    for name, passes, exact in (("pruned", [PRUNE], 1e-4), ("rounded", [PRUNE, GPTQ], 1e-3)):
        recipe = changed(language_recipe(tmp_path, passes, export=BOTH), validate={"steps": True})
        apply(recipe, tmp_path / name, cache, tmp_path)
        model = load_checkpoint(tmp_path / name / "checkpoint")
        config = model.config
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 16)
        assert config.intermediate_size == 64
        beside_graph, genai = (
            json.loads((tmp_path / name / "model" / file).read_text()) for file in ("config.json", "genai_config.json")
        )
        assert (beside_graph["num_attention_heads"], beside_graph["intermediate_size"]) == (2, 64)
        assert genai["model"]["decoder"]["num_attention_heads"] == 2
        assert torch_nll(model, tmp_path) == pytest.approx(reported(tmp_path / name)["nll"], rel=exact)
    ends_there, whole = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("pruned", "rounded"))
    start, pruned, end = whole["steps"]["rows"]
    assert [row["name"] for row in whole["steps"]["rows"]] == ["float", "prune_channels", "gptq"]
    assert whole["steps"]["latency"] == "tpot" and whole["steps"]["shown"] == ["nll"]
    assert pruned["size_bytes"] == ends_there["candidate"]["size_bytes"] and pruned["latency_ms"] > 0
    assert pruned["metrics"] == pytest.approx(ends_there["candidate"]["metrics"])
    assert start["size_bytes"] > pruned["size_bytes"] > end["size_bytes"], "less is left, and then in fewer bits"


def test_a_configuration_that_cannot_say_it_is_named(cache: Path, tmp_path: Path) -> None:
    """Widths that differ between layers: a warning, and a record beside the weights."""
    language_folder(tmp_path / "lm", **LIKELY)
    only_first = {**PRUNE, "targets": ["re:model.layers.0.mlp"]}
    apply(language_recipe(tmp_path, [only_first], **CHECKPOINT), tmp_path / "out", cache, tmp_path)
    rows = json.loads((tmp_path / "out/layers.json").read_text())
    notes = [row["reason"] for row in rows if row["type"] == "note"]
    assert any("no config.json describes the pruned LlamaForCausalLM (none gives" in text for text in notes)
    record = json.loads((tmp_path / "out/model/shapes.json").read_text())
    assert record["tensors"]["model.layers.0.mlp.down_proj.weight"] == [64, 64]
