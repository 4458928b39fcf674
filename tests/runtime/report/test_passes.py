"""What each pass of a build cost and gave: measured beside the candidate, recorded, shown again as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from runtime.bundle.format import Benchmark, Gate, Judgement, Manifest, model_size, read_outputs
from runtime.bundle.manifest import KvCacheSpec
from runtime.clock.turns import Turns
from runtime.decode.scoring import score
from runtime.encode.preprocess import make_preprocessor
from runtime.errors import BundleError
from runtime.judge.findings import PassRow
from runtime.judge.passes import PASSES_FILE, PassModel
from runtime.report.report import render_markdown, render_text, to_dict
from runtime.report.validate import validate
from runtime.stats import paired_difference
from runtime.tasks.manifest import verify, write_bundle
from runtime.tasks.predict import bundle_preprocessor, run_samples

pytestmark = pytest.mark.usefixtures("judge_here")
FAST = Benchmark(batch_size=1, throughput_batch_size=4, warmup=1, iterations=12)
N = 300
ONE = ("onnxruntime-cpu",)


@pytest.fixture
def bundle(tmp_path: Path, tiny: Any) -> Path:
    """Classifiers of 5 classes, labels that the baseline has right three times in four."""
    root = tmp_path / "bundle"
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    tiny.image_model(root / "model/model.onnx", seed=3)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (N, 4, 4, 3), np.uint8)
    right = outputs_of(root / "baseline/model.onnx", images, tiny)["logits"].argmax(axis=1)
    labels = np.where(rng.random(N) < 0.75, right, rng.integers(0, 5, N))
    manifest: Manifest = tiny.stage(root, "image-classification", tiny.image_spec, {"image": images, "label": labels})
    judgement = Judgement(gates=(Gate("top1", max_drop=0.99),), benchmark=FAST)
    write_bundle(root, replace(manifest, judgement=judgement))
    return root


def outputs_of(path: Path, images: np.ndarray, tiny: Any) -> dict[str, np.ndarray]:
    session = tiny.open_onnx(path)
    preprocessor = make_preprocessor(tiny.image_spec, session.inputs, None)
    return run_samples(session, preprocessor, "image-classification", {"image": images})


def images_and_labels(bundle: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(bundle / "evaluation/samples.npz") as columns:
        return columns["image"], columns["label"]


def pass_model(bundle: Path, path: Path, tiny: Any, name: str = "one") -> PassModel:
    """The model in `path` as a build would hand it in."""
    return PassModel(name, 1.5, path, model_size(path), None, outputs_of(path, images_and_labels(bundle)[0], tiny))


def test_a_pass_that_changes_nothing_and_one_that_does_all(bundle: Path, tiny: Any) -> None:
    same, done = bundle / "baseline/model.onnx", bundle / "model/model.onnx"
    models = [pass_model(bundle, same, tiny), pass_model(bundle, done, tiny, "all"), PassModel("last", 2.0)]
    report = validate(bundle, ONE, passes=models)
    assert report.steps is not None and not report.steps.recorded
    start, nothing, everything, end = report.steps.rows
    assert [row.name for row in report.steps.rows] == ["float", "one", "all", "last"]
    assert (nothing.size_bytes, nothing.smaller, nothing.seconds) == (start.size_bytes, 1.0, 1.5)
    assert {name: nothing.metrics[name] for name in start.metrics} == start.metrics
    assert nothing.metrics["agreement"] == 1.0 and nothing.changes["top1"].value == 0.0
    assert everything.metrics == end.metrics and everything.size_bytes == end.size_bytes
    assert {change.value for change in end.changes.values()} == {0.0}


def test_both_ends_are_the_report_s_own_numbers(bundle: Path, tiny: Any) -> None:
    report = validate(
        bundle, ONE, passes=[pass_model(bundle, bundle / "model/model.onnx", tiny), PassModel("last", 2.0)]
    )
    assert report.steps is not None
    start, between, end = report.steps.rows
    assert (start.metrics, start.latency_ms) == (report.baseline.metrics, report.baseline.latency_ms["p50"])
    assert (end.metrics, end.latency_ms) == (report.candidate.metrics, report.candidate.latency_ms["p50"])
    assert (end.smaller, end.faster) == (report.ratios["size"], report.ratios["latency_p50"])
    assert (start.seconds, start.smaller, start.faster, end.seconds) == (None, None, None, 2.0)
    assert between.latency_ms is not None and between.latency_ms > 0 and between.faster is not None
    assert report.steps.shown == ("top1",) and report.steps.latency == "latency_p50"


def test_a_change_is_paired_sample_by_sample(bundle: Path, tiny: Any) -> None:
    path = tiny.image_model(bundle.parent / "pass.onnx", seed=2)
    report = validate(bundle, ONE, passes=[pass_model(bundle, path, tiny), PassModel("last", 0.0)])
    images, labels = images_and_labels(bundle)
    files = (bundle / "baseline/model.onnx", path, bundle / "model/model.onnx")
    right = [outputs_of(file, images, tiny)["logits"].argmax(axis=1) == labels for file in files]
    assert report.steps is not None
    for number in (1, 2):
        gained, lost = right[number] & ~right[number - 1], right[number - 1] & ~right[number]
        expected = paired_difference(int(gained.sum()), int(lost.sum()), N, 0.95)
        change = report.steps.rows[number].changes["top1"]
        assert change.value == pytest.approx((gained.sum() - lost.sum()) / N)
        assert change.interval == pytest.approx((expected.low, expected.high))
    assert report.steps.rows[2].changes["kl"].interval is None, "of kl no row is held against the truth"


def test_times_are_held_against_the_baseline_of_the_same_rounds(
    bundle: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others take 3 times as long as the baseline, whose pace is another in each process."""

    def timed(calls: Sequence[Any], count: int, *, seed: int, **more: Any) -> Turns:
        paces = np.array([1.0, 3.0])[: len(calls), None, None]
        return Turns(paces * np.full((len(calls), 5, 1), 0.001 * (1 + seed)))

    monkeypatch.setattr("runtime.measure.process.time_in_turns", timed)
    report = validate(
        bundle, ONE, passes=[pass_model(bundle, bundle / "model/model.onnx", tiny), PassModel("last", 2.0)]
    )
    assert report.steps is not None
    assert [row.faster for row in report.steps.rows[1:]] == pytest.approx([1 / 3, 1 / 3])
    assert report.steps.rows[0].latency_ms == pytest.approx(3.5)


def test_more_models_beside_change_nothing_that_else_is_measured(bundle: Path, tiny: Any) -> None:
    report = validate(
        bundle, ONE, passes=[*[pass_model(bundle, bundle / "model/model.onnx", tiny)] * 3, PassModel("x", 0.0)]
    )
    assert report.benchmark["processes"] == 6
    assert report.candidate.throughput_batch_size == 4 and report.candidate.peak_memory_bytes is not None
    assert [row["artifact"] for row in report.backends] == ["baseline", "candidate"]


def test_a_later_validation_shows_what_was_recorded(bundle: Path, tiny: Any) -> None:
    first = validate(
        bundle, ONE, passes=[pass_model(bundle, bundle / "model/model.onnx", tiny), PassModel("last", 2.0)]
    )
    digest = verify(bundle).digest
    again = validate(bundle, ONE)
    assert first.steps is not None and again.steps == replace(first.steps, recorded=True)
    assert verify(bundle).digest == digest, "what was recorded is in no manifest"
    assert "not in this run" in render_text(again) and "not in this run" not in render_text(first)
    assert json.loads((bundle / "report.json").read_text())["steps"]["rows"][2]["name"] == "last"


def test_a_bundle_without_recorded_passes_has_none(bundle: Path) -> None:
    report = validate(bundle, ONE)
    assert report.steps is None and to_dict(report)["steps"] is None
    assert not (bundle / PASSES_FILE).exists() and "what each pass" not in render_text(report)


def test_a_pass_that_could_not_be_made_is_a_row_that_says_why(bundle: Path, tiny: Any) -> None:
    models = [
        pass_model(bundle, bundle / "baseline/model.onnx", tiny),
        PassModel("lost", 3.0, error="not measured: no such | kernel"),
        PassModel("last", 2.0),
    ]
    report = validate(bundle, ONE, passes=models)
    assert report.steps is not None
    lost, end = report.steps.rows[2:]
    assert lost == PassRow("lost", 3.0, error="not measured: no such | kernel")
    drop = report.differences["top1"]
    assert end.changes["top1"].value == pytest.approx(drop["value"]), "it is against the last that was measured"
    for shown in (render_text(report), report._repr_html_()):
        assert "not measured: no such | kernel" in shown
    assert "no such \\| kernel" in render_markdown(report)


def test_a_pass_with_broken_outputs_has_no_quality(bundle: Path, tiny: Any) -> None:
    good = pass_model(bundle, bundle / "model/model.onnx", tiny)
    assert good.outputs is not None
    broken = replace(good, outputs={"logits": np.full_like(good.outputs["logits"], np.nan)})
    report = validate(bundle, ONE, passes=[broken, PassModel("last", 2.0)])
    assert report.steps is not None
    row = report.steps.rows[1]
    assert row.error.startswith("its outputs are broken: output 'logits' holds NaN") and row.metrics == {}
    assert row.faster is not None and row.smaller is not None


def test_a_broken_candidate_is_a_row_without_quality(bundle: Path, tiny: Any) -> None:
    root = bundle.parent / "broken"
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    weight = np.full((3, 5), np.nan, np.float32)
    model = tiny.image_model(root / "model/model.onnx", seed=1)
    graph = onnx.load(model)
    graph.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "weight"))
    onnx.save(graph, model)
    images, labels = images_and_labels(bundle)
    manifest = tiny.stage(root, "image-classification", tiny.image_spec, {"image": images, "label": labels})
    write_bundle(root, replace(manifest, judgement=Judgement(benchmark=FAST)))
    report = validate(
        root, ONE, passes=[pass_model(bundle, bundle / "baseline/model.onnx", tiny), PassModel("last", 2.0)]
    )
    assert report.verdict == "fail" and report.steps is not None
    assert report.steps.rows[-1].metrics == {} and "broken" in report.steps.rows[-1].error
    assert report.steps.rows[1].metrics["agreement"] == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data | {"rows": [{}]}, r"steps\.rows\[0\]\.name: missing; remove it"),
        (lambda data: data | {"manifest_digest": "0"}, "is of another bundle; remove it"),
    ],
)
def test_what_was_recorded_is_checked(bundle: Path, tiny: Any, change: Callable[[Any], Any], said: str) -> None:
    validate(bundle, ONE, passes=[pass_model(bundle, bundle / "model/model.onnx", tiny), PassModel("last", 2.0)])
    data = json.loads((bundle / PASSES_FILE).read_text())
    (bundle / PASSES_FILE).write_text(json.dumps(change(data)))
    with pytest.raises(BundleError, match=said):
        validate(bundle, ONE)


def test_what_was_recorded_is_json(bundle: Path) -> None:
    (bundle / PASSES_FILE).write_text("{")
    with pytest.raises(BundleError, match=r"report\.steps\.json: Expecting .*; remove it"):
        validate(bundle, ONE)


def test_the_table_has_a_row_for_each_pass_wherever_it_is_drawn(bundle: Path, tiny: Any) -> None:
    report = validate(
        bundle, ONE, passes=[pass_model(bundle, bundle / "model/model.onnx", tiny, "<b>"), PassModel("z", 0.0)]
    )
    text = render_text(report)
    rows = text[text.index("what each pass cost and gave") :].splitlines()[1:5]
    assert [row.split()[0] for row in rows] == ["pass", "float", "<b>", "z"]
    assert rows[0].split() == ["pass", "size", "smaller", "top1", "change", "latency", "p50", "faster", "took"]
    assert "1.5 s" in rows[2] and "x" in rows[2]
    html = report._repr_html_()
    assert "<td>&lt;b&gt;</td>" in html and "<td><b></td>" not in html
    assert "| <b> |" in render_markdown(report)


def test_of_a_decoder_the_time_for_each_token_is_told(make_decoder_bundle: Any, tiny: Any) -> None:
    root = make_decoder_bundle(noise=0.3)
    path = tiny.decoder_model(root.parent / "pass/model.onnx", noise=0.1)
    manifest = verify(root)
    cache: KvCacheSpec = tiny.kv_cache()
    sessions = [tiny.open_onnx(path), tiny.open_onnx(root / "baseline/model.onnx")]
    encoder = bundle_preprocessor(root, manifest, sessions[0].inputs)
    outputs = score(sessions[0], encoder, {"text": tiny.stories}, 32, sessions[1])
    report = validate(root, passes=[PassModel("one", 0.5, path, model_size(path), cache, outputs), PassModel("z", 0.0)])
    assert report.steps is not None and report.steps.latency == "tpot"
    start, between, end = report.steps.rows
    assert start.latency_ms == report.baseline.generation["tpot"] and end.faster == report.ratios["tpot"]
    own, frozen = outputs["nll"].sum() / outputs["n_tokens"].sum(), read_outputs(root, manifest)
    assert between.metrics["nll"] == pytest.approx(own)
    assert between.changes["nll"].value == pytest.approx(own - frozen["nll"].sum() / frozen["n_tokens"].sum())
    assert between.metrics["kl_token"] is not None and between.latency_ms is not None
    assert "time per token  faster" in render_text(report)
