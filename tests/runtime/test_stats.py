"""Intervals: closed forms, brute force, and how often they hold the truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from runtime.stats import (
    FEW_CARRIERS,
    HALL,
    Estimate,
    bound_mean,
    divide,
    exact,
    fresh_processes_needed,
    paired_difference,
    paired_ratio,
    process_interval,
    proportion_interval,
    samples_needed,
    skewed_interval,
    subtract,
    unknown,
)

CONFIDENCES, SEEDS = st.sampled_from([0.8, 0.9, 0.95, 0.99]), st.integers(0, 2**32 - 1)


@given(st.integers(1, 2000), st.floats(0, 1), CONFIDENCES)
@example(n=20, share=0.0, confidence=0.95)
@example(n=20, share=1.0, confidence=0.95)
@example(n=10000, share=0.9339, confidence=0.95)
def test_a_proportion_is_scipys_exact_interval(n: int, share: float, confidence: float) -> None:
    """And that of the other side is its mirror image."""
    successes = round(share * n)
    wanted = stats.binomtest(successes, n).proportion_ci(confidence, method="exact")
    found, other = (proportion_interval(k, n, confidence) for k in (successes, n - successes))
    assert (found.value, found.low, found.high) == pytest.approx((successes / n, wanted.low, wanted.high), abs=1e-11)
    assert found.low <= found.value <= found.high
    assert (other.low, other.high) == pytest.approx((1 - found.high, 1 - found.low), abs=1e-11)


def brute_force_difference(gained: int, lost: int, n: int, confidence: float) -> tuple[float, float]:
    """Invert the score test by maximising the likelihood numerically for every difference; one sample less where the
    end is nearer to 0."""
    z, net = stats.norm.ppf(0.5 + confidence / 2), gained - lost

    def score(delta: float, net: int) -> float:
        def negative(p_lost: float) -> float:
            p_gained, rest = p_lost + delta, 1 - 2 * p_lost - delta
            return -sum(
                k * math.log(max(p, 1e-300)) for k, p in ((gained, p_gained), (lost, p_lost), (n - gained - lost, rest))
            )

        bounds = (max(0.0, -delta), (1 - delta) / 2)
        p_lost = optimize.minimize_scalar(negative, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        variance = (2 * p_lost + delta - delta**2) / n
        return float((net / n - delta) / math.sqrt(variance))

    low = optimize.brentq(lambda delta: score(delta, min(net, max(net - 1, 0))) - z, -1 + 1e-9, net / n - 1e-7)
    high = optimize.brentq(lambda delta: score(delta, max(net, min(net + 1, 0))) + z, net / n + 1e-7, 1 - 1e-9)
    return low, high


@st.composite
def paired_tables(draw: st.DrawFn) -> tuple[int, int, int]:
    """(gained, lost, n): often few of many, sometimes all."""
    n = draw(st.integers(1, 2000))
    gained = draw(st.integers(0, min(n, 60)) | st.integers(0, n))
    return gained, draw(st.integers(0, min(n - gained, 60)) | st.integers(0, n - gained)), n


@settings(max_examples=15)
@given(paired_tables().filter(lambda table: table[0] + table[1] < table[2]), CONFIDENCES)
@example(table=(1, 0, 60), confidence=0.95)
def test_paired_difference_is_the_brute_force_score_interval(table: tuple[int, int, int], confidence: float) -> None:
    found = paired_difference(*table, confidence)
    assert (found.low, found.high) == pytest.approx(brute_force_difference(*table, confidence), abs=2e-5)


@given(paired_tables(), CONFIDENCES)
@example(table=(7, 0, 7), confidence=0.95)
@example(table=(0, 7, 7), confidence=0.95)
def test_paired_difference_holds_its_value_and_is_mirrored_with_the_sides(
    table: tuple[int, int, int], confidence: float
) -> None:
    gained, lost, n = table
    found, other = paired_difference(gained, lost, n, confidence), paired_difference(lost, gained, n, confidence)
    assert found.value == pytest.approx((gained - lost) / n)
    assert -1 <= found.low <= found.value <= found.high <= 1
    assert (other.low, other.high) == pytest.approx((-found.high, -found.low), abs=1e-12)
    surer = paired_difference(gained, lost, n, 0.995)
    assert surer.low <= found.low + 1e-12 and found.high <= surer.high + 1e-12


def brute_force_ratio(both: int, gained: int, lost: int, n: int, confidence: float) -> tuple[float, float]:
    """Invert the score test of a ratio as `brute_force_difference` does that of a difference."""
    z, after, net = stats.norm.ppf(0.5 + confidence / 2), both + gained, gained - lost
    seen = (both + gained + lost) / n

    def score(ratio: float, after: int) -> float:
        def chances(p_lost: float) -> tuple[float, float, float]:
            p_both = (seen - (1 + ratio) * p_lost) / ratio
            return p_both, seen - p_lost - p_both, p_lost

        def negative(p_lost: float) -> float:
            counts = zip((both, gained, lost), chances(p_lost), strict=True)
            return -sum(k * math.log(max(p, 1e-300)) for k, p in counts)

        bounds = (max(0.0, seen * (1 - ratio)), seen / (1 + ratio))
        best = optimize.minimize_scalar(negative, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        p_both, p_gained, p_lost = chances(best)
        variance = n * (p_both * (1 - ratio) ** 2 + p_gained + ratio**2 * p_lost)
        return float((after - ratio * (both + lost)) / math.sqrt(variance))

    value = after / (both + lost)
    low = optimize.brentq(lambda ratio: score(ratio, after - (net > 0)) - z, value / 2, value - 1e-7)
    high = optimize.brentq(lambda ratio: score(ratio, after + (net < 0)) + z, value + 1e-7, 2 * value)
    return low, high


@pytest.mark.parametrize("table", [(80, 4, 9, 100), (40, 10, 3, 60), (300, 2, 12, 400)])
def test_paired_ratio_is_the_brute_force_score_interval(table: tuple[int, int, int, int]) -> None:
    found = paired_ratio(*table, 0.95)
    assert (found.low, found.high) == pytest.approx(brute_force_ratio(*table, 0.95), abs=2e-4)


def test_paired_ratio_holds_one_where_the_difference_holds_zero() -> None:
    for both, gained, lost, n in ((80, 4, 9, 100), (500, 2, 30, 600), (50, 12, 1, 70), (90, 0, 0, 90)):
        ratio, difference = paired_ratio(both, gained, lost, n, 0.95), paired_difference(gained, lost, n, 0.95)
        assert (ratio.low <= 1 <= ratio.high) == (difference.low <= 0 <= difference.high)


@pytest.mark.parametrize(("chances", "n"), [((0.8, 0.05, 0.08), 50), ((0.9, 0.01, 0.03), 200), ((0.2, 0.1, 0.1), 100)])
def test_paired_ratio_keeps_either_side(chances: tuple[float, float, float], n: int) -> None:
    p_both, p_gained, p_lost = chances
    truth, draws = (p_both + p_gained) / (p_both + p_lost), 2000
    tables = np.random.default_rng(0).multinomial(n, [*chances, 1 - sum(chances)], draws)
    found = [paired_ratio(int(both), int(gained), int(lost), n, 0.95) for both, gained, lost, _ in tables]
    assert sum(each.low > truth for each in found) <= 0.03 * draws
    assert sum(each.high < truth for each in found) <= 0.03 * draws


def test_nothing_has_a_share_of_nothing() -> None:
    assert math.isinf(paired_ratio(0, 3, 0, 50, 0.95).low)


def test_paired_difference_agrees_with_mcnemars_test_at_zero() -> None:
    """The interval excludes zero exactly where the test with Edwards' correction, (|b - c| - 1)^2 / (b + c), does."""
    for gained in range(13):
        for lost in range(13):
            found = paired_difference(gained, lost, 40, 0.95)
            significant = gained + lost > 0 and (abs(gained - lost) - 1) ** 2 / (gained + lost) > stats.chi2.ppf(
                0.95, 1
            )
            assert (found.low > 0 or found.high < 0) == (significant and gained != lost)


@given(st.integers(1, 10**5), CONFIDENCES)
def test_no_change_at_all_still_leaves_doubt(n: int, confidence: float) -> None:
    z = stats.norm.ppf(0.5 + confidence / 2)
    found = paired_difference(0, 0, n, confidence)
    assert (found.low, found.value, found.high) == pytest.approx((-(z**2) / (n + z**2), 0, z**2 / (n + z**2)))


def test_paired_difference_covers_the_truth() -> None:
    """95 % intervals over 3000 experiments of 80 samples hold the true difference in 93.5 to 98 %."""
    rng = np.random.default_rng(0)
    interval = cache(paired_difference)
    for p_gained, p_lost in [(0.05, 0.05), (0.02, 0.10), (0.2, 0.15)]:
        tables = rng.multinomial(80, [p_gained, p_lost, 1 - p_gained - p_lost], size=3000)
        found = [interval(int(g), int(lost), 80, 0.95) for g, lost, _ in tables]
        held = np.mean([e.low <= p_gained - p_lost <= e.high for e in found])
        assert 0.935 <= held <= 0.98


@pytest.mark.parametrize(("p_gained", "p_lost", "n"), [(0.0, 0.02, 200), (0.0, 0.01, 500), (0.002, 0.012, 500)])
def test_paired_difference_of_rare_changes_keeps_either_side(p_gained: float, p_lost: float, n: int) -> None:
    """Without the correction for continuity 3.1 to 4.9 % of these lie wholly below the truth; counted, not drawn."""
    truth, chance = p_gained - p_lost, np.zeros(2)
    for gained in range(12):
        for lost in range(25):
            weight = stats.multinomial.pmf(
                [gained, lost, n - gained - lost], n, [p_gained, p_lost, 1 - p_gained - p_lost]
            )
            if weight > 1e-7:
                found = paired_difference(gained, lost, n, 0.95)
                chance += weight * np.array([found.low > truth, found.high < truth])
    assert (chance < 0.026).all()


@given(st.integers(200, 900), st.floats(0.5, 0.995))
@example(n=200, confidence=0.75)  # its skewness, 1e-17 but for rounding, once doubled one side
def test_an_interval_of_well_behaved_samples_is_students(n: int, confidence: float) -> None:
    values = stats.norm.ppf((np.arange(n) + 0.5) / n)
    found = skewed_interval(1.0, values, confidence)
    wanted = stats.t.interval(confidence, n - 1, 1.0, stats.sem(values))
    assert (found.low - 1, found.high - 1) == pytest.approx([end - 1 for end in wanted], rel=2e-3)


@given(st.integers(50, 300), st.sampled_from(["normal", "lognormal", "standard_cauchy"]), st.floats(0.01, 100), SEEDS)
def test_an_interval_is_scaled_and_mirrored_with_its_samples(n: int, kind: str, factor: float, seed: int) -> None:
    values = getattr(np.random.default_rng(seed), kind)(size=n)
    found, larger = skewed_interval(0.0, values, 0.95), skewed_interval(0.0, factor * values, 0.95)
    mirrored = skewed_interval(0.0, -values, 0.95)
    assert found.low <= 0 <= found.high
    assert (larger.low, larger.high) == pytest.approx((factor * found.low, factor * found.high))
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_a_skewed_sample_widens_the_side_of_its_tail_most_and_neither_side_narrows() -> None:
    values = stats.expon.ppf((np.arange(400) + 0.5) / 400)
    found, error = skewed_interval(1.0, values, 0.95), stats.sem(values)
    t = stats.t.ppf(0.975, 399)
    assert found.high - 1 > 1.1 * t * error
    assert t * error <= 1 - found.low < found.high - 1


def test_an_interval_does_not_narrow_as_one_sample_grows() -> None:
    values = np.random.default_rng(0).normal(size=100)
    ends = []
    for outlier in (3.0, 6.0, 9.0, 12.0, 15.0):
        values[0] = outlier
        ends.append(skewed_interval(0.0, values, 0.95).high)
    assert ends == sorted(ends)


@pytest.mark.parametrize("carriers", [1, 2, 3])
def test_what_a_few_samples_carry_is_far_within_the_largest_of_them(carriers: int) -> None:
    """Farther than their exact count allows, and than Hall's t goes; nearer than as if every sample were the worst."""
    values = np.zeros(100)
    values[:carriers] = 1.0
    found = skewed_interval(carriers / 100, values, 0.95)
    assert found.method == FEW_CARRIERS
    assert 1.5 * proportion_interval(carriers, 100, 0.95).high < found.high < 0.5
    values[carriers] = 1e-9
    assert skewed_interval(carriers / 100, values, 0.95).high == pytest.approx(found.high, rel=1e-6)


LOSSES: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], np.ndarray], float]] = {
    "lognormal 2": (lambda rng, shape: rng.lognormal(0, 2, shape), math.exp(2)),
    "gamma 0.3": (lambda rng, shape: rng.gamma(0.3, 1, shape), 0.3),
    "Pareto 2": (lambda rng, shape: rng.pareto(2, shape), 1.0),
    "1 in 50 a hundred times as large": (
        lambda rng, shape: rng.gamma(4, 0.25, shape) * np.where(rng.random(shape) < 0.02, 100, 1),
        0.98 + 0.02 * 100,
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_few_carriers_keep_either_side(kind: str) -> None:
    """Of draws whose spread few samples carry the truth is beyond an end in 2.5 % at most."""
    draw, truth = LOSSES[kind]
    for n in (50, 100, 200):
        if 0.98**n > 0.02 and kind.startswith("1 in"):
            continue  # what is not drawn is not seen
        samples = draw(np.random.default_rng(n), (1500, n))
        found = [skewed_interval(float(row.mean()), row, 0.95) for row in samples]
        few = [each for each in found if each.method == FEW_CARRIERS]
        assert few
        assert sum(each.low > truth for each in few) <= 0.03 * len(found)
        assert sum(each.high < truth for each in few) <= 0.03 * len(found)


def test_too_few_samples_have_no_interval() -> None:
    found = skewed_interval(1.0, np.arange(49.0), 0.95)
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert (found.method, found.lacking) == ("no interval from 49 samples", "at least 50 would be needed")


@pytest.mark.parametrize("n", [1, 5, 19, 40])
def test_a_bounded_mean_of_any_number_keeps_within_an_exact_bound(n: int) -> None:
    """Of values all at the end of their range it is the proportion's own bound, for no share is likelier to show it."""
    found = bound_mean(unknown(-1.0, "", ""), (-1.0, 1.0), n, 0.95)
    assert (found.low, found.high) == (pytest.approx(-1.0), pytest.approx(1 - 2 * 0.025 ** (1 / n)))
    for chance in (0.02, 0.3, 0.5):
        hits = np.random.default_rng(0).binomial(n, chance, 2000)
        missed = sum(bound_mean(unknown(k / n, "", ""), (0.0, 1.0), n, 0.95).high < chance for k in hits)
        assert missed <= 0.025 * len(hits)
    hall = Estimate(0.5, 0.4, 0.6, HALL)
    assert bound_mean(hall, (0.0, 1.0), n, 0.95) is hall


def test_samples_of_unequal_weight_count_as_fewer() -> None:
    weights = np.array([1.0, 3.0] * 40)  # Kish: 80 / 1.25 = 64 of them
    values = np.random.default_rng(1).lognormal(size=80)
    even, uneven = skewed_interval(0.0, values, 0.95), skewed_interval(0.0, values, 0.95, weights)
    assert uneven.high - uneven.low > even.high - even.low
    assert "would be needed" in skewed_interval(0.0, values[:60], 0.95, weights[:60]).lacking
    assert skewed_interval(0.0, values, 0.95, np.zeros(80)).lacking == "none of them counts"


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("odd", [0, 1])
def test_the_median_lies_between_two_ordered_processes_as_often_as_is_said(confidence: float, odd: int) -> None:
    """Of any population: here one of two paces, which no t interval knows of."""
    n = fresh_processes_needed(confidence, odd)
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        paces = np.where(rng.random(n) < 0.4, 1.0, 2.0) + 0.01 * rng.normal(size=n)
        found = process_interval(paces, confidence)
        held += found.low <= 2.0 - 0.01 * 0.967 <= found.high  # the median: a sixth of the upper pace is below it
    assert held / 2000 > confidence - 0.03


def test_processes_that_an_interval_needs() -> None:
    """1 - 2 / 2^6 is 97 %; of five it is 94 %."""
    assert (fresh_processes_needed(0.95), fresh_processes_needed(0.95, odd=1)) == (6, 9)
    seen = np.array([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert process_interval(seen, 0.95) == Estimate(3.5, 1, 6, "order statistics of fresh processes")
    assert process_interval(seen[:3], 0.95).lacking == "at least 6 would be needed"


def test_one_odd_process_does_not_widen_the_interval_of_nine() -> None:
    found = process_interval(np.array([1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 40.0]), 0.95)
    assert (found.low, found.high) == (1.01, 1.07)


@st.composite
def positive_estimates(draw: st.DrawFn) -> Estimate:
    low, value, high = sorted(draw(st.lists(st.floats(0.01, 100), min_size=3, max_size=3)))
    return Estimate(value, low, high, "")


@given(positive_estimates(), positive_estimates())
def test_intervals_subtract_and_divide_as_independent_ones(a: Estimate, b: Estimate) -> None:
    apart, back = subtract(a, b), subtract(b, a)
    below, above = math.hypot(a.value - a.low, b.high - b.value), math.hypot(a.high - a.value, b.value - b.low)
    assert (apart.low, apart.value, apart.high) == pytest.approx(
        (a.value - b.value - below, a.value - b.value, a.value - b.value + above)
    )
    assert (back.low, back.high) == pytest.approx((-apart.high, -apart.low))
    found, inverse = divide(a, b), divide(b, a)
    assert found.value == a.value / b.value and found.low <= found.value * 1.000001 <= found.high * 1.000002
    upper = math.hypot(math.log(a.high / a.value), math.log(b.value / b.low))
    assert math.log(found.high / found.value) == pytest.approx(upper, abs=1e-9)
    assert (inverse.low, inverse.high) == pytest.approx((1 / found.high, 1 / found.low))


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
