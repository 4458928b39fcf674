"""Tell what is known of a bundle's speed, memory and size, each with its interval, from what was measured of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Benchmark, Judgement
from runtime.judge.evidence import Evidence
from runtime.measure.benchmark import BenchmarkResult
from runtime.measure.requests import RequestTimes
from runtime.metrics.measured import END_TO_END_PERCENTILES, ITL_PERCENTILES, LATENCY_PERCENTILES, MEASURED
from runtime.stats import Estimate, divide, exact, process_interval, subtract, unknown

PROCESS = "fresh processes"
BETWEEN_RUNS = 0.02
"""Share of a ratio: of 140 judgements of five pairs of models, alone and beside other work, 100 intervals of the
processes held the median of 54 idle ones, 122 when wider by 1 % and 129 by 2 %. The pair near 1.9 alone moved from 1.94
to 1.98 within the hour, in all of a run's processes alike (benchmarks/verdict_under_load.py)."""


def speed_evidence(result: BenchmarkResult, judgement: Judgement) -> dict[str, Evidence]:
    """Return evidence of every measured metric, by name."""
    judgement = replace(judgement, benchmark=result.settings)
    settings, level = result.settings, judgement.confidence
    if result.requests is not None:
        evidence = request_evidence(result.requests, judgement)
    else:
        assert result.calls is not None and result.large is not None
        evidence = {
            name: timing_evidence(name, percentile, result.calls, level)
            for name, percentile in latency_percentiles(settings).items()
        }
        size = settings.throughput_batch_size
        evidence["throughput"] = timing_evidence("throughput", 50, result.large, level, lambda second: size / second)
        if settings.price_per_hour is not None:
            evidence["cost_per_million"] = cost_evidence(result.large, judgement)
    if result.answers is not None:
        whole = result.answers.sum(axis=3)[..., None]  # [processes, models, rounds, 1]
        evidence |= {name: timing_evidence(name, p, whole, level) for name, p in END_TO_END_PERCENTILES.items()}
    if not isinstance(result.energy, str):
        evidence["energy"] = timing_evidence(
            "energy", 50, result.energy[..., None], level, lambda joules: 1000 * joules
        )
    if result.limited is not None:
        name = "throughput_under_latency" if result.requests is None else "goodput"
        evidence[name] = process_evidence(name, result.limited, level)
    *first, after = result.probes
    before = first[0] if first else None
    memory, load = (before.peak_memory_bytes, before.load_ms) if before else (None, None)
    evidence["peak_memory"] = range_evidence("peak_memory", memory, after.peak_memory_bytes, level)
    evidence["load_time"] = range_evidence("load_time", load, after.load_ms, level)
    return evidence | size_evidence(*result.sizes)


def _to_milliseconds(second: float) -> float:
    return 1000 * second


def timing_evidence(
    name: str,
    percentile: float,
    seconds: Array,
    level: float,
    to_unit: Callable[[float], float] = _to_milliseconds,
) -> Evidence:
    """Return evidence of a percentile of calls, seconds [processes, models, rounds, calls], on the scale `to_unit`.

    Each process has its own percentile, of all its calls; the estimate is of their median. The speed-up of medians is,
    in each process, the median of the rounds' own ratios: what slows a round slows both of its models.
    """
    of_process = np.percentile(seconds.reshape(*seconds.shape[:2], -1), percentile, axis=2)  # [processes, models]
    ratios = None
    if percentile == 50 and seconds.shape[1] == 2:
        medians = np.median(seconds, axis=3)  # [processes, models, rounds]
        ratios = np.median(medians[:, 0] / medians[:, 1], axis=1)
    values = np.vectorize(to_unit, otypes=[float])(of_process)
    lacking = _lack_calls(percentile, seconds.shape[2] * seconds.shape[3])
    return process_evidence(name, values, level, ratios, lacking)


def _lack_calls(percentile: float, n_calls: int) -> str:
    """Return what is missing where a process made too few calls to show a percentile; "" where it made enough."""
    # with fewer calls beyond it, a percentile is one odd call's
    needed = 1 if percentile == 50 else math.ceil(2.5 / min(percentile / 100, 1 - percentile / 100))
    if n_calls >= needed:
        return ""
    return f"each process made {n_calls} calls, and at least {needed} are needed (benchmark.iterations)"


def process_evidence(
    name: str, values: Array, level: float, ratios: Array | None = None, lacking: str = ""
) -> Evidence:
    """Return evidence of a metric of which each process gives one value a model, [processes, models], in its unit.

    `ratios`: how many times as fast the candidate is in each process, where that is not the ratio of its values.
    `lacking`: why these values have no interval.
    """

    def estimate(seen: Array) -> Estimate:
        if lacking:
            return unknown(float(np.median(seen)), f"{len(seen)} fresh processes", lacking)
        return process_interval(seen, level)

    after = estimate(values[:, -1])
    if values.shape[1] == 1:
        return make_evidence(name, len(values), before=None, after=after, difference=None, speedup=None)
    slow, fast = (values[:, 1], values[:, 0]) if MEASURED[name].higher_is_better else (values[:, 0], values[:, 1])
    if ratios is None and (fast > 0).all():
        ratios = slow / fast
    return make_evidence(
        name,
        len(values),
        before=estimate(values[:, 0]),
        after=after,
        difference=estimate(values[:, 1] - values[:, 0]),
        speedup=None if ratios is None else _widen_between_runs(estimate(ratios)),
    )


def _widen_between_runs(speedup: Estimate) -> Estimate:
    """Widen a ratio of two models by what all processes of one run share, and the next run does not."""
    return replace(speedup, low=speedup.low * (1 - BETWEEN_RUNS), high=speedup.high * (1 + BETWEEN_RUNS))


def cost_evidence(seconds: Array, judgement: Judgement) -> Evidence:
    """Return evidence of the cost of a million samples, of calls with large batches as for `timing_evidence`."""
    settings = judgement.benchmark
    price = (settings.price_per_hour or 0.0) / 3600 / (settings.throughput_batch_size / 1e6)
    return timing_evidence("cost_per_million", 50, seconds, judgement.confidence, lambda second: price * second)


def range_evidence(
    name: str, baseline: tuple[float, ...] | None, candidate: tuple[float, ...], level: float
) -> Evidence:
    """Return evidence of what different processes saw of either model. `baseline`: None where there is none."""
    nothing = unknown(math.nan, "no process", "none opened it first")
    after = process_interval(np.array(candidate), level) if candidate else nothing
    if baseline is None:
        return make_evidence(name, len(candidate), before=None, after=after, difference=None, speedup=None)
    before = process_interval(np.array(baseline), level) if baseline else nothing
    return make_evidence(
        name,
        len(candidate),
        before=before,
        after=after,
        difference=subtract(after, before),
        speedup=divide(before, after) if MEASURED[name].speed else None,
    )


def size_evidence(baseline_bytes: int | None, candidate_bytes: int) -> dict[str, Evidence]:
    """Return evidence of size (bytes) and, with a baseline, of size_ratio (baseline / candidate); both exact."""
    if baseline_bytes is None:
        alone = exact(candidate_bytes)
        return {"size": make_evidence("size", 1, before=None, after=alone, difference=None, speedup=None)}
    before, after = exact(baseline_bytes), exact(candidate_bytes)
    ratio = exact(baseline_bytes / candidate_bytes)
    difference = exact(candidate_bytes - baseline_bytes)
    return {
        "size": make_evidence("size", 1, before=before, after=after, difference=difference, speedup=None),
        "size_ratio": make_evidence("size_ratio", 1, before=None, after=ratio, difference=None, speedup=None),
    }


def make_evidence(
    name: str,
    n: int,
    *,
    before: Estimate | None,
    after: Estimate,
    difference: Estimate | None,
    speedup: Estimate | None,
) -> Evidence:
    """Return evidence of a measured metric, unit and direction as in `MEASURED`; `n` processes were seen."""
    metric = MEASURED[name]
    return Evidence(name, metric.unit, metric.higher_is_better, n, PROCESS, after, before, difference, speedup)


def request_evidence(times: RequestTimes, judgement: Judgement) -> dict[str, Evidence]:
    """Return evidence of each metric of requests, by name; times have axes [processes, models, rounds(, tokens)]."""
    settings, level = judgement.benchmark, judgement.confidence
    batch, n_prompt = settings.batch_size, settings.batch_size * settings.prompt_tokens
    first, steps, per_token = times.first[..., None], times.steps, times.per_token[..., None]
    medians = {"ttft": first, "tpot": per_token}
    evidence = {name: timing_evidence(name, 50, seconds, level) for name, seconds in medians.items()}
    for name, percentile in {**ITL_PERCENTILES, **latency_percentiles(settings)}.items():
        evidence[name] = timing_evidence(name, percentile, steps, level)
    if times.of_prompts:
        evidence["prefill_rate"] = timing_evidence("prefill_rate", 50, first, level, lambda s: n_prompt / s)
    evidence["decode_rate"] = timing_evidence("decode_rate", 50, per_token, level, lambda s: batch / s)
    if settings.price_per_hour is not None:
        price = settings.price_per_hour / 3600 / (batch * settings.new_tokens / 1e6)  # of a second of a request
        evidence["cost_per_million"] = timing_evidence(
            "cost_per_million", 50, times.whole[..., None], level, lambda second: price * second
        )
    return evidence


def latency_percentiles(settings: Benchmark) -> dict[str, float]:
    """Return what is given of one call's time: metric -> percentile."""
    return {**LATENCY_PERCENTILES, "latency_percentile": settings.latency_percentile}
