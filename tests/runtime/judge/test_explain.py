"""Explanations of bundles: what is profiled, what is refused, and where it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shortcuts import without_processes
from tiny_bundles import make_bundle

from runtime.__main__ import main
from runtime.clock.peaks import Peaks
from runtime.errors import RuntimeFailure, UsageError
from runtime.judge import explain
from runtime.judge.explain import explain_apart, explain_path, explain_unprofiled
from runtime.report.validate import validate
from runtime.report.why import render_explanation
from runtime.tasks.manifest import read_manifest

KNOWN = Peaks({"float32": 100.0, "uint8": 400.0, "int8": 40.0}, 20.0)


@pytest.fixture(autouse=True)
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[RuntimeFailure]:
    """What measuring the machine's peaks raises, if anything is in it; it finds those that are known."""
    failures: list[RuntimeFailure] = []

    def measure_peaks(*about: object) -> Peaks:
        for failure in failures:
            raise failure
        return KNOWN

    monkeypatch.setattr(explain, "measure_peaks", measure_peaks)
    return failures


@pytest.mark.parametrize(("kind", "unit"), [("image", "call"), ("text", "call"), ("decoder", "token")])
def test_both_models_are_profiled_and_their_layers_matched(tmp_path: Path, kind: str, unit: str) -> None:
    found = explain_path(make_bundle(kind, tmp_path / kind))
    assert found.unit == unit and found.baseline is not None
    assert found.candidate.nodes_ms > 0 and found.candidate.n_nodes == found.baseline.n_nodes
    products = [row for row in found.layers if row.gflops]
    assert all(row.twin_ms is not None for row in found.layers)
    assert bool(products) == (kind != "text")  # which looks its words up


def test_what_has_no_profile_is_refused_with_the_way_out(tmp_path: Path) -> None:
    bundle = make_bundle("decoder", tmp_path / "decoder")
    reason = explain_unprofiled(read_manifest(bundle), "openvino")
    assert reason is not None and "--backend onnxruntime-cpu" in reason
    with pytest.raises(UsageError, match="unknown backend"):
        explain_path(bundle, "nowhere")


def test_a_candidate_that_is_no_faster_says_why_in_its_report(tmp_path: Path) -> None:
    bundle = make_bundle("image", tmp_path / "image")
    with without_processes():
        report = validate(bundle, ["onnxruntime-cpu"])
    record = json.loads((bundle / "report.json").read_text())["explanation"]
    assert report.explanation is not None
    assert record["candidate"]["operators"] and record["peak_gflops"] == KNOWN.gflops
    assert "## Why it is no faster" in (bundle / "report.md").read_text()


def test_a_profile_that_fails_is_said_and_the_verdict_stands(tmp_path: Path, measuring: list[RuntimeFailure]) -> None:
    measuring.append(RuntimeFailure("no room"))
    bundle = make_bundle("image", tmp_path / "image")
    with without_processes():
        report = validate(bundle, ["onnxruntime-cpu"])
    assert report.verdict == "unjudged"
    assert "Why it is no faster is not known: its profile failed: no room" in report.advice


def test_a_process_of_its_own_finds_the_same(tmp_path: Path) -> None:
    bundle = make_bundle("image", tmp_path / "image")
    apart, here = explain_apart(bundle, "onnxruntime-cpu"), explain_path(bundle)
    assert [row.layer for row in apart.layers] == [row.layer for row in here.layers]
    assert apart.candidate.n_nodes == here.candidate.n_nodes and apart.peak_gflops["float32"] > 0


def test_a_busy_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "environment", lambda threads: {"load_average": 9.5, "cores": 2})
    found = explain_path(make_bundle("image", tmp_path / "image"))
    assert found.busy.startswith("The machine was busy: load average 9.5") and found.busy in render_explanation(found)


def test_the_command_prints_tables_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = make_bundle("image", tmp_path / "image")
    assert main(["why", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "In onnxruntime-cpu's profile a call takes" in shown and "GFLOP/s before" in shown
    assert main(["why", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "onnxruntime-cpu"
