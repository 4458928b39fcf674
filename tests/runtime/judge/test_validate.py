"""Judging whole bundles: identity, broken candidates, stale reports, and the exit codes of `python -m runtime`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_bundles
from places import ROOT

from runtime.__main__ import main
from runtime.backends import BACKENDS
from runtime.bundle.format import Benchmark, Gate, Judgement, Manifest, write_outputs
from runtime.encode.preprocess import TensorPreprocess
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.progress import Progress
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, verify, write_bundle

pytestmark = pytest.mark.usefixtures("judge_here")
FAST = Benchmark(batch_size=1, throughput_batch_size=4, warmup=1, iterations=12)
N = 400
MakeBundle = Callable[..., Path]


@pytest.fixture
def make_bundle(tmp_path: Path, tiny: Any) -> MakeBundle:
    """A bundle of image classifiers of 5 classes over N samples; `seed` 1 makes the candidate the baseline itself."""

    def make(*gates: Gate, seed: int = 1, labels: np.ndarray | None = None, **more: Any) -> Path:
        root = tmp_path / "bundle"
        tiny.image_model(root / "model/model.onnx", seed=seed)
        tiny.image_model(root / "baseline/model.onnx", seed=1)
        rng = np.random.default_rng(0)
        columns = {"image": rng.integers(0, 256, (N, 4, 4, 3), np.uint8)}
        columns |= {"label": rng.integers(0, 5, N)} if labels is None else {"label": labels} if labels.size else {}
        manifest: Manifest = tiny.stage(root, "image-classification", tiny.image_spec, columns)
        (root / "layers.json").write_text('[{"name": "fc", "bits": 8}]')
        judgement = Judgement(gates=gates, benchmark=FAST, **more)
        write_bundle(root, replace(manifest, judgement=judgement))
        return root

    return make


ONE = ("onnxruntime-cpu",)


# identities


def test_a_model_compared_with_itself_holds_every_quality_gate(make_bundle: MakeBundle) -> None:
    root = make_bundle(
        Gate("top1", max_drop=0.02), Gate("agreement", min=0.98), Gate("kl", max=0.0), Gate("size_ratio", min=1)
    )
    report = validate(root, ONE)
    assert report.verdict == "pass"
    assert report.exit_code == 0
    assert report.candidate.metrics["agreement"] == 1.0
    assert report.candidate.metrics["kl"] == 0.0
    assert report.candidate.metrics["top1"] == report.baseline.metrics["top1"]
    assert report.differences["top1"]["value"] == 0.0
    assert report.ratios["size"] == 1.0


def test_the_report_is_in_the_bundle_and_the_bundle_stays_intact(make_bundle: MakeBundle) -> None:
    root = make_bundle(Gate("top1", max_drop=0.02))
    report = validate(root, ONE)
    assert verify(root) == read_manifest(root)
    data = json.loads((root / "report.json").read_text())
    assert data["verdict"] == "pass"
    assert data["manifest_digest"] == verify(root).digest
    assert data["layers"] == [{"name": "fc", "bits": 8}]
    assert data["n_samples"] == N
    assert data["benchmark"]["processes"] == 6
    assert data["candidate"]["latency_ms"].keys() == {"p50", "p90", "p95", "p99"}
    assert [row["artifact"] for row in data["backends"]] == ["baseline", "candidate"]
    assert sum(row["fastest"] for row in data["backends"]) == 1
    assert (root / "report.xml").exists()
    assert (root / "report.md").read_text().startswith("# PASS")
    assert report.candidate.peak_memory_bytes is not None


# verdicts


def test_a_worse_model_fails_and_its_report_is_still_written(make_bundle: MakeBundle) -> None:
    root = make_bundle(Gate("agreement", min=0.98), seed=2)
    report = validate(root, ONE)
    assert (report.verdict, report.exit_code) == ("fail", 3)
    assert json.loads((root / "report.json").read_text())["gates"][0]["verdict"] == "fail"


def test_a_bound_too_tight_for_the_samples_is_undecided(make_bundle: MakeBundle) -> None:
    report = validate(make_bundle(Gate("top1", max_drop=0.001)), ONE)
    assert (report.verdict, report.exit_code) == ("undecided", 3)
    assert "400 samples); about" in report.gates[0].why


def test_a_bundle_without_gates_is_unjudged(make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_bundle(seed=2)
    assert main(["validate", str(root), "--backend", "onnxruntime-cpu"]) == 0
    assert "PASS" not in "".join(capsys.readouterr())
    texts = [(root / f"report.{kind}").read_text() for kind in ("json", "md", "xml")]
    assert json.loads(texts[0])["verdict"] == "unjudged" and not any("PASS" in text for text in texts)


@pytest.mark.parametrize("gates", [(), (Gate("top1", min=0.01, undecided="pass"), Gate("size", max=1e9))])
def test_a_candidate_that_gives_nan_fails_whatever_the_gates(
    gates: tuple[Gate, ...], make_bundle: MakeBundle, tiny: Any
) -> None:
    root = make_bundle(*gates)
    make_broken(root, tiny)
    report = validate(root, ONE)
    assert report.verdict == "fail"
    assert report.candidate.metrics == {}
    assert "output 'logits' holds NaN or infinity in 400 of 400 samples" in report.advice[0]
    assert [gate.holds for gate in report.gates] == [False, True][: len(gates)]
    json.loads((root / "report.json").read_text())


def make_broken(root: Path, tiny: Any) -> None:
    """Replace the candidate by one that gives NaN."""
    from onnx import TensorProto, helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 4, 4])
    y = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5])
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    path = tiny.save(root / "model/model.onnx", nodes, [x], [y], {"weight": np.full((3, 5), np.nan, np.float32)})
    manifest = read_manifest(root)
    candidate = replace(manifest.artifact("candidate"), size_bytes=path.stat().st_size)
    write_bundle(root, replace(manifest, artifacts=(candidate, manifest.artifact("baseline"))))


# tasks


def test_texts_are_judged_by_the_cosine_of_their_embeddings(make_text_bundle: Callable[..., Path]) -> None:
    words = ["the cat sat", "dog ran far", "on the mat", "cat", "far far dog"]
    columns = {"text": words * 12, "text_pair": (words[1:] + words[:1]) * 12, "label": np.linspace(0, 5, 60)}
    root = make_text_bundle("feature-extraction", columns)
    manifest = read_manifest(root)
    gates = (Gate("spearman", min=-0.9), Gate("cosine", max=0.999))
    write_bundle(root, replace(manifest, judgement=Judgement(gates=gates, benchmark=FAST)))
    report = validate(root, ONE)
    assert report.verdict == "pass"
    assert set(report.candidate.metrics) == {"spearman", "pearson", "cosine", "sqnr_db", "mse_baseline"}
    assert set(report.baseline.metrics) == {"spearman", "pearson"}


def test_a_generic_model_is_judged_against_the_baseline(tmp_path: Path, tiny: Any) -> None:
    root = tmp_path / "bundle"
    tiny.image_model(root / "model/model.onnx", seed=1)
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    columns = {"x": np.random.default_rng(0).normal(size=(60, 3, 4, 4)).astype(np.float32)}
    manifest = tiny.stage(root, "generic", TensorPreprocess(), columns)
    gates = (Gate("sqnr_db", min=100), Gate("cosine", max_drop=1e-9))
    write_bundle(root, replace(manifest, judgement=Judgement(gates=gates, benchmark=FAST)))
    assert validate(root, ONE).verdict == "pass"


@pytest.mark.skipif(BACKENDS["openvino"].available() is not None, reason="openvino is not installed")
def test_other_backends_are_compared_in_the_same_run(make_bundle: MakeBundle) -> None:
    report = validate(make_bundle(seed=2), ["onnxruntime-cpu", "openvino"])
    seen = [(row["name"], row["artifact"], row["precision"]) for row in report.backends]
    assert seen == [
        ("onnxruntime-cpu", "baseline", "float32"),
        ("onnxruntime-cpu", "candidate", "float32"),
        ("openvino", "baseline", "f32"),
        ("openvino", "baseline", "bf16"),
        ("openvino", "candidate", "float32"),
    ]
    assert sum(row["fastest"] for row in report.backends) == 1
    fidelity = {row: cells["fidelity"] for row, cells in zip(seen, report.backends, strict=True)}
    assert fidelity[seen[0]]["n_samples"] == 256
    assert fidelity[seen[2]]["agreement"] == 1.0
    assert fidelity[seen[4]]["agreement"] < 1.0


# refusals


def test_a_damaged_bundle_is_not_judged(make_bundle: MakeBundle) -> None:
    root = make_bundle()
    (root / "recipe.yaml").write_text("version: 2\n")
    with pytest.raises(BundleError, match=r"recipe\.yaml"):
        validate(root, ONE)


@pytest.mark.parametrize(("written", "said"), [("[[", "not JSON"), ('["fc"]', "must be a list of objects")])
def test_layers_that_are_none_are_named(make_bundle: MakeBundle, written: str, said: str) -> None:
    root = make_bundle()
    (root / "layers.json").write_text(written)
    write_bundle(root, read_manifest(root))
    with pytest.raises(BundleError, match=rf"layers\.json: {said}"):
        validate(root, ONE)


def test_labels_out_of_range_are_named(make_bundle: MakeBundle) -> None:
    with pytest.raises(UsageError, match="row 4 has label 9, and the model has 5 classes"):
        validate(make_bundle(labels=np.where(np.arange(N) == 4, 9, 0)), ONE)


def test_a_gate_that_needs_labels_is_refused_without_them(make_bundle: MakeBundle) -> None:
    with pytest.raises(UsageError, match="metric 'top1' needs labels"):
        validate(make_bundle(Gate("top1", min=0.5), labels=np.array([])), ONE)


def test_a_broken_baseline_is_refused(make_bundle: MakeBundle) -> None:
    root = make_bundle()
    write_outputs(root, {"logits": np.full((N, 5), np.nan, np.float32)})
    write_bundle(root, read_manifest(root))
    with pytest.raises(BundleError, match="the baseline cannot be compared with: output 'logits' holds NaN"):
        validate(root, ONE)


def test_a_judgement_beyond_memory_says_what_it_asked_for(make_bundle: MakeBundle) -> None:
    with pytest.raises(RuntimeFailure, match=r"out of memory: 43.0 MiB; the judgement takes \d+ samples at once"):
        validate(make_bundle(), ONE, progress=ended_by(MemoryError("43.0 MiB")))


def ended_by(error: Exception) -> Progress:
    """Progress of loops that fail."""

    def fail(items: Any, text: str, /, most_s: float | None = None) -> Any:
        raise error

    return fail


def test_a_run_that_fails_leaves_no_earlier_report(make_bundle: MakeBundle) -> None:
    root = make_bundle()
    validate(root, ONE)
    assert (root / "report.json").exists()
    with pytest.raises(BundleError, match="cannot run"):
        validate(root, ONE, progress=ended_by(BundleError("cannot run")))
    assert not (root / "report.json").exists()


# the command line


def test_exit_codes(make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(make_bundle(Gate("agreement", min=0.98), seed=2))
    assert main(["verify", root]) == 0
    assert main(["validate", root, "--backend", "onnxruntime-cpu"]) == 3
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL: tiny on onnxruntime-cpu: agreement 0.")
    assert main(["bench", root, "--threads", "1"]) == 0
    assert "UNJUDGED: tiny on onnxruntime-cpu: measured, held to no gates" in capsys.readouterr().out
    assert main(["validate", root, "--backend", "nope"]) == 2
    assert "unknown backend 'nope'" in capsys.readouterr().err
    Path(root, "recipe.yaml").unlink()
    assert main(["verify", root]) == 1
    assert "recipe.yaml: missing" in capsys.readouterr().err


def test_a_passing_bundle_exits_with_zero(make_bundle: MakeBundle) -> None:
    root = make_bundle(Gate("agreement", min=0.98))
    assert main(["validate", str(root), "--backend", "onnxruntime-cpu", "--json"]) == 0


@pytest.mark.parametrize("arguments", [[], ["judge", "x"], ["validate"], ["bench", "x", "--threads", "0"]])
def test_a_wrong_call_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "--help` shows the call" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["exit_code"]) == ("error", 2) and document["problems"]


def test_json_is_all_that_json_prints(make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(make_bundle())
    assert main(["validate", root, "--backend", "onnxruntime-cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path(root, "report.json").read_text())
    assert main(["bench", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "unjudged"
    assert main(["verify", root, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bundle"] == "tiny"
    assert main(["verify", root + "x", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["exit_code"] == 1


def test_predict_takes_what_the_task_takes(
    make_bundle: MakeBundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(make_bundle())
    np.savez(tmp_path / "in.npz", image=np.zeros((2, 4, 4, 3), np.uint8))
    assert main(["predict", root, str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].split("\t")[0] in {"a", "b", "c", "d", "e"}
    with np.load(tmp_path / "out.npz") as saved:
        assert saved["logits"].shape == (2, 5)
    assert main(["predict", root, str(tmp_path / "in.npz"), "--json"]) == 0
    assert [p.keys() for p in json.loads(capsys.readouterr().out)] == [{"label", "score"}] * 2
    assert main(["predict", root, str(tmp_path / "none.npz")]) == 2
    assert "none.npz: no such file" in capsys.readouterr().err


def test_predict_takes_texts(make_text_bundle: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    root = make_text_bundle("feature-extraction", {"text": ["the cat"]})
    assert main(["predict", str(root), "the dog", "the cat"]) == 0
    assert capsys.readouterr().out == "embeddings: float32 [2, 1, 6]\n"


def test_the_module_runs_as_a_program(make_bundle: MakeBundle) -> None:
    root = make_bundle()
    home = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "verify", str(root)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": home},
        check=False,
    )
    assert done.returncode == 0
    assert "as its manifest says" in done.stdout


@pytest.mark.parametrize("calls", [0, 12])
def test_another_way_to_run_it_that_fails_is_a_row_whatever_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """At its first call, or while all are timed, as memory runs out; the verdict is there nevertheless."""
    pytest.importorskip("openvino")
    openvino, left = BACKENDS["openvino"], iter(range(calls))

    class FailingLate:
        def __init__(self, *given: Any) -> None:
            self.session = openvino.open(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.session, name)

        def run(self, *given: Any) -> Any:
            if next(left, None) is None:
                raise MemoryError("bad_alloc")
            return self.session.run(*given)

    monkeypatch.setitem(BACKENDS.own, "openvino", replace(openvino, open=FailingLate))
    report = validate(tiny_bundles.make_bundle("image", tmp_path / "bundle"))
    rows = {row["name"]: row for row in report.backends if row["artifact"] == "candidate"}
    assert "bad_alloc" in rows["openvino"]["error"] and "latency_ms" in rows["onnxruntime-cpu"]
