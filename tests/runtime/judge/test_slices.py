"""Slices: rows of the same columns, the worst named honestly, gates on it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bundle.format import Benchmark, Gate, Judgement, canonical_json, read_slices, write_samples
from runtime.errors import BundleError, UsageError
from runtime.judge.evidence import Evidence, quality_evidence
from runtime.judge.findings import tabulate_slices
from runtime.judge.gates import GateResult, check_gates, judge
from runtime.judge.slices import Groups, find_groups
from runtime.report.report import render_html, render_markdown, render_text
from runtime.report.slices import slice_cells
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, write_bundle
from runtime.tasks.metrics import METRICS

IMAGE = "image-classification"
FAST = Benchmark(batch_size=1, throughput_batch_size=4, warmup=1, iterations=12)


def choose(right: np.ndarray, labels: np.ndarray, n_classes: int = 10) -> dict[str, np.ndarray]:
    """Logits that choose the label exactly where `right`."""
    return {"logits": np.eye(n_classes, dtype=np.float32)[np.where(right, labels, (labels + 1) % n_classes)]}


def slice_evidence(
    right: np.ndarray, labels: np.ndarray, judgement: Judgement, slices: dict[str, list[str]] | None = None
) -> dict[str, Evidence]:
    """top1 of a model that is right there against one that always is, on the slices of the judgement."""
    groups = find_groups(judgement, slices or {}, labels, IMAGE)
    ours, theirs = choose(right, labels), choose(np.ones(len(labels), bool), labels)
    return quality_evidence([METRICS["top1"], METRICS["kl"]], ours, theirs, labels, judgement, groups)


def decide(gate: Gate, right: np.ndarray, labels: np.ndarray) -> GateResult:
    judgement = Judgement(gates=(gate,), slices=("label",))
    (result,) = judge(judgement, slice_evidence(right, labels, judgement))
    return result


@pytest.fixture
def rare() -> tuple[np.ndarray, np.ndarray]:
    """Of 2,000 samples 60 are of class 7, of which half were lost: 1.5 points of all, 50 of these."""
    labels = np.where(np.arange(2000) < 60, 7, np.arange(2000) % 5)
    return np.arange(2000) >= 30, labels


def test_the_worst_class_falls_where_all_samples_together_hold(rare: tuple[np.ndarray, np.ndarray]) -> None:
    assert decide(Gate("top1", max_drop=0.03), *rare).verdict == "pass"
    result = decide(Gate("top1", max_drop=0.03, worst="label"), *rare)
    assert (result.verdict, result.slice, result.rule) == ("fail", "label=7", "max_drop 0.03, worst label")
    assert result.value == pytest.approx(0.5)
    assert result.why.startswith("the worst of 6 by label is '7'")
    assert decide(Gate("top1", min=0.3, worst="label"), *rare).verdict == "pass", "30 of 60 are surely more"
    assert decide(Gate("top1", max_drop=0.03, slice="label=3"), *rare).verdict == "pass"
    assert decide(Gate("top1", min_retained=0.9, worst="label"), *rare).verdict == "fail"


def test_a_slice_of_few_samples_leaves_the_gate_undecided_and_is_named() -> None:
    labels = np.where(np.arange(2000) < 3, 7, np.arange(2000) % 5)
    result = decide(Gate("top1", min=0.8, worst="label"), np.arange(2000) != 1999, labels)
    assert result.verdict == "undecided"
    assert "the worst of 6 by label is '4'; least is known of '7' (3 samples)" in result.why


def test_a_slice_is_what_its_samples_would_be_alone(rare: tuple[np.ndarray, np.ndarray]) -> None:
    right, labels = rare
    judgement = Judgement(slices=("label",))
    known = slice_evidence(right, labels, judgement)["top1"].slices["label"]
    for part in known:
        rows = labels == int(part.value)
        alone = slice_evidence(right[rows], labels[rows], Judgement())["top1"]
        assert (part.alone.n, part.alone.candidate, part.alone.difference) == (
            rows.sum(),
            alone.candidate,
            alone.difference,
        )
        assert part.at_once.candidate.low <= part.alone.candidate.low


def test_the_worst_of_many_equal_slices_is_not_found_bad_by_chance() -> None:
    """20 classes of one true accuracy, the bound: some are bad by chance, and the gate may say so in 3 % of sets."""
    rng, labels, wrong, naive = np.random.default_rng(0), np.repeat(np.arange(20), 100), 0, 0
    judgement = Judgement(gates=(Gate("top1", min=0.9, worst="label"),), slices=("label",))
    groups = find_groups(judgement, {}, labels, IMAGE)
    truth = choose(np.ones(2000, bool), labels, 20)
    for _ in range(150):
        ours = choose(rng.random(2000) < 0.9, labels, 20)
        evidence = quality_evidence([METRICS["top1"]], ours, truth, labels, judgement, groups)
        wrong += judge(judgement, evidence)[0].verdict == "fail"
        naive += any(part.alone.candidate.high < 0.9 for part in evidence["top1"].slices["label"])
    assert wrong <= 0.03 * 150 < 0.1 * 150 <= naive, (wrong, naive)


def test_what_is_no_mean_over_samples_is_not_sliced_by_class(rare: tuple[np.ndarray, np.ndarray]) -> None:
    right, labels = rare
    groups: Groups = find_groups(Judgement(slices=("label", "day")), {"day": ["a", "b"] * 1000}, labels, IMAGE)
    ours, theirs = choose(right, labels), choose(np.ones(2000, bool), labels)
    evidence = quality_evidence([METRICS["f1_macro"]], ours, theirs, labels, Judgement(), groups)
    assert list(evidence["f1_macro"].slices) == ["day"]


def test_classes_of_one_name_stay_apart() -> None:
    groups = find_groups(Judgement(slices=("label",)), {}, np.array([0, 1, 2]), IMAGE, ("cat", "dog", "cat"))
    assert list(groups["label"]) == ["cat (0)", "dog", "cat (2)"]


@pytest.mark.parametrize(
    ("judgement", "message"),
    [
        (Judgement(slices=("wether",)), "there is no column 'wether'; the samples have weather"),
        (Judgement(slices=("weather",), gates=(Gate("top1", min=0.5, slice="weather=fog"),)), "no sample has.*rain"),
        (Judgement(gates=(Gate("top1", min=0.5, worst="set"),)), "there are no slices by 'set'"),
    ],
)
def test_slices_that_no_sample_has_are_refused(judgement: Judgement, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_groups(judgement, {"weather": ["rain", "sun"]}, np.array([0, 1]), IMAGE)


@pytest.mark.parametrize("column", ["id", "label"])
def test_a_column_that_tells_samples_apart_is_refused_before_masks_fill_the_memory(column: str) -> None:
    ids = np.arange(100_000)
    with pytest.raises(UsageError, match=f"'{column}' has 100000 values, more than 2000; slice by a column of few"):
        find_groups(Judgement(slices=(column,)), {"id": list(map(str, ids))}, ids, IMAGE)


MASKS = [np.zeros((2, 2), np.uint8), np.zeros((2, 3), np.uint8)]


@pytest.mark.parametrize("labels", [None, np.array([0.5, 1.5]), ["a", "b"], MASKS])
def test_labels_that_are_no_classes_slice_nothing(labels: Any) -> None:
    with pytest.raises(UsageError, match=r"slices: label: (there are no labels|the labels of .* are not one class)"):
        find_groups(Judgement(slices=("label",)), {}, labels, IMAGE)


@pytest.mark.parametrize(
    ("judgement", "message"),
    [
        (Judgement(gates=(Gate("top1", min=0.5, worst="weather"),)), "worst: 'weather' is not among validate.slices"),
        (Judgement(gates=(Gate("size", max=9, worst="set"),)), "size is measured of the whole model"),
        (
            Judgement(gates=(Gate("f1_macro", min=0.5, worst="label"),), slices=("label",)),
            "f1_macro says nothing of the samples of one label alone; what does: top1",
        ),
        (Judgement(gates=(Gate("latency_p50", min_retained=0.9),)), "min_retained is a share.*use max_drop, min_speed"),
        (Judgement(gates=(Gate("agreement", min_retained=0.9),)), "min_retained is a share.*use min or max"),
        (Judgement(gates=(Gate("python:metrics:cost", min=1),)), "write python:FILE.py:FUNCTION"),
        (Judgement(gates=(Gate("coverage", min=0.5),)), "'coverage' needs postprocess: {reject_below: ...}"),
    ],
)
def test_gates_that_no_data_could_decide_are_refused(judgement: Judgement, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_gates(judgement, IMAGE, has_labels=True)


def test_slices_by_label_need_labels() -> None:
    with pytest.raises(UsageError, match="slices: label: the evaluation set has no labels"):
        check_gates(Judgement(slices=("label",)), IMAGE, has_labels=False)


# bundles


@pytest.fixture
def bundle(tmp_path: Path, tiny: Any) -> Path:
    """200 images of two named sets, night the rarer one; the candidate is another model than the baseline."""
    root, rng = tmp_path / "bundle", np.random.default_rng(0)
    tiny.image_model(root / "model/model.onnx", seed=3)
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    columns = {"image": rng.integers(0, 256, (200, 4, 4, 3), np.uint8), "label": rng.integers(0, 5, 200)}
    manifest = tiny.stage(root, IMAGE, tiny.image_spec, columns)
    sets = ["day"] * 160 + ["night"] * 40
    evaluation = write_samples(root, columns, {"set": sets, "weather": ["sun", "rain"] * 100})
    judgement = Judgement(
        gates=(Gate("top1", min=0.01, worst="set"),), metrics=("top1",), slices=("label", "weather"), benchmark=FAST
    )
    write_bundle(root, replace(manifest, evaluation=evaluation, judgement=judgement))
    return root


@pytest.mark.usefixtures("judge_here")
def test_a_bundle_with_slices_is_judged_by_them_and_its_model_reads_none(bundle: Path) -> None:
    report = validate(bundle, ["onnxruntime-cpu"])
    assert [(table.column, table.metric) for table in report.slices] == [
        ("set", "top1"),
        ("label", "top1"),
        ("weather", "top1"),
    ]
    of_sets = report.slices[0].values
    assert {name: value.n for name, value in of_sets.items()} == {"day": 160, "night": 40}
    together = (160 * of_sets["day"].candidate + 40 * of_sets["night"].candidate) / 200
    assert together == pytest.approx(report.candidate.metrics["top1"])
    assert report.gates[0].slice.startswith("set=")
    text, page = render_markdown(report), render_html(report)
    for shown in ("top1 by set", "Worst label by top1: ", "hold for all 5 at once (Bonferroni)"):
        assert shown in text and shown in page and shown in render_text(report)
    assert "## Which class is taken for which" in text
    assert json.loads((bundle / "report.json").read_text())["slices"][1]["values"].keys() == set("abcde")


def test_slices_that_are_not_as_many_as_the_samples_are_refused(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    (bundle / "evaluation/slices.jsonl").write_text('{"set": "day"}\n')
    with pytest.raises(BundleError, match="has 1 samples, its manifest says 200"):
        read_slices(bundle, manifest)


def test_a_manifest_of_before_there_were_slices_is_read(bundle: Path) -> None:
    from hashlib import sha256

    data = json.loads((bundle / "manifest.json").read_text())
    del data["postprocess"], data["recorded"], data["evaluation"]["slices"], data["judgement"]["slices"]
    for gate in data["judgement"]["gates"]:
        del gate["worst"], gate["slice"], gate["min_retained"]
    data["digest"] = sha256(canonical_json({key: value for key, value in data.items() if key != "digest"})).hexdigest()
    (bundle / "manifest.json").write_bytes(canonical_json(data))
    manifest = read_manifest(bundle)
    assert (manifest.postprocess, manifest.recorded, manifest.judgement.slices) == (None, (), ())


def test_tables_name_the_worst_slice_and_whether_that_may_be_chance(rare: tuple[np.ndarray, np.ndarray]) -> None:
    tables = tabulate_slices(slice_evidence(*rare, Judgement(slices=("label",))))
    by_top1 = next(table for table in tables if table.metric == "top1")
    assert (by_top1.worst, by_top1.lost_most, by_top1.may_be_chance) == ("7", "7", False)
    by_kl = next(table for table in tables if table.metric == "kl")
    assert by_kl.worst == "7", "where lower is better the worst is the highest"


def test_a_slice_on_which_a_metric_has_no_value_is_not_the_worst() -> None:
    """Of 80 samples all have the label: there is no order to be right or wrong, which is no area of 0."""
    rng, truth = np.random.default_rng(0), np.ones((240, 1), np.int64)
    truth[:160:2] = 0
    logits = (truth + rng.normal(size=truth.shape)).astype(np.float32)
    judgement = Judgement(slices=("day",), gates=(Gate("auc_macro", min_retained=0.5, worst="day"),))
    days = ["Monday"] * 80 + ["Tuesday"] * 80 + ["Sunday"] * 80
    groups = find_groups(judgement, {"day": days}, truth, "multi-label-classification")
    evidence = quality_evidence(
        [METRICS["auc_macro"]], {"logits": logits}, {"logits": logits}, truth, judgement, groups
    )
    (table,) = tabulate_slices(evidence)
    assert table.worst != "Sunday" and table.values["Sunday"].too_few
    assert [row[0] for row in slice_cells(table)][2] == "Sunday"
    (result,) = judge(judgement, evidence)
    assert result.verdict == "undecided" and "the metric has no value on them" in result.why
