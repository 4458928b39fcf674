"""Regression and multi-label metrics: scikit-learn's values, and every refusal."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from runtime.bundle.format import Judgement
from runtime.errors import UsageError
from runtime.judge.evidence import column_evidence
from runtime.metrics.multi_label import THRESHOLDS, average_precision, rank_area
from runtime.tasks.metrics import METRICS, fitting, why_not

SEEDS = st.integers(0, 2**32 - 1)


@given(st.integers(2, 60), st.sampled_from([None, 1, 3]), SEEDS)
def test_numbers_are_judged_as_scikit_learn_does(n: int, width: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    label = rng.normal(size=n if width is None else (n, width)) * 7
    found = (label + rng.normal(size=label.shape)).astype(np.float32)
    outputs = {"numbers": found.reshape(n, -1)}
    assert METRICS["mae"].compute(outputs, label) == pytest.approx(sk.mean_absolute_error(label, found))
    assert METRICS["rmse"].compute(outputs, label) == pytest.approx(sk.root_mean_squared_error(label, found))
    assert METRICS["r2"].compute(outputs, label) == pytest.approx(sk.r2_score(label, found))


def test_labels_that_are_all_the_same_have_no_r2() -> None:
    columns = METRICS["r2"].columns({"numbers": np.eye(3, 2, dtype=np.float32)}, np.ones((3, 2)))
    assert np.isnan(METRICS["r2"].statistic(columns)) and np.isnan(METRICS["r2"].influence(columns)).all()


@settings(max_examples=15)
@given(st.integers(4, 60), st.integers(2, 5), st.sampled_from([0, 1, 5]), SEEDS)
def test_label_sets_are_judged_as_scikit_learn_does(n: int, n_labels: int, digits: int, seed: int) -> None:
    """With many equal scores, some, or none."""
    rng = np.random.default_rng(seed)
    truth = (rng.random((n, n_labels)) < 0.4).astype(np.int64)
    assume((truth.min(axis=0) < truth.max(axis=0)).all())
    logits = (truth + rng.normal(size=truth.shape) - 0.5).round(digits).astype(np.float32)
    outputs, probability = {"logits": logits}, 1 / (1 + np.exp(-logits.astype(np.float64)))
    for average in ("macro", "micro"):
        wanted = sk.roc_auc_score(truth, logits, average=average)
        assert METRICS[f"auc_{average}"].compute(outputs, truth) == pytest.approx(wanted)
        wanted = sk.average_precision_score(truth, logits, average=average)
        assert METRICS[f"average_precision_{average}"].compute(outputs, truth) == pytest.approx(wanted)
        for threshold in THRESHOLDS:
            name = f"label_f1_{average}" + ("" if threshold == 0.5 else f"_at_{threshold:g}")
            wanted = sk.f1_score(truth, probability >= threshold, average=average, zero_division=0)
            assert METRICS[name].compute(outputs, truth) == pytest.approx(wanted), name


@pytest.mark.parametrize(
    ("curve", "reference"), [(rank_area, sk.roc_auc_score), (average_precision, sk.average_precision_score)]
)
def test_what_a_sample_adds_is_the_derivative_by_its_weight(curve: Any, reference: Any) -> None:
    rng, n = np.random.default_rng(0), 40
    truth = rng.random(n) < 0.3
    scores = (truth + rng.normal(size=n)).round(1)
    steps = 1 + 1e-5 * np.eye(n)
    derivative = [
        (reference(truth, scores, sample_weight=up) - reference(truth, scores, sample_weight=2 - up)) / 2e-5
        for up in steps
    ]
    np.testing.assert_allclose(curve(scores, truth)[1], n * np.array(derivative), atol=1e-7)


def test_a_label_that_none_or_all_have_is_no_part_of_a_mean() -> None:
    rng = np.random.default_rng(0)
    truth = np.stack([rng.random(50) < 0.5, np.zeros(50, bool), np.ones(50, bool)], axis=1).astype(int)
    logits = rng.normal(size=truth.shape).astype(np.float32)
    for name, reference in (("auc", sk.roc_auc_score), ("average_precision", sk.average_precision_score)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = reference(truth[:, :1], logits[:, :1])
        assert METRICS[f"{name}_macro"].compute({"logits": logits}, truth) == pytest.approx(wanted)


@pytest.mark.parametrize("name", fitting("multi-label-classification", has_labels=True))
def test_a_perfect_sample_proves_no_perfect_model(name: str) -> None:
    """Nothing is wrong in 60 samples: the interval still reaches below 1."""
    metric = METRICS[name]
    if "label sets" not in (metric.fits or ()):
        return
    truth = np.tile(np.eye(3, dtype=int), (20, 1))
    outputs = {"logits": (truth * 8 - 4).astype(np.float32)}
    reference = truth if metric.against == "labels" else outputs
    estimate = column_evidence(metric, metric.columns(outputs, reference), None, Judgement()).candidate
    assert estimate.value == estimate.high == 1
    assert estimate.low < 0.99


NUMBERS = {"numbers": np.zeros((6, 2), np.float32)}
LOGITS = {"logits": np.zeros((6, 2), np.float32)}


@pytest.mark.parametrize(
    ("name", "task", "outputs", "labels", "why"),
    [
        ("mae", "regression", NUMBERS, None, "needs labels"),
        ("mae", "regression", NUMBERS, np.zeros((6, 3)), r"a label is [3], an output [2]"),
        ("rmse", "regression", NUMBERS, np.zeros(6), "needs 2 numbers a label, and there is one"),
        ("r2", "regression", NUMBERS, np.ones((6, 2)), "needs labels that differ"),
        ("mae", "image-classification", LOGITS, np.zeros(6, int), "needs 2 numbers a label"),
        ("auc_macro", "regression", NUMBERS, np.zeros(6), "does not fit task regression"),
        ("auc_macro", "multi-label-classification", LOGITS, np.zeros(6, int), r"needs labels of 0 and 1 [6, 2]"),
        ("auc_macro", "multi-label-classification", LOGITS, np.ones((6, 2), int), "some samples have and some"),
        ("top1", "multi-label-classification", LOGITS, np.zeros(6, int), "does not fit task multi-label"),
    ],
)
def test_a_metric_says_why_it_does_not_fit(name: str, task: str, outputs: Any, labels: Any, why: str) -> None:
    said = why_not(METRICS[name], task, outputs, labels)
    assert said is not None
    assert why in said


def test_labels_that_are_no_labels() -> None:
    with pytest.raises(UsageError, match="row 1 holds other numbers than 0 and 1"):
        METRICS["auc_macro"].compute(LOGITS, np.array([[0, 1], [2, 0]] * 3))
    with pytest.raises(UsageError, match=r"row 2 has label .* not finite"):
        METRICS["mae"].compute(NUMBERS, np.where(np.arange(12).reshape(6, 2) == 5, np.inf, 0))


def pairs(n: int, noise: float, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(n, 8))
    texts = images + noise * rng.normal(size=(n, 8))
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (images, texts)]
    return {"image_embeds": unit[0].astype(np.float32), "text_embeds": unit[1].astype(np.float32)}


@given(st.integers(11, 60), st.sampled_from([0.1, 1.0, 9.0]), SEEDS)
def test_pairs_are_found_as_by_sorting_and_scikit_learn(n: int, noise: float, seed: int) -> None:
    outputs = pairs(n, noise, seed)
    similar = outputs["image_embeds"].astype(np.float64) @ outputs["text_embeds"].astype(np.float64).T
    for side, scores in (("text", similar), ("image", similar.T)):
        for depth in (1, 5, 10):
            best = np.argsort(-scores, axis=1)[:, :depth]
            wanted = np.mean([row in found for row, found in enumerate(best)])
            assert METRICS[f"{side}_recall_at_{depth}"].compute(outputs, None) == pytest.approx(wanted)
        wanted = sk.ndcg_score(np.eye(n), scores, k=10)
        assert METRICS[f"{side}_ndcg_at_10"].compute(outputs, None) == pytest.approx(wanted)


def test_embeddings_that_collapse_find_nothing() -> None:
    outputs = dict.fromkeys(("image_embeds", "text_embeds"), np.ones((20, 4), np.float32) / 2)
    for name in ("text_recall_at_10", "image_recall_at_1", "text_ndcg_at_10"):
        assert METRICS[name].compute(outputs, None) == 0
    few = {name: rows[:10] for name, rows in outputs.items()}
    why = why_not(METRICS["text_recall_at_10"], "zero-shot-image-classification", few, None)
    assert why == "is always 1 with 10 pairs to choose from"
