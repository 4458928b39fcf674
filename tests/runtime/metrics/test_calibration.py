"""Expected calibration error against scikit-learn's curve, and how often its intervals hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from runtime.bundle.format import Judgement
from runtime.judge.evidence import Evidence, quality_evidence
from runtime.metrics.calibration import BINS
from runtime.tasks.metrics import METRICS

Rng = np.random.Generator
ECE = METRICS["ece"]


def draw(rng: Rng, n: int, overconfident: float, noise: float = 0.0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Two classes: the label has its model's chance, less `overconfident`; `noise` moves the logits."""
    sure = rng.uniform(0.55, 0.95, n)
    label = (rng.random(n) >= sure - overconfident).astype(np.int64)
    return logits_of(np.clip(sure + noise * rng.normal(size=n), 0.51, 0.99)), label


def logits_of(sure: np.ndarray) -> dict[str, np.ndarray]:
    """Logits whose softmax gives class 0 so much."""
    return {"logits": np.log(np.stack([sure, 1 - sure], axis=1))}


def evidence(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], labels: np.ndarray) -> Evidence:
    return quality_evidence([ECE], ours, theirs, labels, Judgement())["ece"]


def test_it_is_what_scikit_learns_curve_gives() -> None:
    outputs, labels = draw(np.random.default_rng(0), 500, 0.1)
    sure = np.exp(outputs["logits"][:, 0])
    right, mean = calibration_curve(labels == 0, sure, n_bins=BINS)
    counts = np.histogram(sure, np.linspace(0, 1, BINS + 1))[0]
    expected = np.sum(counts[counts > 0] * np.abs(right - mean)) / 500
    assert ECE.compute(outputs, labels) == pytest.approx(expected, abs=1e-6)


def test_sure_and_always_right_is_perfect_and_sure_and_wrong_is_worst() -> None:
    outputs = {"logits": np.array([[50.0, 0.0]] * 4)}
    assert ECE.compute(outputs, np.zeros(4, int)) == pytest.approx(0)
    assert ECE.compute(outputs, np.ones(4, int)) == pytest.approx(1)


@pytest.mark.parametrize(("overconfident", "n"), [(0.0, 100), (0.0, 1000), (0.1, 300)])
def test_its_interval_holds_the_truth(overconfident: float, n: int) -> None:
    """Also of a perfectly calibrated model, whose finite samples always show an error."""
    rng, runs = np.random.default_rng(n), 400
    found = [evidence(*[outputs] * 2, labels) for outputs, labels in (draw(rng, n, overconfident) for _ in range(runs))]
    assert min(each.candidate.value for each in found) > 0
    assert sum(each.candidate.low > overconfident for each in found) <= 0.03 * runs
    assert sum(each.candidate.high < overconfident for each in found) <= 0.03 * runs


def test_a_change_that_the_noise_hides_stays_in_its_interval() -> None:
    """From calibrated to 5 points overconfident: the samples show less, because noise is in both."""
    rng, runs, low, high = np.random.default_rng(1), 300, 0, 0
    for _ in range(runs):
        theirs, labels = draw(rng, 300, 0.0)
        sure = np.exp(theirs["logits"][:, 0])
        change = evidence(logits_of(np.clip(sure + 0.04, 0, 0.995)), theirs, labels).difference
        assert change is not None
        low, high = low + (change.low > 0.04), high + (change.high < 0.04)
    assert max(low, high) <= 0.03 * runs


def test_a_model_that_hardly_changed_is_known_to_have_the_same_error() -> None:
    """Two samples of 1,000 turn, so that they carry all of the spread; their number bounds what they do."""
    rng = np.random.default_rng(2)
    theirs, labels = draw(rng, 1000, 0.05)
    ours = {"logits": theirs["logits"] + 1e-4 * rng.normal(size=(1000, 2))}
    ours["logits"][:2] *= -1
    change = evidence(ours, theirs, labels).difference
    assert change is not None
    assert -0.1 < change.low < 0 < change.high < 0.1
