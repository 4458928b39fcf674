"""Gates at the edge of their bound, a few cells of `benchmarks/gate_confidence.py`: neither verdict is too often wrong.

And the ruler: what it says of intervals that are known to be too narrow.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from places import BENCHMARKS

from runtime.stats import Estimate

RUNS = 400
Subjects = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def ruler() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gate_confidence")


@pytest.fixture(scope="module")
def subjects(ruler: Any) -> Subjects:
    """(name, shape) -> subject."""
    return {(subject.name, subject.shape): subject for subject in ruler.subjects()}


@pytest.mark.parametrize(
    ("name", "shape", "n"),
    [
        ("mse", "lognormal 1, candidate adds it", 50),
        ("mse", "lognormal 1 - 0.5 lognormal 1", 100),
        ("tokens", "lognormal lengths, adds lognormal 1", 100),
        ("agreement", "0.98", 50),
        ("answers", "0.5 answered, 0.8 right, -0.05", 100),
        ("ece", "0 off, 0.05 more", 100),
        ("macro", "5 classes 10:1, 0.1 wrong, 0.05 more", 50),
        ("correlation", "0.97 to 0.96, errors 0.9 shared", 50),
        ("times", "two layouts", 9),
        ("times", "an odd process in ten", 6),
        ("requests", "layouts of 1 %", 9),
        ("fresh processes", "0.1 cold", 6),
    ],
)
def test_a_gate_on_the_truth_is_seldom_wrong(ruler: Any, subjects: Subjects, name: str, shape: str, n: int) -> None:
    runs = RUNS // 2 if name in ("times", "requests") else RUNS
    counts = ruler.judge_at_the_edge(subjects[name, shape], n, range(runs))
    wrong = {rule: max(count["pass"], count["fail"]) for rule, count in counts.items()}
    assert not any(ruler.exceeds(times, runs) for times in wrong.values()), wrong


@pytest.mark.parametrize(
    ("name", "shape"), [("mse_baseline", "lognormal 2"), ("tokens", "even lengths, adds gamma 0.3")]
)
def test_below_the_floor_every_gate_is_undecided(ruler: Any, subjects: Subjects, name: str, shape: str) -> None:
    counts = ruler.judge_at_the_edge(subjects[name, shape], 30, range(50))
    assert all(count["undecided"] == 50 for count in counts.values())


def test_the_ruler_refuses_a_percentile_bootstrap(
    ruler: Any, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def bootstrap(value: float, influence: np.ndarray, confidence: float, weights: np.ndarray | None) -> Estimate:
        means = influence[rng.integers(0, len(influence), (300, len(influence)))].mean(axis=1) - influence.mean()
        low, high = value + np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
        return Estimate(value, low, high, "percentile bootstrap")

    monkeypatch.setattr("runtime.judge.evidence.skewed_interval", bootstrap)
    subject = subjects["mse", "lognormal 1, candidate adds it"]
    counts = ruler.judge_at_the_edge(subject, 50, range(RUNS))["mse", "max_drop"]
    assert ruler.exceeds(counts["pass"], RUNS)
    assert not ruler.exceeds(counts["fail"], RUNS)


@pytest.mark.parametrize(
    ("wrong", "runs", "told"), [(30, 1000, False), (49, 1000, True), (600, 20_000, False), (700, 20_000, True)]
)
def test_more_than_3_percent_is_told_from_chance(ruler: Any, wrong: int, runs: int, told: bool) -> None:
    assert ruler.exceeds(wrong, runs) is told
