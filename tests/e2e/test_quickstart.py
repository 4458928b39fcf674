"""The first thing that a newcomer does, through the real command: what it prints, writes and measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from compress.cli import app
from compress.recipe.remedies import REMEDIES
from runtime.bundle.format import read_remedies
from runtime.tasks.manifest import verify

FILES = {
    "README.md",
    "baseline/model.onnx",
    "compress.log",
    "host.json",
    "evaluation/baseline_outputs.npz",
    "evaluation/samples.npz",
    "layers.json",
    "lock.json",
    "manifest.json",
    "model/model.onnx",
    "recipe.yaml",
    "remedies.json",
    "report.html",
    "report.json",
    "report.md",
    "report.samples.npz",
    "report.steps.json",
    "report.xml",
}
N = 797
"""Samples of the test set."""


@pytest.fixture(scope="module")
def report(quickstart: tuple[Path, str]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((quickstart[0] / "report.json").read_text())
    return read


def test_it_passes_and_says_where_the_bundle_is(quickstart: tuple[Path, str]) -> None:
    lines = quickstart[1].splitlines()
    assert "bundle: out/q" in lines[-3:]
    assert lines[-1] == "PASS: quickstart-digits on onnxruntime-cpu: all 4 gates hold"


def test_the_bundle_is_whole_and_nothing_lies_beside_it(quickstart: tuple[Path, str]) -> None:
    bundle = quickstart[0]
    assert read_remedies(bundle, verify(bundle)) == REMEDIES
    assert {path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file()} == FILES
    assert [path.name for path in bundle.parent.iterdir()] == ["q"]
    log = (bundle / "compress.log").read_text()
    assert "export to float ONNX" in log and "verdict: pass" in log


def test_what_report_json_holds(report: dict[str, Any]) -> None:
    assert report["verdict"] == "pass"
    for side in ("baseline", "candidate"):
        part = report[side]
        assert part["metrics"] and part["throughput_per_s"] > 0 and part["size_bytes"] > 0
        assert 0 < part["latency_ms"]["p50"] <= part["latency_ms"]["p95"] <= part["latency_ms"]["p99"]
    assert [gate["metric"] for gate in report["gates"]] == ["top1", "agreement", "size_ratio", "latency_p50"]
    for gate in report["gates"]:
        low, high = gate["interval"]
        assert gate["verdict"] == "pass" and low <= gate["value"] <= high and gate["rule"] and gate["why"]
    layers = {row["layer"]: row for row in report["layers"]}
    assert layers["conv1"]["action"] == layers["linear"]["action"] == "int8"
    assert all(row["action"] == "int8" and row["sqnr_db"] > 10 for row in layers.values() if row["layer"])


def test_the_lock_names_what_went_in(quickstart: tuple[Path, str]) -> None:
    lock = json.loads((quickstart[0] / "lock.json").read_text())
    assert lock["seed"] == 0 and lock["versions"]["torch"] and lock["model"]["parity_torch_onnx"] < 1e-4
    assert set(lock["data"]) == {"calibration", "evaluation"} and lock["data"]["evaluation"]["samples"] == N
    assert len(lock["model"]["digest"]) == len(lock["steps"]["float"]) == 64


def test_the_recipe_in_the_bundle_is_the_one_that_was_applied(
    quickstart: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.recipe.load import load_recipe

    file = quickstart[0] / "recipe.yaml"
    recipe = load_recipe(file)
    assert recipe.name == "quickstart-digits" and recipe.validate_.gates[3].min_speedup == 0.01
    monkeypatch.chdir(tmp_path)
    cache = quickstart[0].parents[1] / "cache"
    planned = CliRunner().invoke(app, ["plan", str(file), "--cache", str(cache), "--json"])
    assert planned.exit_code == 0, planned.output
    assert all(step["cached"] for step in json.loads(planned.stdout)["steps"])
