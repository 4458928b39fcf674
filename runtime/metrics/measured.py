"""The names of what is measured by running or weighing a model: speed, memory, size. Gates use them like metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredMetric:
    """A quantity of the artifact or of its run. `speed` says whether `min_speedup` applies to it."""

    name: str
    higher_is_better: bool
    unit: str
    speed: bool
    about: str


LATENCY_PERCENTILES = {"latency_p50": 50, "latency_p90": 90, "latency_p95": 95, "latency_p99": 99}

_LATENCIES = tuple(
    MeasuredMetric(name, False, "ms", True, f"{percentile}th percentile of one call's time at benchmark.batch_size")
    for name, percentile in LATENCY_PERCENTILES.items()
)

MEASURED: dict[str, MeasuredMetric] = {
    metric.name: metric
    for metric in (
        *_LATENCIES,
        MeasuredMetric("throughput", True, "1/s", True, "samples per second at benchmark.throughput_batch_size"),
        MeasuredMetric(
            "throughput_under_latency",
            True,
            "1/s",
            True,
            "samples per second at the largest power-of-two batch whose p95 keeps benchmark.latency_limit_ms",
        ),
        MeasuredMetric("peak_memory", False, "bytes", False, "peak resident memory above the bare runtime's"),
        MeasuredMetric("load_time", False, "ms", True, "time to open the model in a fresh process"),
        MeasuredMetric("size", False, "bytes", False, "model file with its external data"),
        MeasuredMetric("size_ratio", True, "x", False, "baseline's size over the candidate's"),
    )
}
