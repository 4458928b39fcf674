"""Quality metrics: identities, scikit-learn and scipy as references, and every refusal."""

from __future__ import annotations

import subprocess
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import special, stats
from sklearn import metrics as sk

from runtime.errors import RuntimeFailure, UsageError
from runtime.metrics import MEASURED, NonFiniteOutputs
from runtime.metrics.base import remember
from runtime.metrics.correlation import average_ranks
from runtime.metrics.fidelity import MAX_SQNR_DB
from runtime.tasks.metrics import METRICS, check_name, fitting, metric_names, why_not

N, C = 200, 9
IMAGE = "image-classification"


def classifier(seed: int, n_classes: int = C) -> dict[str, np.ndarray]:
    return {"logits": np.random.default_rng(seed).normal(size=(N, n_classes)).astype(np.float32)}


def embedder(seed: int) -> dict[str, np.ndarray]:
    return {"embeddings": np.random.default_rng(seed).normal(size=(N, 2, 6)).astype(np.float32)}


def test_what_several_metrics_count_is_counted_once_and_not_held() -> None:
    calls: list[int] = []

    def count(outputs: Any, labels: Any) -> int:
        calls.append(1)
        return len(calls)

    counted, outputs, labels = remember(count), {"a": np.zeros(3)}, [0]
    assert counted(outputs, labels) == counted(dict(outputs), labels) == 1
    assert (counted(outputs, [0]), counted({"a": np.zeros(3)}, labels)) == (2, 3)
    array = weakref.ref(outputs.pop("a"))
    assert array() is None


@pytest.fixture
def labels() -> np.ndarray:
    """Half of them right for classifier(0), and the last two classes never."""
    rng = np.random.default_rng(5)
    right = classifier(0)["logits"].argmax(axis=1)
    return np.where(rng.random(N) < 0.5, right, rng.integers(0, C - 2, N))


# identities


@pytest.mark.parametrize("outputs", [classifier(0), embedder(0), {"a": np.ones((N, 3, 2)), "b": np.arange(N) / 7}])
def test_a_model_compared_with_itself_is_ideal(outputs: dict[str, np.ndarray]) -> None:
    for metric in METRICS.values():
        task = IMAGE if "logits" in outputs else "feature-extraction" if "embeddings" in outputs else "generic"
        if metric.against == "baseline" and why_not(metric, task, outputs, None) is None:
            ideal = MAX_SQNR_DB if metric.name == "sqnr_db" else metric.ideal
            assert metric.compute(outputs, outputs) == pytest.approx(ideal, abs=1e-12)


def test_per_sample_values_average_to_the_metric(labels: np.ndarray) -> None:
    for metric in METRICS.values():
        if metric.shape in ("score", "tokens") or metric.misfit or not metric.suits("classes"):
            continue
        reference: Any = labels if metric.against == "labels" else classifier(1)
        values = metric.per_sample(classifier(0), reference)
        assert (values is None) == (metric.kind == "statistic")
        if values is not None:
            assert values.shape == (N,)
            assert values.mean() == pytest.approx(metric.compute(classifier(0), reference))


def test_top5_counts_ties_in_the_order_of_class_ids() -> None:
    outputs = {"logits": np.zeros((7, 7), np.float32)}
    assert METRICS["top5"].compute(outputs, np.arange(7)) == pytest.approx(5 / 7)
    assert METRICS["top1"].compute(outputs, np.arange(7)) == pytest.approx(1 / 7)


# references


SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def classified(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Logits [n, classes], which choose few of the classes or all, and labels, of which some are right."""
    n, n_classes, rng = draw(st.integers(1, 60)), draw(st.integers(6, 12)), np.random.default_rng(draw(SEEDS))
    logits = rng.normal(size=(n, n_classes)).astype(np.float32)
    logits[:, draw(st.integers(1, n_classes)) :] -= 10
    labels = rng.integers(0, draw(st.integers(1, n_classes)), n)
    return logits, np.where(rng.random(n) < 0.5, logits.argmax(axis=1), labels)


@given(classified())
def test_accuracy_and_f_scores_are_scikit_learns(given: tuple[np.ndarray, np.ndarray]) -> None:
    """Classes that nothing is or that nothing is taken for among them."""
    logits, labels = given
    outputs, predicted = {"logits": logits}, logits.argmax(axis=1)
    assert METRICS["top1"].compute(outputs, labels) == sk.accuracy_score(labels, predicted)
    wanted = sk.top_k_accuracy_score(labels, logits, k=5, labels=np.arange(logits.shape[1]))
    assert METRICS["top5"].compute(outputs, labels) == pytest.approx(wanted)
    for average in ("micro", "macro"):
        scores = sk.precision_recall_fscore_support(labels, predicted, average=average, zero_division=0)
        for name, score in zip(("precision", "recall", "f1"), scores[:3], strict=True):
            assert METRICS[f"{name}_{average}"].compute(outputs, labels) == pytest.approx(score)


@given(st.integers(3, 80), st.sampled_from([0, 1, 2, 9]), st.sampled_from([1e-6, 1.0, 1e6]), SEEDS)
def test_correlations_ranks_and_errors_are_scipys(n: int, digits: int, size: float, seed: int) -> None:
    """With many ties, a few, or none."""
    rng = np.random.default_rng(seed)
    score = rng.normal(size=n).round(digits).astype(np.float32)
    label = (score + rng.normal(size=n)).round(digits) * size
    assert average_ranks(label).tolist() == stats.rankdata(label).tolist()
    outputs = {"logits": score[:, None]}
    assert METRICS["mse"].compute(outputs, label) == pytest.approx(sk.mean_squared_error(label, score))
    assume(len(set(score.tolist())) > 1 and len(set(label.tolist())) > 1)
    for name in ("spearman", "pearson"):
        wanted = getattr(stats, f"{name}r")(score.astype(np.float64), label).statistic
        assert METRICS[name].compute(outputs, label) == pytest.approx(wanted, abs=1e-12)


def test_the_score_of_embeddings_is_the_cosine_of_their_columns() -> None:
    outputs, label = embedder(2), np.random.default_rng(0).normal(size=N)
    a, b = outputs["embeddings"][:, 0], outputs["embeddings"][:, 1]
    cosine = sk.pairwise.paired_cosine_distances(a, b)
    wanted = stats.spearmanr(-cosine, label).statistic
    assert METRICS["spearman"].compute(outputs, label) == pytest.approx(wanted)


def test_a_constant_score_has_no_correlation() -> None:
    outputs = {"logits": np.ones((N, 1), np.float32)}
    assert METRICS["spearman"].compute(outputs, np.arange(N)) == 0.0


@given(st.integers(1, 50), st.integers(2, 9), st.sampled_from([0.1, 1.0, 50.0]), SEEDS)
def test_divergence_and_agreement_are_those_of_two_softmaxes(n: int, n_classes: int, size: float, seed: int) -> None:
    baseline, ours = (np.random.default_rng(seed).normal(size=(2, n, n_classes)) * size).astype(np.float32)
    p, q = special.softmax(baseline.astype(np.float64), axis=1), special.log_softmax(ours.astype(np.float64), axis=1)
    wanted = (p * (special.log_softmax(baseline.astype(np.float64), axis=1) - q)).sum(axis=1).mean()
    assert METRICS["kl"].compute({"logits": ours}, {"logits": baseline}) == pytest.approx(wanted, abs=1e-12)
    same = sum(int(x.argmax() == y.argmax()) for x, y in zip(ours, baseline, strict=True))
    assert METRICS["agreement"].compute({"logits": ours}, {"logits": baseline}) == pytest.approx(same / n)


def test_cosine_is_taken_over_all_embedding_columns() -> None:
    a, b = embedder(0), embedder(1)
    wanted = [
        1 - sk.pairwise.paired_cosine_distances(a["embeddings"][:, k], b["embeddings"][:, k]).mean() for k in (0, 1)
    ]
    assert METRICS["cosine"].compute(a, b) == pytest.approx(np.mean(wanted), abs=1e-6)


def test_cosine_of_nothing_with_nothing_is_one_and_with_something_zero() -> None:
    zero, one = {"y": np.zeros((1, 3))}, {"y": np.ones((1, 3))}
    assert METRICS["cosine"].compute(zero, zero) == 1.0
    assert METRICS["cosine"].compute(zero, one) == 0.0


def test_generic_metrics_run_over_all_floating_outputs_and_pass_over_integers() -> None:
    rng = np.random.default_rng(0)
    baseline = {"a": rng.normal(size=(N, 3)), "b": rng.normal(size=(N, 2, 2)), "ids": np.arange(N)}
    ours = {"a": baseline["a"] + 0.1, "b": baseline["b"] * 1.1, "ids": np.arange(N)[::-1]}
    flat, wrong = (np.concatenate([x["a"].ravel(), x["b"].ravel()]) for x in (baseline, ours))
    ratio = np.sum(flat**2) / np.sum((flat - wrong) ** 2)
    assert METRICS["sqnr_db"].compute(ours, baseline) == pytest.approx(10 * np.log10(ratio))
    assert METRICS["mse_baseline"].compute(ours, baseline) == pytest.approx(np.mean((flat - wrong) ** 2))
    assert METRICS["cosine"].compute(ours, baseline) < 1


# refusals


def test_labels_out_of_range_name_row_and_value(labels: np.ndarray) -> None:
    labels[7] = 12
    with pytest.raises(UsageError, match=r"row 7 has label 12, and the model has 9 classes \(0 to 8\)"):
        METRICS["top1"].compute(classifier(0), labels)


def test_labels_of_another_kind_are_refused() -> None:
    with pytest.raises(UsageError, match="dtype float64 where integer class ids are needed"):
        METRICS["top1"].compute(classifier(0), np.zeros(N))
    with pytest.raises(UsageError, match=r"shape \[3\] for 200 samples"):
        METRICS["top1"].compute(classifier(0), np.zeros(3, int))
    with pytest.raises(UsageError, match="row 1 has label nan"):
        METRICS["pearson"].compute(classifier(0, 1), np.where(np.arange(N) == 1, np.nan, 1.0))
    with pytest.raises(UsageError, match="one score per sample"):
        METRICS["pearson"].compute(classifier(0, 1), np.zeros(3))


@given(
    st.sampled_from(["top1", "f1_macro", "agreement", "kl", "cosine", "sqnr_db"]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.integers(0, N - 1),
    st.integers(0, C - 1),
)
def test_broken_outputs_never_become_a_number(name: str, bad: float, row: int, column: int) -> None:
    outputs = classifier(0)
    outputs["logits"][row, column] = bad
    reference: Any = np.zeros(N, int) if METRICS[name].against == "labels" else classifier(0)
    message = rf"'logits' holds NaN or infinity in 1 of 200 samples \(first rows: {row}\)"
    with pytest.raises(NonFiniteOutputs, match=message):
        METRICS[name].compute(outputs, reference)


def test_broken_baseline_outputs_never_become_a_number() -> None:
    baseline = classifier(0)
    baseline["logits"][0, 0] = np.nan
    with pytest.raises(NonFiniteOutputs):
        METRICS["kl"].compute(classifier(0), baseline)


def test_outputs_of_another_shape_or_name_are_refused() -> None:
    with pytest.raises(RuntimeFailure, match=r"shape \[200, 8\], the baseline's is \[200, 9\]"):
        METRICS["cosine"].compute(classifier(0, 8), classifier(0))
    with pytest.raises(RuntimeFailure, match=r"gives \['a'\], the baseline gave \['b'\]"):
        METRICS["cosine"].compute({"a": np.ones((2, 1))}, {"b": np.ones((2, 1))})


@pytest.mark.parametrize(
    ("name", "task", "outputs", "labels", "why"),
    [
        ("top1", "generic", classifier(0), np.zeros(N, int), "does not fit task generic"),
        ("top1", IMAGE, classifier(0), None, "needs labels"),
        ("top1", IMAGE, classifier(0, 1), np.zeros(N, int), "at least two classes"),
        ("top1", IMAGE, classifier(0), np.zeros(N), "needs integer class ids"),
        ("top5", IMAGE, classifier(0, 5), np.zeros(N, int), "is always 1 with 5 classes"),
        ("spearman", IMAGE, classifier(0), np.arange(N), "one output value per sample"),
        ("spearman", IMAGE, classifier(0, 1), np.ones(N), "labels that differ"),
        ("spearman", "feature-extraction", {"embeddings": np.ones((N, 1, 3))}, np.arange(N), "text and text_pair"),
        ("cosine", "generic", {"ids": np.arange(N)}, None, "needs a floating output"),
    ],
)
def test_a_metric_says_why_it_does_not_fit(name: str, task: str, outputs: Any, labels: Any, why: str) -> None:
    said = why_not(METRICS[name], task, outputs, labels)
    assert said is not None
    assert why in said


def test_an_unknown_metric_is_refused_with_a_near_name() -> None:
    with pytest.raises(UsageError, match="unknown metric 'top_1'; did you mean 'top1'"):
        check_name("top_1")
    with pytest.raises(UsageError, match="unknown metric 'zzz'; known: top1"):
        check_name("zzz")


# the lists


def test_the_lists_agree_and_are_complete() -> None:
    assert set(metric_names()) == set(METRICS) | set(MEASURED)
    assert not set(METRICS) & set(MEASURED)
    assert all(name == metric.name for listed in (METRICS, MEASURED) for name, metric in listed.items())  # type: ignore[attr-defined]
    assert fitting("generic", has_labels=False) == ("cosine", "sqnr_db", "mse_baseline")


def test_the_names_need_nothing_but_numpy() -> None:
    code = (
        "import sys; from runtime.tasks.metrics import metric_names; "
        "heavy = {'onnxruntime', 'torch', 'openvino', 'tokenizers', 'PIL', 'pydantic'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# what each sample adds


def influenced(name: str, n: int) -> tuple[np.ndarray, ...]:
    """Columns of a metric, with ties, unequal classes and unequal texts."""
    rng = np.random.default_rng(3)
    label = np.round(2 * rng.normal(size=n)) / 2
    classes = rng.choice(5, n, p=[0.5, 0.2, 0.15, 0.1, 0.05])
    columns: dict[str, tuple[np.ndarray, ...]] = {
        "correlation": (label + rng.normal(size=n), label),
        "sums": (rng.gamma(50, 2, n), rng.integers(20, 80, n)),
        "errors": (rng.gamma(5, 2, n), rng.gamma(1, 2, n)),
        "classes": (classes, np.where(rng.random(n) < 0.8, classes, rng.integers(0, 5, n))),
    }
    actual, found = rng.integers(1, 9, n), rng.integers(1, 9, n)
    grams = rng.integers(5, 30, (2, n, 1)) * np.linspace(1, 0.6, 6) // 1  # of each length, as answers have them
    columns["grams"] = (*grams, rng.binomial(np.minimum(*grams).astype(int), 0.7))
    columns["spans"] = (rng.binomial(np.minimum(actual, found), 0.7), actual, found)
    truth = rng.random((n, 4)) < [0.5, 0.3, 0.2, 0.4]
    columns["numbers"] = (rng.normal(size=(n, 2)), rng.normal(size=(n, 2)))
    columns["numbers"] = (columns["numbers"][1] + columns["numbers"][0] / 3, columns["numbers"][1])
    columns["ranks"] = ((truth + rng.normal(size=truth.shape)).round(1), truth)
    columns["sets"] = (truth, rng.random((n, 4)) < 0.2 + 0.6 * truth)
    if name.startswith(("auc_", "average_precision_", "label_f1_")):
        return columns["sets" if name.startswith("label") else "ranks"]
    real, chosen = rng.integers(1, 40, (2, n, 4))
    columns["maps"] = (rng.binomial(np.minimum(real, chosen), 0.7), real, chosen)
    sure = rng.uniform(0.2, 1, n)
    right = rng.random(n) < 0.2 * sure  # so sure that no bin is near where its gap's sign turns
    columns["gaps"] = (right - sure, np.ceil(15 * sure).astype(int) - 1)
    columns["answers"] = (1.0 * (right & (sure > 0.5)), 1.0 * (sure > 0.5))
    kinds = {
        "ece": "gaps",
        "accuracy_answered": "answers",
        "spearman": "correlation",
        "pearson": "correlation",
        "sqnr_db": "errors",
        "rmse": "numbers",
        "r2": "numbers",
        "chrf": "grams",
    }
    kinds |= dict.fromkeys(("miou", "dice", "miou_baseline"), "maps")
    by_ending = {"_macro": "classes"} | dict.fromkeys(("span_f1", "span_precision", "span_recall"), "spans")
    return columns[kinds.get(name) or next((kind for end, kind in by_ending.items() if name.endswith(end)), "sums")]


STATISTICS = [name for name, metric in METRICS.items() if metric.kind == "statistic" and not metric.suits("boxes")]
"""Those of boxes are in runtime/boxes/test_match.py."""


@pytest.mark.parametrize("name", STATISTICS)
def test_what_each_sample_adds_is_what_is_missing_without_it(name: str) -> None:
    """The influence is the jackknife's, to the few percent by which one sample in 300 changes the others'."""
    metric, n = METRICS[name], 300
    columns = influenced(name, n)
    without = np.array([metric.statistic(tuple(np.delete(c, i, axis=0) for c in columns)) for i in range(n)])
    jackknife = (n - 1) * (without.mean() - without)
    influence = metric.influence(columns)
    assert influence.mean() == pytest.approx(0, abs=1e-9 * influence.std())
    # the precision of the first few ranks changes in steps
    assert np.corrcoef(jackknife, influence)[0, 1] > (0.998 if name.startswith("average_precision") else 0.9997)
    assert jackknife.std() == pytest.approx(influence.std(), rel=0.05)


@pytest.mark.parametrize("name", ["spearman", "pearson"])
def test_a_constant_score_has_no_influence(name: str) -> None:
    assert not METRICS[name].influence((np.ones(9), np.arange(9.0))).any()


@pytest.mark.parametrize("name", ["f1_macro", "precision_macro", "recall_macro"])
def test_the_bias_of_a_macro_average_is_what_small_samples_show(name: str) -> None:
    rng, metric = np.random.default_rng(0), METRICS[name]
    shown, told = [], []
    for _ in range(1500):
        labels = rng.integers(0, 10, 150)
        predicted = np.where(rng.random(150) < 0.7, labels, (labels + rng.integers(1, 10, 150)) % 10)
        shown.append(metric.statistic((labels, predicted)) - 0.7)
        assert metric.bias is not None
        told.append(metric.bias((labels, predicted)))
    assert np.mean(told) == pytest.approx(np.mean(shown), abs=0.004)
    assert (np.mean(told) < -0.005) == (name == "f1_macro")
