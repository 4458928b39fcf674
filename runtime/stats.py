"""Confidence intervals: exact knowledge of how little a finite evaluation set can tell.

All intervals are two-sided at `confidence` (0.95 leaves 2.5 % on either side), and each side keeps that promise on its
own: `benchmarks/gate_confidence.py` counts how often. Proportions and percentiles have exact intervals from the
binomial distribution, paired differences of proportions Tango's score interval, and every other statistic Student's t
corrected for skewness (Hall 1992). Where the samples cannot tell, an end is infinite, and `lacking` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np

MIN_SAMPLES = 50
"""Below this a statistic without a range has no interval: a skewed tail has not shown itself yet. Of losses that one
sample in twenty has, 30 samples would hold the mean out in 19 % of draws, whatever their spread is."""
_TAIL_FACTOR = 2.0
"""How much longer the tail is taken to be than the sample shows: a sample that misses the truth is one that has not
drawn its tail, and shows half the skewness there is (measured on lognormal and Pareto samples of 50 to 1,000)."""
_FEWEST_CARRIERS = 4
"""Samples that must share the spread; where fewer carry it, what was not drawn may be larger than all that was."""
_UNSEEN_TAIL = 3.0
"""How many times the largest deviation seen those beyond it are on average: as of a Pareto tail of index 1.5. With 1,
50 lognormal losses of sigma 2.5 would hold their mean out in 2.1 % of draws, with 3 in 0.6 %."""
_NORMAL_THIRD_MOMENT = 4 / math.sqrt(2 * math.pi)
"""E|z|^3 of a standard normal z."""

HALL = "Hall's skewness-corrected t"
FEW_CARRIERS = "Hall's t, and a tail beyond the largest deviation"
PROCESSES = "order statistics of fresh processes"
RARE_CHANGES = "Clopper-Pearson bound of what changed"
WITHIN_RANGE = "Hoeffding bound of values within a range"


@dataclass(frozen=True)
class Estimate:
    """A value, its interval and how the interval was made. `low == high` for what is exact.

    `lacking` says what is missing where an end is infinite.
    """

    value: float
    low: float
    high: float
    method: str
    lacking: str = ""


def exact(value: float) -> Estimate:
    """Return the estimate of a quantity without uncertainty, as a file's size."""
    return Estimate(value, value, value, "exact")


def unknown(value: float, seen: str, lacking: str) -> Estimate:
    """Return the estimate of a value that too little was `seen` of, as "9 samples": its interval is everything."""
    return Estimate(value, -math.inf, math.inf, f"no interval from {seen}", lacking)


def change_scale(estimate: Estimate, to: Callable[[float], float]) -> Estimate:
    """Return the estimate on another scale, by a monotone function; a falling one swaps the ends."""
    low, high = sorted((to(estimate.low), to(estimate.high)))
    return replace(estimate, value=to(estimate.value), low=low, high=high)


def subtract(after: Estimate, before: Estimate) -> Estimate:
    """Return after minus before from their own intervals (MOVER; Zou & Donner 2008, Stat. Med. 27:1693).

    The two are taken to be independent: what they share, as the pace of a machine, makes the interval too wide, not too
    narrow.
    """
    value = after.value - before.value
    low = value - math.hypot(after.value - after.low, before.high - before.value)
    high = value + math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(value, low, high, after.method, after.lacking or before.lacking)


def divide(above: Estimate, below: Estimate) -> Estimate:
    """Return above over below, both positive: `subtract` on their logarithms."""
    value = above.value / below.value
    logs = subtract(change_scale(above, _log), change_scale(below, _log))
    low, high = (value * math.exp(end - logs.value) for end in (logs.low, logs.high))
    return replace(logs, value=value, low=low, high=high)


def change_level(estimate: Estimate, before: float, after: float) -> Estimate:
    """Return the estimate with the interval of another confidence, by the ratio of a normal's quantiles.

    For intervals whose samples are not at hand. Ratios come on their logarithms' scale.
    """
    wider = _normal_quantile(after) / _normal_quantile(before)
    low = estimate.value - (estimate.value - estimate.low) * wider
    return replace(estimate, low=low, high=estimate.value + (estimate.high - estimate.value) * wider)


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _student_quantile(confidence: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t (Abramowitz & Stegun 26.7.5; 1e-5 from 30 degrees of freedom on)."""
    z = _normal_quantile(confidence)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _binomial_probabilities(n: int, p: float) -> np.ndarray:
    """Return P(k) of n draws of chance 0 < p < 1, float64 [n + 1]."""
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])  # of factorials
    k = np.arange(n + 1)
    chances: np.ndarray = np.exp(logs[n] - logs - logs[::-1] + k * math.log(p) + (n - k) * math.log1p(-p))
    return chances


@lru_cache(maxsize=4096)
def proportion_interval(successes: float, n: float, confidence: float) -> Estimate:
    """Return Clopper and Pearson's exact interval of a proportion (1934, Biometrika 26:404).

    Wilson's is narrower, but on proportions near 1 its upper end is too low in up to 14 % of samples. Of copies that
    count as fewer the counts are fractions: each end is that of whole ones, the next farther away.
    """
    tail, share, whole = (1 - confidence) / 2, successes / n, int(n)
    fewest, most = (int(turn(share * whole + shift)) for turn, shift in ((math.floor, 1e-9), (math.ceil, -1e-9)))
    low, high = 0.0, 1.0
    if fewest > 0:
        low = _find_zero(lambda p: tail - float(_binomial_probabilities(whole, p)[fewest:].sum()), 0.0, fewest / whole)
    if most < whole:
        high = _find_zero(
            lambda p: float(_binomial_probabilities(whole, p)[: most + 1].sum()) - tail, most / whole, 1.0
        )
    return Estimate(share, low, high, "Clopper-Pearson")


@lru_cache(maxsize=4096)
def paired_difference(gained: float, lost: float, n: float, confidence: float) -> Estimate:
    """Return Tango's score interval of the difference of two paired proportions (1998, Stat. Med. 17:891).

    Of n samples `gained` turned from 0 to 1 and `lost` from 1 to 0; the difference is (gained - lost) / n. The interval
    inverts McNemar's score test, and has a width even if no sample changed: then it is +-z^2 / (n + z^2). The end that
    is nearer to no difference is corrected for continuity, as Edwards does McNemar's test: where few samples change,
    and all in one direction, it would otherwise come too close in up to 5 % of evaluation sets.
    """
    z, value = _normal_quantile(confidence), (gained - lost) / n
    net = gained - lost
    nearer = net - int(np.sign(net))
    low_from, high_from = (nearer if net > 0 else net), (nearer if net < 0 else net)
    low = _find_zero(lambda delta: _tango_score(gained, lost, n, delta, low_from) - z, -1.0, value)
    high = _find_zero(lambda delta: _tango_score(gained, lost, n, delta, high_from) + z, value, 1.0)
    return Estimate(value, low, high, "Tango paired score")


def _tango_score(gained: float, lost: float, n: float, delta: float, net: float) -> float:
    """Return the score statistic of `difference = delta`, `net` samples having turned; it falls as delta grows."""
    a = 2 * n
    b = -gained - lost + (2 * n - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    p_lost = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)  # most likely P(lost) given delta
    variance = n * (2 * p_lost + delta * (1 - delta))
    distance = net - n * delta
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance) if distance else 0.0


@lru_cache(maxsize=4096)
def paired_ratio(both: float, gained: float, lost: float, n: float, confidence: float) -> Estimate:
    """Return the score interval of the ratio of two paired proportions (Tang, Tang & Chan 2003, Stat. Med. 22:1217).

    Of n samples `both` are 1 before and after, `gained` after alone, `lost` before alone; the ratio is (both + gained)
    / (both + lost). As in `paired_difference` the end that is nearer to no change is corrected for continuity. Where
    no sample is 1 before there is no ratio: the interval is everything.
    """
    before, after = both + lost, both + gained
    if not before:
        return unknown(math.nan, f"{n:g} samples", "the baseline has none of them right, and there is no share of that")
    z, value = _normal_quantile(confidence), after / before
    net = gained - lost
    low_from, high_from = after - (1 if net > 0 else 0), after + (1 if net < 0 else 0)
    low = _find_zero(lambda ratio: _tang_score(both, gained, lost, n, ratio, low_from) - z, 0.0, value)
    top = max(2.0, 4 * value)
    while _tang_score(both, gained, lost, n, top, high_from) + z > 0 and top < 1e6:
        top *= 4
    high = _find_zero(lambda ratio: _tang_score(both, gained, lost, n, ratio, high_from) + z, value, top)
    return Estimate(value, low, high, "paired score of the ratio")


def _tang_score(both: float, gained: float, lost: float, n: float, ratio: float, after: float) -> float:
    """Return the score statistic of `after` = ratio * before; it falls as the ratio grows."""
    seen = (both + gained + lost) / n
    a = n * (1 + ratio)
    b = (both + lost) * ratio**2 - (both + gained + 2 * lost)
    c = lost * (1 - ratio) * seen
    p_lost = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)  # most likely P(lost) given the ratio
    variance = n * ((1 + ratio) * p_lost + seen * (ratio - 1))
    distance = after - ratio * (both + lost)
    if variance > 1e-12:
        return distance / math.sqrt(variance)
    return math.copysign(math.inf, distance) if distance else 0.0


def _find_zero(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function crosses zero in [low, high]; the nearer end where it does not."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def skewed_interval(
    value: float,
    influence: np.ndarray,
    confidence: float,
    weights: np.ndarray | None = None,
    least: float = MIN_SAMPLES,
) -> Estimate:
    """Return the interval of a statistic from what each of its n samples adds to it, float64 [n].

    The influence of a mean is the samples themselves; of any other smooth statistic, its derivative by the weight of
    each sample (the infinitesimal jackknife; Efron 1982). Student's t is corrected for skewness by Hall's cubic
    transformation (1992, J. R. Stat. Soc. B 54:221), as if the tail were `_TAIL_FACTOR` times as long as it shows, and
    never made narrower. Skewness is counted towards each end on its own, and the third absolute moment beyond a
    normal's towards both: of two heavy tails a sample may miss either. Where fewer than `_FEWEST_CARRIERS` samples
    carry the spread, the end is as far as that transformation goes, and farther by what was not drawn: as large a share
    as none of n samples may be of, of deviations `_UNSEEN_TAIL` times as large as the largest one. Samples of unequal
    `weights` count as the fewer equal ones that Kish (1965) puts for them; of fewer than `least` there is no interval.
    """
    n = len(influence)
    if weights is not None and not weights.any():
        return unknown(value, f"{n} samples", "none of them counts")
    equal = count_equal(n, weights)
    if equal < least:
        return unknown(value, f"{n} samples", f"at least {math.ceil(n * least / equal)} would be needed")
    centred = influence - influence.mean()
    spread = math.sqrt(np.mean(centred**2))
    if spread == 0:
        return Estimate(value, value, value, HALL)
    z = centred / spread
    third, tails = float(np.mean(z**3)), float(np.mean(np.abs(z) ** 3)) - _NORMAL_THIRD_MOMENT
    error, quantile = spread / math.sqrt(n - 1), _student_quantile(confidence, equal - 1)
    skews = [max(towards, tails, 0.0) / math.sqrt(equal) for towards in (-third, third)]
    unseen = 1 - ((1 - confidence) / 2) ** (1 / equal)  # none of n samples is of a larger share but with that chance
    farther = _UNSEEN_TAIL * unseen * float(np.max(np.abs(centred)))
    few = [skew >= 1 / math.sqrt(_FEWEST_CARRIERS) for skew in skews]
    below, above = (
        error * _hall_quantile(quantile, 1.0) + farther if alone else error * _hall_quantile(quantile, skew)
        for skew, alone in zip(skews, few, strict=True)
    )
    return Estimate(value, value - below, value + above, FEW_CARRIERS if any(few) else HALL)


def count_equal(n: int, weights: np.ndarray | None) -> float:
    """Return how many equal samples say as much as n of these weights (Kish 1965)."""
    return n if weights is None else float(weights.sum() ** 2 / np.sum(weights**2))


def _hall_quantile(quantile: float, skew: float) -> float:
    """Return how many standard errors away the end is towards which the statistic's skewness / sqrt(n) is `skew`."""
    if skew == 0:
        return quantile
    # the transformation turns back beyond 0.6; a more skewed sample must not get a narrower interval
    a = _TAIL_FACTOR * skew * np.linspace(0, 1, 65)[1:]
    root = np.cbrt(1 - a * (quantile + a / 6))
    # 3 / a * (1 - root) as a quotient: the difference of a symmetric sample's root from 1 is nothing but rounding
    return max(quantile, float(np.max(3 * (quantile + a / 6) / (1 + root + root**2))))


def bound_mean(estimate: Estimate, value_range: tuple[float, float], n: float, confidence: float) -> Estimate:
    """Return the estimate of a mean of n values within a range, no wider than that range allows.

    Hoeffding's bound in its form of relative entropy (1963, J. Am. Stat. Assoc. 58:13, Theorem 1) holds for any n and
    any shape; it is taken where `skewed_interval` has to guess at a tail that was not drawn.
    """
    least, most = value_range
    if estimate.method == HALL or not math.isfinite(most - least) or math.isnan(estimate.value):
        return estimate
    share, surprise = (estimate.value - least) / (most - least), math.log(2 / (1 - confidence)) / n

    def fits(of: float) -> float:
        parts = ((share, of), (1 - share, 1 - of))
        return surprise - sum(p * math.log(p / max(q, 1e-300)) for p, q in parts if p > 0)

    ends = (_find_zero(lambda of: -fits(of), 0.0, share), _find_zero(fits, share, 1.0))
    low, high = (least + (most - least) * end for end in ends)
    low, high = max(estimate.low, low), min(estimate.high, high)
    if (low, high) == (estimate.low, estimate.high):
        return estimate
    return Estimate(estimate.value, low, high, WITHIN_RANGE)


def bound_rare_changes(
    estimate: Estimate, around: float, changed: float, n: float, reach: float, confidence: float
) -> Estimate:
    """Return the estimate of a statistic that is `around` where no sample changed; each moves it by at most reach / n.

    Where few samples changed, their exact count says more than their spread; where none did, only it says anything.
    """
    most = proportion_interval(changed, n, confidence).high * reach
    bound = Estimate(estimate.value, around - most, around + most, RARE_CHANGES)
    if estimate.low == estimate.high:
        return bound
    low, high = max(estimate.low, bound.low), min(estimate.high, bound.high)
    return estimate if (low, high) == (estimate.low, estimate.high) else replace(bound, low=low, high=high)


@cache
def _find_order_statistics(n: int, share: float, confidence: float) -> tuple[int, int]:
    """Return which of n ordered values, from the first and from the last, leave the quantile out by chance at most.

    0 where none does.
    """
    tail, chances = (1 - confidence) / 2, _binomial_probabilities(n, share)
    low = int(np.count_nonzero(np.cumsum(chances) <= tail))
    high = int(np.count_nonzero(np.cumsum(chances[::-1]) <= tail))
    return low, high


def fresh_processes_needed(confidence: float, odd: int = 0) -> int:
    """Return how many processes have an interval of their median that `odd` of them at either end do not widen."""
    n = 1
    while min(_find_order_statistics(n, 0.5, confidence)) <= odd:
        n += 1
    return n


def process_interval(seen: np.ndarray, confidence: float) -> Estimate:
    """Return the median of what independent processes saw [processes], between two of their ordered values.

    They lie on either side of their median by even chance, so that this asks nothing of how they scatter.
    """
    ordered, value = np.sort(seen), float(np.median(seen))
    from_first, _ = _find_order_statistics(len(ordered), 0.5, confidence)
    if not from_first:
        needed = fresh_processes_needed(confidence)
        return unknown(value, f"{len(ordered)} fresh processes", f"at least {needed} would be needed")
    return Estimate(value, float(ordered[from_first - 1]), float(ordered[-from_first]), PROCESSES)


def samples_needed(estimate: Estimate, limit: float, n: int) -> int | None:
    """Estimate how many samples would put the whole interval on one side of `limit`, were the value to stay.

    Widths shrink with the square root of n. None where the value is on the limit or has no interval, so that no number
    of samples is promised.
    """
    distance = abs(estimate.value - limit)
    width = estimate.high - estimate.value if limit > estimate.value else estimate.value - estimate.low
    if distance == 0 or not math.isfinite(width) or (width / distance) ** 2 > 1e6:
        return None
    return max(n + 1, math.ceil(n * (width / distance) ** 2))
