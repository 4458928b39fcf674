"""Engines, through the real build: compiled by TensorRT for RTX where it is installed, left as orders where not."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makers import apply, changed, plan
from places import QUICKSTART
from tiny_lm import QUICK_DECODING, language_folder, language_recipe
from typer.testing import CliRunner

import compress
from compress.cli import app
from compress.commands.compile import compile_bundle
from compress.commands.parity import bundle_parity
from compress.errors import ExportError, PlanError
from compress.recipe.load import load_recipe
from runtime import open_bundle
from runtime.backends import BACKENDS
from runtime.errors import UsageError
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, verify

DECODER: dict[str, Any] = {"num_hidden_layers": 1, "initializer_range": 0.1}
RTX = {"kind": "tensorrt-rtx", "compute_capabilities": ["8.6", "12.0"]}
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None,
    reason="TensorRT for RTX is not installed: pip install '.[tensorrt-rtx]'",
)


def hide_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no engine run."""
    broken = replace(BACKENDS["tensorrt-rtx"], available=lambda: "no GPU")
    monkeypatch.setitem(BACKENDS.own, "tensorrt-rtx", broken)


def engines(net: tuple[Path, dict[str, Any]], *exports: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return changed(net[1], target="tensorrt-rtx", export=list(exports) or [RTX], **parts)


@needs_rtx
@pytest.mark.parametrize(
    ("passes", "asked", "capabilities"),
    [
        ([{"kind": "int8", "restore": {"max_layers": 0}}], "int8", ("8.6", "12.0")),
        ([{"kind": "autocast"}], "float16", ("8.6", "12.0")),
        ([{"kind": "fp8", "restore": {"max_layers": 0}}], "float8", ("8.9", "12.0")),
    ],
)
def test_an_engine_for_several_gpus_without_one(
    net: tuple[Path, dict[str, Any]],
    cache: Path,
    tmp_path: Path,
    passes: list[Any],
    asked: str,
    capabilities: tuple[str, ...],
) -> None:
    export = {**RTX, "compute_capabilities": list(capabilities)}
    gates = [{"metric": "latency_p50", "min_speedup": 0.01}, {"metric": "top1", "max_drop": 0.9}]
    report = apply(engines(net, export, passes=passes, validate={"gates": gates}), tmp_path / "b", cache, net[0])
    manifest = verify(tmp_path / "b")
    engine = manifest.artifact("engine-tensorrt-rtx")
    assert engine.engine is not None and engine.path == "model/model.tensorrt-rtx.engine"
    record = engine.engine
    assert record.compute_capabilities == capabilities and record.inspected == "log" and record.n_layers > 2
    assert engine.precision == asked and asked in record.asked and record.held == 1.0, record.short
    layers = json.loads((tmp_path / "b" / record.layers).read_text())
    assert len(layers) == record.n_layers and record.layers in manifest.files
    assert any(asked in layer["inputs"] and layer["nodes"] for layer in layers)
    baseline = manifest.artifact("baseline-tensorrt-rtx").engine
    assert baseline is not None and "float32" in baseline.asked and baseline.held == 1.0, baseline
    assert not manifest.waiting()
    (shapes,) = record.profiles[0].values()
    assert (shapes.min[0], shapes.opt[0], shapes.max[0]) == (1, 1, 32)
    assert any("100% of the products asked for" in text for text in report.advice)
    assert report.backends[0]["name"] == "onnxruntime-cpu"
    assert [gate.verdict for gate in report.gates] == ["undecided", "pass"] and report.exit_code == 3
    assert "the bundle is for tensorrt-rtx, which does not run on this machine; judge it there" in report.gates[0].why


@needs_rtx
def test_the_quickstart_becomes_an_engine(cache: Path, tmp_path: Path) -> None:
    sets = (
        *("target=tensorrt-rtx", "export=[{kind: tensorrt-rtx}]", "data.evaluation.samples=64"),
        *("validate.gates=[{metric: top1, max_drop: 0.2}]", "validate.benchmark={processes: 1}"),
    )
    compress.apply(load_recipe(QUICKSTART, sets), tmp_path / "b", cache=cache)
    record = verify(tmp_path / "b").artifact("engine-tensorrt-rtx").engine
    assert record is not None and record.compute_capabilities == ("8.0", "8.6", "8.9", "12.0")
    assert "int8" in record.asked and record.held == 1.0, record.short


@needs_rtx
def test_a_decoder_becomes_an_engine_with_its_cache(cache: Path, tmp_path: Path) -> None:
    language_folder(tmp_path / "lm", **DECODER)
    judged = {"gates": [], "benchmark": QUICK_DECODING}
    passes = [{"kind": "rtn", "scheme": "W4A16", "group_size": 32}, {"kind": "autocast"}]
    recipe = language_recipe(tmp_path, passes, target="tensorrt-rtx", export=[RTX], validate=judged)
    apply(recipe, tmp_path / "b", cache, tmp_path)
    record = verify(tmp_path / "b").artifact("engine-tensorrt-rtx").engine
    assert record is not None and {"int4", "float16"} <= record.asked.keys() and record.held == 1.0, record
    prompts, decoding = (profile["past_key_values.0.key"] for profile in record.profiles)
    assert prompts.max[2] == 0 and (decoding.min[2], decoding.max[2]) == (1, 127)


def test_where_it_cannot_be_compiled_the_order_waits(
    net: tuple[Path, dict[str, Any]],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe = engines(net, passes=[{"kind": "equalize"}, {"kind": "int8"}], validate={"gates": []})
    with monkeypatch.context() as missing:
        missing.setattr("compress.engine.compile._explain_library_trouble", "{} is not installed".format)
        made = plan(recipe, net[0], cache)
        assert any("finishes it on the target machine" in note.text for note in made.notes)
        apply(recipe, tmp_path / "b", cache, net[0])
    manifest = read_manifest(tmp_path / "b")
    assert [order.name for order in manifest.waiting()] == ["engine-tensorrt-rtx", "baseline-tensorrt-rtx"]
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        return
    with monkeypatch.context() as broken:
        broken.setattr("compress.commands.compile.validate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compile_bundle(tmp_path / "b")
    assert verify(tmp_path / "b").waiting()  # it is as it was
    done = CliRunner().invoke(app, ["compile", str(tmp_path / "b"), "--json"])
    assert done.exit_code == 0 and capfd.readouterr().out == "", done.stderr  # nothing of the library's
    report = json.loads(done.stdout)
    assert not verify(tmp_path / "b").waiting() and report["verdict"] == "unjudged"
    assert [row["name"] for row in report["steps"]["rows"]] == ["float", "equalize", "int8"]
    said = (tmp_path / "b/layers.json").read_text()
    assert "left for `compress compile`" not in said and "100% of the products asked for" in said
    assert any("100% of the products asked for" in text for text in report["advice"])
    with pytest.raises(ExportError, match="the bundle has its engines"):
        compile_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    ("export", "said"),
    [
        (
            {"profiles": [{"batch": [8, 4, 32]}]},
            r"export\.0: profiles\.0\.batch: \[8, 4, 32\] is not min <= opt <= max",
        ),
        (
            {"profiles": [{"batch": [1, 4, 8]}]},
            "profiles: none takes batch 32, and the bundle is judged so; widen one",
        ),
        ({"profiles": [{"batch": [8, 8, 32]}]}, "profiles: none takes batch 1, and the bundle is judged so"),
        ({"profiles": [{"rows": [1, 4, 32]}]}, "rows: the model has no free size of that name; it has batch"),
        pytest.param(
            {"compute_capabilities": ["9.0"]}, r"does not compile for 9\.0; known: 7\.5, 8\.0", marks=needs_rtx
        ),
    ],
)
def test_refused_before_any_work(
    net: tuple[Path, dict[str, Any]], cache: Path, export: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        plan(engines(net, {**RTX, **export}), net[0], cache)


def test_float8_is_refused_for_gpus_that_have_none(net: tuple[Path, dict[str, Any]], cache: Path) -> None:
    with pytest.raises(
        PlanError, match=r"8\.6 cannot compute in float8, which begins with 8\.9; leave them out, or use"
    ):
        plan(engines(net, passes=[{"kind": "fp8"}]), net[0], cache)


@pytest.mark.parametrize(
    ("rounding", "said"),
    [
        ({"scheme": "W4A16_ASYM", "group_size": 32}, "tensorrt-rtx refuses uint4 and zero points; use scheme: W4A16"),
        ({"scheme": "W8A16", "group_size": 32}, "takes block-wise weights in 4 bits only; use scheme: W4A16, or int8"),
        ({"scheme": "W4A16", "group_size": 16}, "has 4-bit kernels for group_size 32, 64, 128, not 16"),
    ],
)
def test_weights_that_tensorrt_has_no_kernels_for(
    net: tuple[Path, dict[str, Any]], cache: Path, rounding: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        plan(engines(net, passes=[{"kind": "rtn", **rounding}]), net[0], cache)


def test_a_decoder_in_small_floats_is_judged_without_its_gpu(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_gpu(monkeypatch)
    language_folder(tmp_path / "lm", **DECODER)
    compiled = importlib.util.find_spec("tensorrt_rtx_bindings") is not None
    export = {"kind": "tensorrt-rtx", "compute_capabilities": ["12.0"]} if compiled else {"kind": "onnx"}
    judged = {"gates": [{"metric": "nll", "max_drop": 1}], "benchmark": QUICK_DECODING}
    passes = [{"kind": "gptq", "scheme": "NVFP4"}]
    recipe = language_recipe(tmp_path, passes, target="tensorrt-rtx", export=[export], validate=judged)
    report = apply(recipe, tmp_path / "b", cache, tmp_path)
    manifest = verify(tmp_path / "b")
    assert report.verdict == "pass" and report.candidate.metrics["nll"] != report.baseline.metrics["nll"]
    assert report.scored_by.startswith("torch")
    assert manifest.score is not None and "computes no NVFP4 on CPUs" in manifest.score.not_run
    assert validate(tmp_path / "b").candidate.metrics == report.candidate.metrics
    with pytest.raises(UsageError, match="the candidate is a graph for tensorrt-rtx"):
        open_bundle(tmp_path / "b")
    if compiled:
        record = manifest.artifact("engine-tensorrt-rtx").engine
        assert record is not None and "float4" in record.asked and record.held == 1.0, record
        with pytest.raises(ExportError, match="computes no FP4 and no MXFP8"):
            bundle_parity(tmp_path / "b", "tensorrt-rtx")


def test_small_floats_that_torch_does_not_score_are_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_gpu(monkeypatch)
    passes = [{"kind": "rtn", "scheme": "NVFP4"}, {"kind": "autocast"}]
    graph = [{"kind": "onnx"}]
    with pytest.raises(PlanError, match=r"tensorrt-rtx does not work here \(.*computes no NVFP4 on CPUs"):
        plan(language_recipe(tmp_path, passes, target="tensorrt-rtx", export=graph), tmp_path, cache)
    engine = [{"kind": "tensorrt-rtx", "compute_capabilities": ["8.9", "12.0"]}]
    with pytest.raises(PlanError, match=r"8\.9 cannot compute in nvfp4, which begins with 10; leave them out"):
        plan(language_recipe(tmp_path, passes[:1], target="tensorrt-rtx", export=engine), tmp_path, cache)


@needs_rtx
def test_what_needs_a_gpu_is_told_where_there_is_none(
    net: tuple[Path, dict[str, Any]], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.engine.compile.gpu_here", lambda: None)
    recipe = engines(net, {**RTX, "strip_weights": True}, validate={"gates": []})
    why = "tensorrt-rtx compiles with strip_weights on a GPU, and no driver sees one here"
    assert any(why in note.text for note in plan(recipe, net[0], cache).notes)
    apply(recipe, tmp_path / "b", cache, net[0])
    with pytest.raises(ExportError, match=f"engine-tensorrt-rtx: {why}"):
        compile_bundle(tmp_path / "b")
