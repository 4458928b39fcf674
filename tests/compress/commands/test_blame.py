"""One spoiled layer among healthy ones is named, and the recipe that is proposed is one that can be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from makers import apply
from spoiling import RECIPES, build_healthy, spoil
from typer.testing import CliRunner

from compress.cli import app
from compress.commands.blame import Deadline, blame_bundle, describe_blame, find_smallest
from compress.commands.ladder import climb, describe_ladder
from compress.errors import ExportError
from compress.recipe.load import load_recipe
from runtime.errors import UsageError

Copy = Callable[[str], Path]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A healthy bundle of each kind, built once."""
    built: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in built:
            built[kind] = build_healthy(kind, tmp_path_factory.mktemp(kind))
        return built[kind]

    return get


def build_beside(healthy: Path, kind: str, folder: Path, passes: list[dict[str, Any]]) -> Path:
    """A bundle by other passes of the model of a healthy one, from the cache of that."""
    recipe = {"version": 1, "name": "other", **RECIPES[kind], "passes": passes}
    apply(recipe, folder / "other", healthy.parent / "cache", healthy.parent)
    return folder / "other"


@pytest.fixture
def copy(healthy: Callable[[str], Path], tmp_path: Path) -> Copy:
    def make(kind: str) -> Path:
        shutil.copytree(healthy(kind), tmp_path / "copy")
        return tmp_path / "copy"

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("images", "two bits"), ("tagger", "scale"), ("writer", "two bits")])
def test_the_spoiled_layer_comes_first(kind: str, how: str, copy: Copy, tmp_path: Path) -> None:
    bundle = copy(kind)
    layer = spoil(bundle, 3, how)
    found = blame_bundle(bundle, 0.2, cache=tmp_path / "none", times=kind == "images")
    first, *others = found.layers
    assert (first.name, found.chosen) == (layer, (layer,))
    assert first.share > 0.9 > 0.1 > max(row.share for row in others)
    assert first.back is not None and first.back > 0.9 and first.more_bytes > 0
    assert found.source == "the bundle's baseline" and not found.unmatched
    recipe = load_recipe(bundle / "recipe.yaml", found.snippets[0].overrides)
    assert layer in recipe.passes[0].ignore  # type: ignore[attr-defined]
    assert layer in found.snippets[0].text
    assert [snippet.about for snippet in found.snippets] == ["back to float"]  # of 8 bits there is no more
    if kind == "images":
        assert first.time_share is not None and first.time_share > 0 and first.more_ms is not None

    ladder = climb(bundle, tmp_path / "none")
    wrong = [rung.name for rung in ladder.rungs if rung.divergence is not None]
    assert wrong == ["quantized file"] and not ladder.holds
    assert f"first that adds more than its rounding explains: {layer}," in "\n".join(describe_ladder(ladder))


@pytest.mark.slow
def test_what_is_healthy_blames_nobody_by_the_metric_and_every_rung_holds(healthy: Callable[[str], Path]) -> None:
    found = blame_bundle(healthy("tagger"), 1, times=False)
    assert found.decided_by == "outputs" and found.candidate == found.float_layers == 1.0
    assert "is within noise" in found.notes[-1] and found.change < 1e-3
    ladder = climb(healthy("tagger"))
    assert ladder.holds and [rung.divergence for rung in ladder.rungs] == [None] * 3
    assert describe_ladder(ladder)[0].startswith("torch -> ONNX: differs by ")


@pytest.mark.slow
def test_weights_that_were_changed_before_they_were_rounded_are_those_of_the_cache(
    healthy: Callable[[str], Path], tmp_path: Path
) -> None:
    cache = healthy("tagger").parent / "cache"
    bundle = build_beside(
        healthy("tagger"), "tagger", tmp_path, [{"kind": "smoothquant"}, {"kind": "int8", "placement": "inputs"}]
    )
    known = blame_bundle(bundle, 1, cache=cache, times=False)
    assert known.source == "the cache of its build" and known.layers[0].more_bytes > 0
    gone = blame_bundle(bundle, 1, cache=tmp_path / "none", times=False)
    assert "none that fit" in gone.source and "the rounding of activations alone" in gone.source
    assert {row.name for row in gone.layers} == {row.name for row in known.layers}
    assert gone.snippets[0].cost == "sizes not known"
    assert any("none that fit" in text for text in describe_blame(gone))


@pytest.mark.slow
def test_refusals(healthy: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--metric top1: the bundle does not have it; it has cosine, .*span_f1"):
        blame_bundle(healthy("tagger"), metric="top1")
    bundle = build_beside(healthy("writer"), "writer", tmp_path, [{"kind": "awq", "bits": 4, "group_size": 32}])
    with pytest.raises(ExportError, match=r"no float weights to put back: .*compress reproduce .* --cache DIR"):
        blame_bundle(bundle, cache=tmp_path / "none")
    cache = healthy("writer").parent / "cache"
    assert blame_bundle(bundle, cache=cache, times=False).source == "the cache of its build"


@pytest.mark.slow
def test_the_command(healthy: Callable[[str], Path]) -> None:
    bundle = str(healthy("images"))
    done = CliRunner().invoke(app, ["blame", bundle, "--json", "--budget", "0.5"])
    assert done.exit_code == 0 and json.loads(done.stdout)["metric"] == "agreement"
    done = CliRunner().invoke(app, ["blame", bundle, "--budget", "0.5"])
    assert done.exit_code == 0 and "alone" in done.stdout and "passes.0.ignore" in done.stdout
    done = CliRunner().invoke(app, ["parity", bundle, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["holds"] is True


@pytest.mark.parametrize("enough", [1, 2, 3, 5, 8, 13])
def test_the_smallest_set_is_found_in_few_looks(enough: int) -> None:
    looks: list[int] = []

    def share_back(n: int) -> float:
        looks.append(n)
        return float(n >= enough)

    assert find_smallest(13, share_back, Deadline(60)) == enough
    assert len(looks) <= 8
    assert find_smallest(13, share_back, Deadline(-1)) <= max(enough, 1)  # late: no further look
