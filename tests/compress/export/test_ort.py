"""ONNX Runtime's own format: the same answers, the operators of a build, and a row of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import images, residual_cnn
from makers import apply, changed, image_recipe, plan
from tiny_lm import language_recipe

from compress.errors import ExportError, PlanError
from compress.export.onnx import save_graph
from compress.export.ort import write_ort
from runtime.backends import BACKENDS
from runtime.tasks.manifest import verify

CPU = BACKENDS["onnxruntime-cpu"]


def test_it_answers_as_its_graph_and_names_its_operators(tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    save_graph(residual_cnn(), graph)
    made = [write_ort(graph, tmp_path / name) for name in ("a", "b")]
    assert made[0].stat().st_size == made[1].stat().st_size
    assert sorted(path.name for path in made[0].parent.iterdir()) == [
        "model.ort",
        "model.required_operators_and_types.config",
    ]
    lines = made[0].with_name("model.required_operators_and_types.config").read_text().splitlines()
    assert any("Conv" in line for line in lines) and any(line.startswith("ai.onnx;") for line in lines)
    assert not any("nchwc" in line for line in lines), "a layout of x86"
    ((name, x),), answers = images(1)[0].items(), []
    for path in (graph, made[0]):
        session = CPU.open(path, 1, {})
        assert [spec.name for spec in session.inputs] == [name]
        answers.append(next(iter(session.run({name: x}).values())))
    np.testing.assert_allclose(answers[1], answers[0], atol=1e-5)


def test_what_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"model\.onnx: ONNX Runtime .* cannot write its ORT format"):
        write_ort(tmp_path / "model.onnx", tmp_path / "ort")


def test_a_bundle_holds_it_beside_its_graph(tmp_path: Path) -> None:
    recipe = changed(image_recipe(tmp_path), export=[{"kind": "ort"}])
    report = apply(recipe, tmp_path / "bundle", tmp_path / "cache", tmp_path)
    manifest = verify(tmp_path / "bundle")
    assert manifest.artifact("ort").path == "ort/model.ort" and manifest.candidate_for("onnxruntime-cpu").kind == "onnx"
    rows = {row["artifact"]: row for row in report.backends if row["name"] == "onnxruntime-cpu"}
    assert rows["ort"]["latency_ms"]["p50"] > 0 and rows["ort"]["fidelity"] == pytest.approx(
        rows["candidate"]["fidelity"], abs=0.02
    )


def test_a_decoder_is_no_model_of_one_call(tmp_path: Path) -> None:
    recipe = language_recipe(tmp_path, [{"kind": "rtn", "bits": 4}], export=[{"kind": "ort"}])
    with pytest.raises(PlanError, match=r"a model of task text-generation is written as onnx, .*, not as ort"):
        plan(recipe, tmp_path, tmp_path / "cache")
