"""A whole run whose weights stay in files: the same file as of one that loads the model, judged with and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from hosts import Host
from makers import apply
from tiny_lm import LIKELY, language_folder, language_recipe

from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest

PASSES: list[dict[str, Any]] = [{"kind": "gptq", "scheme": "W4A16", "group_size": 32}]
BOTH = [{"kind": "onnx"}, {"kind": "checkpoint"}]
SPEED = {"metric": "tpot", "min_speedup": 0.01}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in-files")
    language_folder(folder / "lm", **LIKELY)
    return folder


@pytest.fixture(scope="module")
def whole(home: Path, cache: Path) -> Path:
    """The bundle of a run that loads the model."""
    apply(language_recipe(home, PASSES, export=BOTH), home / "whole", cache, home)
    return home / "whole"


@pytest.fixture(autouse=True)
def nothing_is_small(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"planning.in_files.WHOLE_BYTES": 0, "execution.in_files.HELD": 100, "graph.pieces.PIECE_BYTES": 2**16}
    for name, value in limits.items():
        monkeypatch.setattr(f"compress.{name}", value)


def constants(file: Path) -> dict[str, bytes]:
    graph = ir.load(file).graph
    return {name: v.const_value.tobytes() for name, v in graph.initializers.items() if v.const_value is not None}


def test_without_room_for_the_float_model_the_candidate_is_judged_alone(
    home: Path, whole: Path, cache: Path, host: Host
) -> None:
    host.memory_bytes = 2**29  # the libraries take more
    recipe = language_recipe(home, PASSES, export=BOTH)
    recipe["validate"]["gates"] = [*recipe["validate"].get("gates", []), SPEED]
    report = apply(recipe, home / "alone", cache, home)
    manifest = read_manifest(home / "alone")
    assert manifest.alone and manifest.source_bytes == (home / "lm/model.safetensors").stat().st_size
    assert not (home / "alone/baseline").exists()
    assert constants(home / "alone/model/model.onnx") == constants(whole / "model/model.onnx")
    gate = next(gate for gate in report.gates if gate.metric == "tpot")
    assert gate.verdict == "undecided" and "no float model to be timed" in gate.why
    assert any("is not in the bundle: running it takes about" in line for line in report.advice)
    beside = json.loads((whole / "report.json").read_text())["candidate"]["metrics"]
    for name in ("nll", "kl_token"):
        assert report.candidate.metrics[name] == pytest.approx(beside[name], rel=0.1)


def test_with_room_for_it_the_float_model_is_in_the_bundle_and_both_are_timed(
    home: Path, whole: Path, cache: Path
) -> None:
    report = apply(language_recipe(home, PASSES, export=BOTH), home / "both", cache, home)
    assert report.ratios["tpot"] > 0
    assert not read_manifest(home / "both").alone
    assert not (home / "both/evaluation/candidate_outputs.npz").exists()
    for folder in ("baseline", "model"):
        assert constants(home / f"both/{folder}/model.onnx") == constants(whole / f"{folder}/model.onnx")
    log = (home / "both/compress.log").read_text()
    assert log.count("running the candidate on the samples:") == 1 and "scoring the model in torch" not in log
    again = validate(home / "both")  # which runs them
    for side, before in ((again.baseline, report.baseline), (again.candidate, report.candidate)):
        assert side.metrics == pytest.approx(before.metrics, abs=1e-5)
