"""Evidence of how fast a decoder generates, from the times of whole requests; what is redrawn are the rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.bundle import Benchmark, Judgement
from runtime.columns import Array
from runtime.evidence import Evidence, measured
from runtime.metrics.measured import ITL_PERCENTILES, LATENCY_PERCENTILES, MEASURED
from runtime.request_times import RequestTimes
from runtime.stats import Columns, bootstrap_percentiles, bootstrap_statistic, percentile_interval


@dataclass(frozen=True)
class Quantity:
    """A metric's value, in its unit, of some rounds' seconds: (first [r], steps [r, new_tokens - 1])."""

    name: str
    value: Callable[[Columns], float]
    of_rounds: Callable[[Columns], Array] | None = None
    """The same of each round, [r]. Where it is there, the speed-up is the median of the rounds' own ratios."""


def request_evidence(times: RequestTimes, judgement: Judgement) -> dict[str, Evidence]:
    """Evidence of each metric, by name; row 0 of the times is the baseline, row 1 the candidate."""
    return {one.name: _evidence(one, times, judgement) for one in quantities(judgement.benchmark)}


def quantities(settings: Benchmark) -> list[Quantity]:
    """What is measured with these settings."""
    batch = settings.batch_size
    found = [
        _typical("ttft", lambda first, steps: 1000 * first),
        _typical("tpot", lambda first, steps: 1000 * steps.mean(axis=1)),
        *(_step_percentile(name, p) for name, p in {**ITL_PERCENTILES, **LATENCY_PERCENTILES}.items()),
        _rate("prefill_rate", batch * settings.prompt_tokens, lambda first, steps: first),
        _rate("decode_rate", batch, lambda first, steps: steps.mean(axis=1)),
    ]
    if settings.price_per_hour is not None:
        millions = batch * settings.new_tokens / 1e6
        price = settings.price_per_hour / 3600 / millions  # for each second that a request takes
        found.append(_typical("cost_per_million", lambda first, steps: price * (first + steps.sum(axis=1))))
    return found


Seconds = Callable[[Array, Array], Array]
"""(first [r], steps [r, n]) -> [r]."""


def _typical(name: str, of_rounds: Seconds) -> Quantity:
    return Quantity(name, lambda c: float(np.median(of_rounds(*c))), lambda c: of_rounds(*c))


def _rate(name: str, amount: float, seconds: Seconds) -> Quantity:
    return Quantity(name, lambda c: amount / float(np.median(seconds(*c))), lambda c: amount / seconds(*c))


def _step_percentile(name: str, percentile: float) -> Quantity:
    return Quantity(name, lambda c: 1000 * float(np.percentile(c[1], percentile)))


def _evidence(quantity: Quantity, times: RequestTimes, judgement: Judgement) -> Evidence:
    sides = [(times.first[side], times.steps[side]) for side in (0, 1)]
    n, level = len(sides[0][0]), judgement.confidence
    draws = [bootstrap_statistic(c, quantity.value, judgement.resamples, judgement.seed) for c in sides]
    values = [quantity.value(c) for c in sides]
    before, after = (percentile_interval(v, d, n, level) for v, d in zip(values, draws, strict=True))
    better = -1 if MEASURED[quantity.name].higher_is_better else 1  # exponent: how many times better is before / after
    speedup, ratios = (values[0] / values[1]) ** better, (draws[0] / draws[1]) ** better
    if quantity.of_rounds is not None:
        own = (quantity.of_rounds(sides[0]) / quantity.of_rounds(sides[1])) ** better  # [rounds]
        speedup, ratios = float(np.median(own)), bootstrap_percentiles(own, 50, judgement.resamples, judgement.seed)
    return measured(
        quantity.name,
        n,
        before=before,
        after=after,
        difference=percentile_interval(values[1] - values[0], draws[1] - draws[0], n, level),
        speedup=percentile_interval(speedup, ratios, n, level),
    )
