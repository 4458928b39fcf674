"""Comparing judged bundles: what is called real where the truth is known, what is paired, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.bundle.format import Judgement, RecordedMetric
from runtime.errors import UsageError
from runtime.judge.evidence import Evidence, column_evidence, quality_evidence
from runtime.judge.findings import Side, ratio_intervals, ratios, side
from runtime.judge.recorded import as_metric
from runtime.judge.samples import EvaluatedOn
from runtime.judge.speed import size_evidence, timing_evidence
from runtime.report.pairing import compare_reports, find_metric
from runtime.report.report import Report
from runtime.report.stored import StoredReport
from runtime.tasks.metrics import METRICS

TASK = "image-classification"
NAMES = ("top1", "agreement", "kl", "sqnr_db", "f1_macro")
HERE = {"cpu": "this", "cores": 2, "threads": 1, "versions": {"onnxruntime": "1"}}


def make_model(seed: int, n: int = 200, noise: float = 0.3) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """A float model's logits [n, 5] (drawn by `seed`), their labels, and what `noise` makes of the logits."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, 5))
    labels = (logits + rng.normal(size=(n, 5))).argmax(axis=1)
    return {"logits": logits}, labels, logits + noise * rng.normal(size=(n, 5))


def judge(
    name: str, logits: np.ndarray, baseline: dict[str, np.ndarray], labels: np.ndarray, **more: Any
) -> StoredReport:
    """A report of a candidate that gave `logits`, as a judgement would write it."""
    metrics = [METRICS[metric] for metric in NAMES]
    evidence = quality_evidence(metrics, {"logits": logits}, baseline, labels, Judgement())
    return store(name, evidence | size_evidence(4000, 1000), **more)


def store(name: str, evidence: dict[str, Evidence], **more: Any) -> StoredReport:
    columns = {metric: known.columns for metric, known in evidence.items() if known.columns}
    report = Report(
        "pass",
        name,
        "onnxruntime-cpu",
        side(evidence, "baseline", None),
        side(evidence, "candidate", None),
        task=TASK,
        evaluation=EvaluatedOn("frozen", ("float",)),
        ratios=ratios(evidence),
        ratio_intervals=ratio_intervals(evidence),
        environment=HERE,
    )
    return StoredReport(name, replace(report, **more), columns)


def make_pair(seed: int = 0, **more: Any) -> list[StoredReport]:
    """Two candidates, equally far from one float model."""
    baseline, labels, first = make_model(seed)
    second = baseline["logits"] + 0.3 * np.random.default_rng(seed + 10_000).normal(size=first.shape)
    return [judge("a", first, baseline, labels), judge("b", second, baseline, labels, **more)]


# what is called real


def test_without_any_difference_at_most_the_stated_share_is_called_real() -> None:
    runs = 120
    wrong = 0
    for seed in range(runs):
        (compared,) = compare_reports(make_pair(seed))
        assert compared.n_intervals == len(NAMES)
        wrong += bool(compared.find("better") or compared.find("worse"))
    assert wrong <= 12  # of 120 at 5 %: more by chance once in 100


def break_some(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(rng.random(len(logits))[:, None] < 0.15, logits[:, ::-1], logits)


def blur_all(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return logits + 0.4 * rng.normal(size=logits.shape)


@pytest.mark.parametrize(("plant", "where"), [(break_some, {"agreement"}), (blur_all, {"kl", "sqnr_db"})])
def test_a_planted_regression_is_found_and_named(plant: Callable[..., np.ndarray], where: set[str]) -> None:
    found = 0
    for seed in range(20):
        baseline, labels, first = make_model(seed)
        worse = plant(first, np.random.default_rng(seed + 5000))
        (compared,) = compare_reports([judge("a", first, baseline, labels), judge("b", worse, baseline, labels)])
        assert not compared.find("better")
        found += where <= {difference.metric for difference in compared.find("worse")}
    assert found >= 19


def time_rounds(rng: np.random.Generator, speedup: float, rounds: int = 60) -> dict[str, Evidence]:
    """A run of baseline and candidate in turns on a machine whose pace is its own, and 1 % of this process's."""
    pace = rng.lognormal(sigma=0.3) * rng.lognormal(sigma=0.1, size=(9, rounds))
    of_process = rng.lognormal(sigma=0.01, size=(9, 1))
    seconds = np.stack([pace, pace * of_process / speedup], axis=1) * rng.lognormal(sigma=0.02, size=(9, 2, rounds))
    return {"latency_p50": timing_evidence("latency_p50", 50, seconds[..., None], 0.95)}


def test_two_runs_of_one_bundle_are_seldom_of_different_speed_and_a_slower_one_is_found() -> None:
    rng = np.random.default_rng(0)
    runs = [[store(name, time_rounds(rng, 2.0)) for name in "ab"] for _ in range(100)]
    compared = [compare_reports(pair)[0].differences[0] for pair in runs]
    assert sum(difference.verdict != "within noise" for difference in compared) <= 5
    slow = compare_reports([store("a", time_rounds(rng, 2.0)), store("b", time_rounds(rng, 1.6))])[0].differences[0]
    assert slow.verdict == "worse" and slow.change.high < 0.9


def test_a_bundle_of_the_same_answers_differs_in_nothing() -> None:
    baseline, labels, logits = make_model(0)
    (compared,) = compare_reports([judge(name, logits, baseline, labels) for name in "ab"])
    assert {difference.verdict for difference in compared.differences} == {"within noise"}
    assert all(difference.change.value == 0 for difference in compared.differences)


@pytest.mark.parametrize(
    ("n_bytes", "verdict"), [(1000, "within noise"), (1001, "within noise"), (1002, "worse"), (900, "better")]
)
def test_a_size_is_exact_but_for_the_names_in_a_file(n_bytes: int, verdict: str) -> None:
    pair = [store("a", size_evidence(4000, 1000)), store("b", size_evidence(4000, n_bytes))]
    (compared,) = compare_reports(pair)
    assert [(found.metric, found.verdict) for found in compared.differences] == [("size", verdict)]


def test_all_intervals_of_all_bundles_hold_at_once() -> None:
    first, second = make_pair(0)
    alone = compare_reports([first, second])[0]
    third = replace(make_pair(1)[1], name="c")
    beside = compare_reports([first, second, third])
    assert [compared.n_intervals for compared in beside] == [2 * len(NAMES)] * 2
    for wide, narrow in zip(beside[0].differences, alone.differences, strict=True):
        assert wide.change.high - wide.change.low >= narrow.change.high - narrow.change.low


# pairing


def test_the_interval_of_one_metric_alone_is_the_one_that_gates_use() -> None:
    old, new = make_pair()
    (compared,) = compare_reports([old, new], ["top1"])
    evidence = column_evidence(METRICS["top1"], new.columns["top1"], old.columns["top1"], Judgement())
    assert [difference.change for difference in compared.differences] == [evidence.difference]


def widths(reports: Sequence[StoredReport]) -> dict[str, float]:
    return {d.metric: d.change.high - d.change.low for d in compare_reports(reports)[0].differences}


def test_without_values_of_single_samples_the_comparison_says_that_it_is_not_paired() -> None:
    old, new = make_pair()
    bare = replace(old, columns={})
    (compared,) = compare_reports([bare, new])
    assert "a: no values of single samples lie beside the report" in compared.notes[0]
    assert all("not paired: a keeps no values" in d.remark for d in compared.differences if d.metric != "size")
    paired, unpaired = widths([old, new]), widths([bare, new])
    assert unpaired["top1"] > 1.2 * paired["top1"] and unpaired["agreement"] > paired["agreement"]


def test_columns_of_another_version_of_a_metric_are_not_paired() -> None:
    old, new = make_pair()
    other = replace(old, columns={**old.columns, "kl": (2 * old.columns["kl"][0],), "sqnr_db": ()})
    remarks = {d.metric: d.remark for d in compare_reports([other, new])[0].differences}
    assert "another version of the metric computed that of a" in remarks["kl"]
    assert "another version" in remarks["sqnr_db"] and not remarks["top1"]


def test_a_metric_of_ones_own_is_compared_where_its_code_is_the_same() -> None:
    def with_own(name: str, sha256: str, seed: int) -> StoredReport:
        record = RecordedMetric("python:m.py:cost", sha256, higher_is_better=False)
        values = np.random.default_rng(seed).random(100)
        evidence = column_evidence(as_metric(record), (values,), (values,), Judgement())
        return store(name, {record.name: evidence}, evaluation=EvaluatedOn("frozen", ("float",), (record,)))

    a, b, c = with_own("a", "1", 1), with_own("b", "1", 2), with_own("c", "2", 2)
    assert [d.metric for d in compare_reports([a, b])[0].differences] == ["python:m.py:cost"]
    assert compare_reports([a, c])[0].not_compared == {"python:m.py:cost": "the file that computes it is another one"}


# what is not compared


def test_nearness_to_different_float_models_is_not_compared() -> None:
    old, new = make_pair(evaluation=EvaluatedOn("frozen", ("another",)))
    (compared,) = compare_reports([old, new])
    assert {"kl", "sqnr_db", "agreement"} == compared.not_compared.keys()
    assert "another one in each bundle" in compared.not_compared["kl"]
    assert {"top1", "f1_macro", "size"} == {difference.metric for difference in compared.differences}
    assert "another one in each bundle" in str(find_metric("f1_at", old, new))  # another threshold, too
    assert find_metric("f1_at", old, old) is METRICS["f1_at"]


def test_a_metric_that_one_lacks_is_told() -> None:
    old, new = make_pair()
    metrics = {name: value for name, value in new.report.candidate.metrics.items() if name != "top1"}
    new = replace(new, report=replace(new.report, candidate=replace(new.report.candidate, metrics=metrics)))
    assert compare_reports([old, new])[0].not_compared == {"top1": "b has no value of it"}


@pytest.mark.parametrize(
    ("changed", "words"), [({"cpu": "that"}, "CPUs"), ({"versions": {"onnxruntime": "2"}}, "versions of the runtime")]
)
def test_speed_on_another_machine_is_shown_and_not_decided(changed: dict[str, Any], words: str) -> None:
    rng = np.random.default_rng(0)
    old = store("a", time_rounds(rng, 2.0))
    new = store("b", time_rounds(rng, 1.0), environment={**HERE, **changed})
    (compared,) = compare_reports([old, new])
    assert [(d.verdict, d.remark) for d in compared.differences] == [
        ("not known", "measured on another machine or runtime")
    ]
    assert words in compared.notes[-1] and compared.n_intervals == 0


def test_speed_of_other_work_is_not_compared() -> None:
    rng = np.random.default_rng(0)
    pair = [store(str(n), time_rounds(rng, 2.0), benchmark={"batch_size": n}) for n in (1, 8)]
    assert compare_reports(pair)[0].not_compared == {"latency_p50": "timed otherwise: batch_size 1 and 8"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"evaluation": EvaluatedOn("others")}, "different evaluation sets, digest frozen and digest others"),
        ({"task": "regression"}, f"different tasks, {TASK} and regression"),
        ({"evaluation": None}, "b: the report does not say which samples it is of"),
    ],
)
def test_refusals(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        compare_reports(make_pair(**more))
    assert message in str(caught.value)


def test_one_report_is_none_to_compare() -> None:
    with pytest.raises(UsageError, match="at least two"):
        compare_reports([StoredReport("a", Report("pass", "a", "", Side(), Side()))])
