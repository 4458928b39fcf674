"""What people deploy, through the real build: exported, pruned, in int8, compiled. `make shelf`: some minutes a model.

In `make test` every recipe is planned; the rest runs with SHELF=1, and writes the table of `docs/reference/shelf.md`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from makers import apply, plan
from models import SHELF, Shelved
from places import ROOT

from runtime.tasks import find_task
from runtime.tasks.manifest import read_manifest

PAGE = ROOT / "docs/reference/shelf.md"
HEADS = (
    "model",
    "task",
    "exported",
    "int8 layers",
    "closeness, int8",
    "pruned by",
    "closeness, pruned and int8",
    "engine",
)
HAS_RTX = importlib.util.find_spec("tensorrt_rtx_bindings") is not None
on_the_shelf = pytest.mark.skipif("SHELF" not in os.environ, reason="takes minutes: make shelf")
INT8 = {"kind": "int8", "placement": "auto", "restore": {"max_layers": 0}}
ENGINE = {"kind": "tensorrt-rtx", "compute_capabilities": ["8.6"]}


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, tuple[str, ...]]]:
    """A row of the table for each model; the page is written once all are there."""
    made: dict[str, tuple[str, ...]] = {}
    yield made
    if made.keys() == {model.name for model in SHELF}:
        lines = [HEADS, ("---",) * len(HEADS), *(made[model.name] for model in SHELF)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        text = re.sub(r"(?s)(<!-- made by make shelf -->\n).*", lambda found: found[1] + table + "\n", PAGE.read_text())
        PAGE.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("model", SHELF, ids=lambda model: model.name)
def test_every_model_is_planned(model: Shelved, tmp_path: Path) -> None:
    recipe = model.write(tmp_path)
    made = plan({**recipe, "passes": [*model.passes, INT8]}, tmp_path, tmp_path / "cache")
    assert len(made.keys.passes) == len(model.passes) + 1


@on_the_shelf
@pytest.mark.parametrize("model", SHELF, ids=lambda model: model.name)
def test_a_model_of_the_shelf(model: Shelved, tmp_path: Path, rows: dict[str, tuple[str, ...]]) -> None:
    recipe, cache = model.write(tmp_path), tmp_path / "cache"

    def build(name: str, passes: list[dict[str, Any]], **more: Any) -> Any:
        return apply({**recipe, **more, "passes": passes}, tmp_path / name, cache, tmp_path)

    plain = build("plain", [INT8])
    layers = [row for row in plain.layers if row["type"] not in ("note", "measured")]
    placed = sum(row["action"] == "int8" for row in layers)
    assert placed > 0.5 * len(layers), [row for row in layers if row["action"] != "int8"]
    assert plain.verdict == "pass", plain.gates
    pruned = build("pruned", [*model.passes, INT8]) if model.passes else None
    if pruned is not None:
        assert pruned.verdict == "pass", pruned.gates
        assert pruned.candidate.size_bytes < plain.candidate.size_bytes
    rows[model.name] = (
        f"{model.name} (`{model.model}`)",
        model.task,
        "yes",
        f"{placed} of {len(layers)}",
        _show_closeness(model, plain),
        ", ".join(f"`{one['kind']}`" for one in model.passes) or "nothing yet",
        _show_closeness(model, pruned) if pruned is not None else "",
        "ONNX alone" if find_task(model.task).encodes else _compile(build, tmp_path),
    )


def _show_closeness(model: Shelved, report: Any) -> str:
    return f"{report.candidate.metrics[model.metric]:.4f} {model.metric}"


def _compile(build: Any, folder: Path) -> str:
    """Compile the int8 graph for a GPU that need not be there; return a word for the table."""
    if not HAS_RTX:
        return "not tried"
    build("engine", [INT8], target="tensorrt-rtx", export=[ENGINE], validate={"gates": []})
    record = read_manifest(folder / "engine").artifact("engine-tensorrt-rtx").engine
    assert record is not None
    return f"{record.held:.0%} in int8"
