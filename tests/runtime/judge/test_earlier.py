"""`--baseline`: what counts as a regression, how it is told, and what is refused before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from runtime.__main__ import main
from runtime.bundle.format import Benchmark, Gate, Judgement
from runtime.errors import BundleError, UsageError
from runtime.report.stored import read_stored_report
from runtime.report.validate import validate
from runtime.tasks.manifest import write_bundle

pytestmark = pytest.mark.usefixtures("judge_here")
FAST = Benchmark(batch_size=1, throughput_batch_size=4, warmup=1, iterations=12)
ONE = ("onnxruntime-cpu",)
MakeBundle = Callable[..., Path]


@pytest.fixture
def make_bundle(tmp_path: Path, tiny: Any) -> MakeBundle:
    """A bundle of classifiers whose labels are what the model of seed 1 says: seed 1 is right, any other is not."""

    def make(name: str, *gates: Gate, seed: int = 1, n: int = 300, **judged: Any) -> Path:
        root = tmp_path / name
        tiny.image_model(root / "model/model.onnx", seed=seed)
        tiny.image_model(root / "baseline/model.onnx", seed=1)
        images = np.random.default_rng(0).integers(0, 256, (n, 4, 4, 3), np.uint8)
        means = images.astype(float).mean(axis=(1, 2)) / 255
        weight = np.random.default_rng(1).normal(size=(3, 5))
        labels = (((means - (0.5, 0.4, 0.3)) / (0.2, 0.3, 0.4)) @ weight).argmax(axis=1)
        manifest = tiny.stage(root, "image-classification", tiny.image_spec, {"image": images, "label": labels})
        write_bundle(root, replace(manifest, judgement=Judgement(gates=gates, benchmark=FAST, **judged)))
        return root

    return make


def test_the_same_answers_are_no_regression(make_bundle: MakeBundle) -> None:
    validate(make_bundle("old"), ONE)
    report = validate(make_bundle("new"), ONE, earlier=read_stored_report(make_bundle("old")))
    assert report.exit_code == 0 and report.since is not None
    assert not report.since.find("worse") and not report.since.find("better")
    assert {"top1", "size"} <= {difference.metric for difference in report.since.differences}
    assert not {"kl", "cosine"} & {difference.metric for difference in report.since.differences}


def test_a_regression_exits_with_3_and_names_metric_values_and_interval(
    make_bundle: MakeBundle, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = make_bundle("old"), make_bundle("new", Gate("top1", min=0.01), seed=2)
    assert main(["validate", str(old), "--backend", ONE[0]]) == 0
    capsys.readouterr()
    assert main(["validate", str(new), "--backend", ONE[0], "--baseline", str(old / "report.json")]) == 3
    shown = capsys.readouterr().out
    then, now = (json.loads((root / "report.json").read_text()) for root in (old, new))
    values = [report["candidate"]["metrics"]["top1"] for report in (then, now)]
    (found,) = (row for row in now["since"]["differences"] if row["metric"] == "top1")
    low, high = found["change"]["low"], found["change"]["high"]
    told = f"top1 became worse: {values[0]:.4f} before, {values[1]:.4f} after"
    assert found["verdict"] == "worse" and high < 0
    assert told in shown and f"[{low:+.4f}, {high:+.4f}] (Tango paired score)" in shown
    assert "its gate holds; " in shown.splitlines()[-1] and "regressions beyond noise since" in shown.splitlines()[-1]
    assert told in (new / "report.md").read_text()
    failed = [
        case.get("name")
        for case in ElementTree.parse(new / "report.xml").iter("testcase")
        if case.find("failure") is not None
    ]
    assert f"top1 no worse than {old / 'report.json'}" in failed
    assert main(["verify", str(new)]) == 0


def test_the_report_of_the_folder_that_is_judged_again_is_read_before_it_goes(make_bundle: MakeBundle) -> None:
    root = make_bundle("old")
    validate(root, ONE)
    report = validate(root, ONE, earlier=read_stored_report(root))
    assert report.since is not None and report.since.before == str(root) and report.exit_code == 0


def test_a_report_alone_is_enough_and_is_paired_by_what_lies_beside_it(make_bundle: MakeBundle, tmp_path: Path) -> None:
    old = make_bundle("old")
    validate(old, ONE)
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("report.json", "report.samples.npz"):
        shutil.copy(old / name, kept / name)
    earlier = read_stored_report(kept / "report.json")
    since = validate(make_bundle("new", seed=3), ONE, earlier=earlier).since
    assert since is not None and not any("not paired" in difference.remark for difference in since.differences)
    (kept / "report.samples.npz").unlink()
    since = validate(make_bundle("other", seed=4), ONE, earlier=read_stored_report(kept)).since
    assert since is not None and "not paired" in next(d.remark for d in since.differences if d.metric == "top1")


def test_without_labels_nearness_to_the_float_model_counts(make_bundle: MakeBundle) -> None:
    old = make_bundle("old", metrics=("agreement", "kl"))
    validate(old, ONE)
    new = make_bundle("new", metrics=("agreement", "kl"), seed=2)
    since = validate(new, ONE, earlier=read_stored_report(old)).since
    assert since is not None and "agreement" in {difference.metric for difference in since.find("worse")}


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, {"n": 299}, "different evaluation sets, 300 samples"),
        (
            {"metrics": ("top1",)},
            {"gates": (Gate("agreement", min=0.1),)},
            "gate on 'agreement': .*old has no value of it",
        ),
        ({}, {"metrics": ("agreement",)}, "old has top1, which this judgement leaves out"),
    ],
)
def test_what_could_not_be_seen_is_refused_before_anything_runs(
    make_bundle: MakeBundle, then: Any, now: Any, message: str
) -> None:
    old = make_bundle("old", **then)
    validate(old, ONE)
    earlier = read_stored_report(old)
    loops: list[str] = []

    def note(items: Any, text: str, /, most_s: float | None = None) -> Any:
        loops.append(text)
        return items

    validate(old, ONE, progress=note)
    assert loops
    loops.clear()
    with pytest.raises(UsageError, match=f"--baseline: .*{message}"):
        validate(make_bundle("new", *now.pop("gates", ()), **now), ONE, earlier=earlier, progress=note)
    assert not loops


def test_reports_that_cannot_be_read_are_refused(make_bundle: MakeBundle, tmp_path: Path) -> None:
    root = make_bundle("old")
    with pytest.raises(UsageError, match=r"no report.json; `compress validate .*old` writes it"):
        read_stored_report(root)
    validate(root, ONE)
    data = json.loads((root / "report.json").read_text())
    for changed, message in (
        ({"format_version": 2}, "is of format 2, and this version of compress reads up to 1; update it"),
        ({"manifest_digest": "0" * 64}, "is of another bundle"),
        ({"candidate": 3}, "no report of a judgement"),
    ):
        (root / "report.json").write_text(json.dumps({**data, **changed}))
        with pytest.raises(UsageError, match=message):
            read_stored_report(root)
    with pytest.raises(UsageError, match=r"no-such.json: no report.json"):
        read_stored_report(tmp_path / "no-such.json")
    with pytest.raises(BundleError, match="is this a bundle's folder"):
        read_stored_report(tmp_path)
