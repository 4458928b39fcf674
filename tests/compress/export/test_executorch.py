"""ExecuTorch's .pte: the numbers of the graph that is judged, rows of its own, refusals at the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graphs import images, int8_state, residual_cnn, run, tokens, transformer
from makers import apply, changed, image_recipe, plan
from tiny_lm import language_recipe

from compress.errors import NotExportable, PlanError
from compress.export import executorch
from compress.export.executorch import check_lowers, write_pte
from compress.export.onnx import finish
from compress.formats.targets import TARGETS
from compress.graph.specs import input_specs, output_specs
from compress.rounding.state import GraphState
from runtime.backends import BACKENDS
from runtime.backends.executorch import why_unavailable
from runtime.errors import BundleError, UsageError
from runtime.tasks.manifest import verify

installed = pytest.mark.skipif(why_unavailable() is not None, reason="executorch is not installed")
RANGES = {"n": (1, 7, 40), "length": (1, 6, 8)}


def write(state: GraphState, path: Path) -> list[str]:
    ends = input_specs(state.model), output_specs(state.model)
    return [note.text for note in write_pte(state, ends, RANGES, path)]


def run_pte(path: Path, feeds: list[Any]) -> list[np.ndarray]:
    session = BACKENDS["executorch"].open(path, 1, {})
    return [next(iter(session.run(feed).values())) for feed in feeds]


def distance(made: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """Return the root mean square of the difference, as a share of what is wanted."""
    difference = np.concatenate([(a - b).ravel() for a, b in zip(made, wanted, strict=True)])
    return float(np.sqrt(np.mean(difference**2) / np.mean(np.concatenate([b.ravel() for b in wanted]) ** 2)))


@installed
@pytest.mark.slow
def test_a_cnn_in_int8_gives_what_its_onnx_file_gives(tmp_path: Path) -> None:
    model, feeds = residual_cnn(), images(2)
    state = int8_state(model, feeds)
    assert write(state, tmp_path / "a.pte") == [] and write(state, tmp_path / "b.pte") == []
    assert (tmp_path / "a.pte").read_bytes() == (tmp_path / "b.pte").read_bytes()
    many = [{name: np.concatenate([x] * 5)[:40] for name, x in feeds[0].items()}]
    one = [{name: x[:1] for name, x in feeds[0].items()}]
    for calls in (feeds, many, one):
        wanted = run(finish(state, TARGETS["executorch"])[0], calls)
        assert distance(run_pte(tmp_path / "a.pte", calls), wanted) < 0.5 * distance(run(model, calls), wanted)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_an_encoder_scales_rows_and_takes_texts_of_any_length(tmp_path: Path, mode: str) -> None:
    model, feeds = transformer(), tokens(2)
    state = int8_state(model, feeds, mode=mode)
    write(state, tmp_path / "a.pte")
    assert distance(run_pte(tmp_path / "a.pte", feeds), run(model, feeds)) < 0.05
    short = [{name: x[:1, :3] for name, x in feed.items()} for feed in feeds]
    assert distance(run_pte(tmp_path / "a.pte", short), run(model, short)) < 0.05


@installed
@pytest.mark.slow
def test_a_float_model_and_what_a_session_refuses(tmp_path: Path) -> None:
    model, feeds = residual_cnn(), images(1)
    write(GraphState(model), tmp_path / "a.pte")
    np.testing.assert_allclose(run_pte(tmp_path / "a.pte", feeds)[0], run(model, feeds)[0], atol=1e-5)
    session = BACKENDS["executorch"].open(tmp_path / "a.pte", 1, {})
    with pytest.raises(UsageError, match=r"a\.pte: ExecuTorch could not run the model on"):
        session.run({name: np.concatenate([x] * 41) for name, x in feeds[0].items()})
    (tmp_path / "c.pte").write_bytes(b"no program")
    with pytest.raises(BundleError, match=r"c\.pte: ExecuTorch cannot load the model"):
        BACKENDS["executorch"].open(tmp_path / "c.pte", 1, {})


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"model\.onnx: ExecuTorch runs \.pte files; add \{kind: executorch\}"):
        BACKENDS["executorch"].open(tmp_path / "model.onnx", 1, {})


@installed
@pytest.mark.slow
def test_a_bundle_holds_it_and_times_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.judge.bundle.available_others", lambda manifest, main: ["executorch"])
    recipe = changed(image_recipe(tmp_path), export=[{"kind": "onnx"}, {"kind": "executorch"}])
    report = apply(recipe, tmp_path / "bundle", tmp_path / "cache", tmp_path)
    manifest = verify(tmp_path / "bundle")
    assert manifest.candidate_for("executorch").path == "executorch/model.pte"
    assert manifest.candidate_for("onnxruntime-cpu").kind == "onnx"
    rows = {row["artifact"]: row for row in report.backends if row["name"] in ("executorch", "onnxruntime-cpu")}
    assert rows["pte-executorch"]["latency_ms"]["p50"] > 0 and rows["baseline-executorch"]["fidelity"]["agreement"] == 1
    assert rows["pte-executorch"]["fidelity"]["cosine"] == pytest.approx(
        rows["candidate"]["fidelity"]["cosine"], abs=0.01
    )


@installed
@pytest.mark.slow
def test_a_verdict_is_its_own(tmp_path: Path) -> None:
    recipe = changed(image_recipe(tmp_path), target="executorch", export=[{"kind": "executorch"}])
    report = apply(recipe, tmp_path / "bundle", tmp_path / "cache", tmp_path)
    assert report.backend == "executorch" and report.verdict == "pass"


def refuse(recipe: dict[str, Any], folder: Path) -> str:
    with pytest.raises(PlanError) as error:
        plan(recipe, folder, folder / "cache")
    return str(error.value)


def test_the_plan_refuses_what_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.backends.executorch.why_unavailable", lambda: "it is not there")
    recipe = changed(image_recipe(tmp_path), export=[{"kind": "onnx"}, {"kind": "executorch"}])
    assert "export.1: executorch: needs the package executorch, which is not installed: pip install" in refuse(
        recipe, tmp_path
    )
    half = changed(recipe, passes=[{"kind": "autocast", "dtype": "float16"}])
    assert "target executorch is written in float32 and int8 alone; use kind: int8" in refuse(half, tmp_path)


def test_a_decoder_is_no_model_of_one_call(tmp_path: Path) -> None:
    recipe = language_recipe(tmp_path, [{"kind": "rtn", "bits": 4}], export=[{"kind": "executorch"}])
    assert "a model of task text-generation is written as onnx, " in refuse(recipe, tmp_path)


def test_an_operator_without_a_form_in_torch_is_named() -> None:
    model = residual_cnn()
    x = model.graph.inputs[0]
    node = ir.node("NonMaxSuppression", [x, x], name="boxes")
    model.graph.append(node)
    with pytest.raises(NotExportable, match=r"executorch: no torch module .* 1 NonMaxSuppression \(boxes\); use"):
        check_lowers(model)
    assert executorch.OTHER_WAY.startswith("use {kind: onnx}")
