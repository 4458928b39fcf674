"""Intervals: closed forms, brute force, and how often they hold the truth."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats

from runtime.stats import (
    Estimate,
    bootstrap_means,
    bootstrap_percentiles,
    bootstrap_statistic,
    exact,
    paired_difference,
    percentile_interval,
    resamples,
    samples_needed,
    wilson,
)


@pytest.mark.parametrize(("successes", "n"), [(0, 20), (1, 20), (13, 20), (20, 20), (9339, 10000)])
def test_wilson_is_scipys(successes: int, n: int) -> None:
    wanted = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    found = wilson(successes, n, 0.95)
    assert (found.value, found.low, found.high) == pytest.approx((successes / n, wanted.low, wanted.high), abs=1e-12)


def brute_force_difference(gained: int, lost: int, n: int, confidence: float) -> tuple[float, float]:
    """Invert the score test by maximising the likelihood numerically for every difference."""
    z = stats.norm.ppf(0.5 + confidence / 2)

    def score(delta: float) -> float:
        def negative(p_lost: float) -> float:
            p_gained, rest = p_lost + delta, 1 - 2 * p_lost - delta
            return -sum(
                k * math.log(max(p, 1e-300)) for k, p in ((gained, p_gained), (lost, p_lost), (n - gained - lost, rest))
            )

        bounds = (max(0.0, -delta), (1 - delta) / 2)
        p_lost = optimize.minimize_scalar(negative, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        variance = (2 * p_lost + delta - delta**2) / n
        return float(((gained - lost) / n - delta) / math.sqrt(variance))

    value = (gained - lost) / n
    low = optimize.brentq(lambda delta: score(delta) - z, -1 + 1e-9, value - 1e-7)
    high = optimize.brentq(lambda delta: score(delta) + z, value + 1e-7, 1 - 1e-9)
    return low, high


@pytest.mark.parametrize(("gained", "lost", "n"), [(12, 2, 50), (3, 9, 44), (30, 41, 1000), (1, 0, 60), (0, 0, 100)])
def test_paired_difference_is_the_brute_force_score_interval(gained: int, lost: int, n: int) -> None:
    found = paired_difference(gained, lost, n, 0.95)
    assert found.value == pytest.approx((gained - lost) / n)
    assert (found.low, found.high) == pytest.approx(brute_force_difference(gained, lost, n, 0.95), abs=2e-5)


def test_paired_difference_agrees_with_mcnemars_test_at_zero() -> None:
    """The interval excludes zero exactly where the score test (b - c)^2 / (b + c) exceeds z^2."""
    for gained in range(13):
        for lost in range(13):
            found = paired_difference(gained, lost, 40, 0.95)
            significant = gained + lost > 0 and (gained - lost) ** 2 / (gained + lost) > stats.chi2.ppf(0.95, 1)
            assert (found.low > 0 or found.high < 0) == significant


def test_paired_difference_is_antisymmetric() -> None:
    one, other = paired_difference(12, 2, 50, 0.9), paired_difference(2, 12, 50, 0.9)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))


@pytest.mark.parametrize("n", [1, 30, 2000])
def test_no_change_at_all_still_leaves_doubt(n: int) -> None:
    z = stats.norm.ppf(0.975)
    found = paired_difference(0, 0, n, 0.95)
    assert found.value == 0
    assert (found.low, found.high) == pytest.approx((-(z**2) / (n + z**2), z**2 / (n + z**2)))


@pytest.mark.parametrize(("gained", "lost"), [(7, 0), (0, 7)])
def test_every_sample_changed(gained: int, lost: int) -> None:
    found = paired_difference(gained, lost, 7, 0.95)
    assert -1 <= found.low <= found.value <= found.high <= 1


def test_paired_difference_covers_the_truth() -> None:
    """95 % intervals over 3000 experiments of 80 samples hold the true difference in 93.5 to 97.5 %."""
    rng = np.random.default_rng(0)
    interval = cache(paired_difference)
    for p_gained, p_lost in [(0.05, 0.05), (0.02, 0.10), (0.2, 0.15)]:
        tables = rng.multinomial(80, [p_gained, p_lost, 1 - p_gained - p_lost], size=3000)
        found = [interval(int(g), int(lost), 80, 0.95) for g, lost, _ in tables]
        held = np.mean([e.low <= p_gained - p_lost <= e.high for e in found])
        assert 0.935 <= held <= 0.975


def test_bootstrap_of_a_mean_covers_the_truth() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for seed in range(400):
        values = rng.exponential(size=100)
        found = percentile_interval(values.mean(), bootstrap_means(values, 400, seed), 100, 0.9)
        held += found.low <= 1.0 <= found.high
    assert 0.85 <= held / 400 <= 0.94


def test_bootstrap_of_a_mean_has_the_width_of_the_t_interval() -> None:
    values = np.random.default_rng(2).normal(size=500)
    found = percentile_interval(values.mean(), bootstrap_means(values, 4000, 0), 500, 0.95)
    t = stats.t.interval(0.95, 499, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(t, abs=0.01)


def test_the_three_bootstraps_draw_the_same_rows() -> None:
    values = np.random.default_rng(3).normal(size=60)
    means = bootstrap_means(values, 50, 7)
    assert bootstrap_statistic((values,), lambda columns: columns[0].mean(), 50, 7) == pytest.approx(means)
    medians = bootstrap_percentiles(values, 50, 50, 7)
    assert bootstrap_statistic((values,), lambda columns: np.median(columns[0]), 50, 7) == pytest.approx(medians)
    assert bootstrap_means(values, 50, 7).tolist() == means.tolist()
    assert bootstrap_means(values, 50, 8).tolist() != means.tolist()


def test_resamples_do_not_depend_on_how_they_are_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(resamples(30, 20, 0)))
    monkeypatch.setattr("runtime.stats._CHUNK", 100)
    parts = list(resamples(30, 20, 0))
    assert len(parts) > 1
    assert np.array_equal(np.concatenate(parts), whole)


def test_too_few_samples_have_no_interval() -> None:
    found = percentile_interval(1.0, np.ones(100), 9, 0.95)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert "9 samples" in found.method


def test_samples_needed_puts_the_interval_on_one_side() -> None:
    n = 400
    found = paired_difference(4, 8, n, 0.95)
    needed = samples_needed(found, -0.03, n)
    assert needed is not None
    scaled = needed / n
    later = paired_difference(round(4 * scaled), round(8 * scaled), needed, 0.95)
    assert later.low == pytest.approx(-0.03, abs=0.004)


def test_samples_needed_promises_nothing_at_the_bound() -> None:
    assert samples_needed(Estimate(0.5, 0.4, 0.6, ""), 0.5, 100) is None
    assert samples_needed(Estimate(0.5, -math.inf, math.inf, ""), 0.4, 100) is None


def test_what_is_exact_has_no_width() -> None:
    assert exact(3.0) == Estimate(3.0, 3.0, 3.0, "exact")
