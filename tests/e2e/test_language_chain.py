"""A decoder through a chain of passes, on the torch module and on its blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from makers import apply, changed
from tiny_lm import LIKELY, language_folder, language_recipe

PRUNE: dict[str, Any] = {"kind": "prune_channels", "ratio": 0.5, "round_to": 32}
GPTQ: dict[str, Any] = {"kind": "gptq", "scheme": "W4A16", "group_size": 32}


def report(folder: Path, passes: list[dict[str, Any]], cache: Path, out: str) -> dict[str, Any]:
    recipe = changed(language_recipe(folder, passes), validate={"steps": True})
    apply(recipe, folder / out, cache, folder)
    found: dict[str, Any] = json.loads((folder / out / "report.json").read_text())
    return found


def test_the_row_between_is_what_a_recipe_that_ends_there_gives(cache: Path, tmp_path: Path) -> None:
    language_folder(tmp_path / "lm", **LIKELY)
    whole = report(tmp_path, [PRUNE, GPTQ], cache, "whole")["steps"]
    ends_there = report(tmp_path, [PRUNE], cache, "pruned")["candidate"]
    start, pruned, end = whole["rows"]
    assert [row["name"] for row in whole["rows"]] == ["float", "prune_channels", "gptq"]
    assert whole["latency"] == "tpot" and whole["shown"] == ["nll"]
    assert pruned["size_bytes"] == ends_there["size_bytes"] and pruned["latency_ms"] > 0
    assert pruned["metrics"] == pytest.approx(ends_there["metrics"])
    assert start["size_bytes"] > pruned["size_bytes"] > end["size_bytes"], "less is left, and then in fewer bits"
