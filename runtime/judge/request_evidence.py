"""Evidence of how fast a decoder generates, from the times of whole requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Benchmark, Judgement
from runtime.judge.evidence import Evidence, percentile_evidence, rate
from runtime.measure.timing import RequestTimes
from runtime.metrics.measured import ITL_PERCENTILES, LATENCY_PERCENTILES


@dataclass(frozen=True)
class Quantity:
    """A percentile of some seconds of each round, on a metric's scale."""

    name: str
    percentile: float
    seconds: Callable[[Array, Array], Array]
    """(first [rounds], steps [rounds, new_tokens - 1]) -> [rounds] or [rounds, calls]."""
    to_unit: Callable[[float], float]

    def value(self, first: Array, steps: Array) -> float:
        """Return the metric, in its unit."""
        return self.to_unit(float(np.percentile(self.seconds(first, steps), self.percentile)))


def request_evidence(times: RequestTimes, judgement: Judgement) -> dict[str, Evidence]:
    """Return evidence of each metric, by name; row 0 of the times is the baseline, row 1 the candidate."""
    evidence = {}
    for quantity in quantities(judgement.benchmark):
        seconds = np.stack([quantity.seconds(times.first[side], times.steps[side]) for side in (0, 1)])
        evidence[quantity.name] = percentile_evidence(
            quantity.name, quantity.percentile, seconds, judgement.confidence, quantity.to_unit
        )
    return evidence


def quantities(settings: Benchmark) -> list[Quantity]:
    """Return what is measured with these settings."""
    batch, n_prompt = settings.batch_size, settings.batch_size * settings.prompt_tokens
    listed = [
        Quantity("ttft", 50, lambda first, steps: first, _to_milliseconds),
        Quantity("tpot", 50, _mean_per_token, _to_milliseconds),
        *(
            Quantity(name, percentile, lambda first, steps: steps, _to_milliseconds)
            for name, percentile in {**ITL_PERCENTILES, **LATENCY_PERCENTILES}.items()
        ),
        Quantity("prefill_rate", 50, lambda first, steps: first, lambda second: rate(n_prompt, second)),
        Quantity("decode_rate", 50, _mean_per_token, lambda second: rate(batch, second)),
    ]
    if settings.price_per_hour is not None:
        millions = batch * settings.new_tokens / 1e6
        price = settings.price_per_hour / 3600 / millions  # for each second that a request takes
        listed.append(
            Quantity("cost_per_million", 50, lambda first, steps: first + steps.sum(axis=1), lambda s: price * s)
        )
    return listed


def _mean_per_token(first: Array, steps: Array) -> Array:
    """Return the mean over a request's further tokens, [rounds]."""
    mean: Array = steps.mean(axis=1)
    return mean


def _to_milliseconds(seconds: float) -> float:
    return 1000 * seconds
