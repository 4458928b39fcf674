"""The names of what is measured by running or weighing a model: speed, memory, size. Gates use them like metrics."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_RATIO = 1e-3
"""Of a speed-up, a share that is retained, and of sizes: no model is a thousand times worse and still gated."""
MEASURED_RANGES = {
    "ms": (1e-6, 8.64e7),
    "1/s": (1e-6, 1e12),
    "tokens/s": (1e-6, 1e12),
    "J": (1e-9, 1e12),
    "bytes": (1.0, 2.0**60),
    "price": (1e-12, 1e12),
    "x": (LEAST_RATIO, 1 / LEAST_RATIO),
}
"""Unit -> the least and the largest value that anything measured has: a call takes a nanosecond to a day."""


@dataclass(frozen=True)
class MeasuredMetric:
    """A quantity of the artifact or of its run. `speed` says whether `min_speedup` applies to it."""

    name: str
    higher_is_better: bool
    unit: str
    speed: bool
    about: str
    of_decoders: bool | None = None
    """Whether it is of models that generate text alone, or of all others alone; None: of any."""
    of_prompts: bool = False
    """Whether it counts the tokens of a prompt, which only a text has."""

    @property
    def extremes(self) -> tuple[float, float]:
        """Return the least and the largest value that it can have."""
        return MEASURED_RANGES[self.unit]

    def suits(self, decodes: bool, reads_prompts: bool) -> bool:
        """Return whether models have it that generate text or do not, and read prompts or do not."""
        return self.of_decoders in (None, decodes) and (reads_prompts or not self.of_prompts)


LATENCY_PERCENTILES = {"latency_p50": 50, "latency_p90": 90, "latency_p95": 95, "latency_p99": 99}

_LATENCIES = tuple(
    MeasuredMetric(
        name,
        False,
        "ms",
        True,
        f"{percentile}th percentile of one call's time (text-generation: of one decoding step) at benchmark.batch_size",
    )
    for name, percentile in LATENCY_PERCENTILES.items()
)
END_TO_END_PERCENTILES = {"end_to_end_p50": 50, "end_to_end_p95": 95}
_END_TO_END = tuple(
    MeasuredMetric(
        name,
        False,
        "ms",
        True,
        f"{percentile}th percentile of a whole answer's time at benchmark.batch_size: bytes to pixels or text to "
        "tokens, the call, outputs to answers",
        False,
    )
    for name, percentile in END_TO_END_PERCENTILES.items()
)

ITL_PERCENTILES = {"itl_p50": 50, "itl_p95": 95, "itl_p99": 99}
_REQUEST = "at benchmark.batch_size, prompt_tokens and new_tokens"
_GENERATION = (
    MeasuredMetric("ttft", False, "ms", True, f"time to the first token: a prompt read, median {_REQUEST}", True),
    MeasuredMetric(
        "tpot", False, "ms", True, f"time for each further token: a request's mean, median {_REQUEST}", True
    ),
    *(
        MeasuredMetric(
            name, False, "ms", True, f"{percentile}th percentile of the time between tokens {_REQUEST}", True
        )
        for name, percentile in ITL_PERCENTILES.items()
    ),
    MeasuredMetric(
        "prefill_rate", True, "tokens/s", True, f"prompt tokens read in a second {_REQUEST}", True, of_prompts=True
    ),
    MeasuredMetric("decode_rate", True, "tokens/s", True, f"further tokens made in a second {_REQUEST}", True),
    MeasuredMetric(
        "goodput",
        True,
        "1/s",
        True,
        "requests per second at the largest power-of-two batch whose benchmark.latency_percentile keeps ttft_limit_ms "
        "and tpot_limit_ms",
        True,
    ),
)

SIZES = ("size", "size_ratio")
"""What is weighed, not run."""
MEASURED: dict[str, MeasuredMetric] = {
    metric.name: metric
    for metric in (
        *_LATENCIES,
        MeasuredMetric(
            "latency_percentile", False, "ms", True, "percentile benchmark.latency_percentile of one call's time"
        ),
        *_END_TO_END,
        MeasuredMetric("throughput", True, "1/s", True, "samples per second at benchmark.throughput_batch_size", False),
        MeasuredMetric(
            "throughput_under_latency",
            True,
            "1/s",
            True,
            "samples per second at the largest power-of-two batch whose benchmark.latency_percentile is within "
            "latency_limit_ms",
            False,
        ),
        *_GENERATION,
        MeasuredMetric(
            "cost_per_million",
            False,
            "price",
            True,
            "at benchmark.price_per_hour, of a million samples at throughput_batch_size; text-generation: of a million "
            "generated tokens, their prompts' time included",
        ),
        MeasuredMetric(
            "energy",
            False,
            "J",
            False,
            "of a thousand samples at benchmark.throughput_batch_size (text-generation: generated tokens), by the "
            "counters of all processors or of the GPU",
        ),
        MeasuredMetric("peak_memory", False, "bytes", False, "peak resident memory above the bare runtime's"),
        MeasuredMetric("load_time", False, "ms", True, "time to open the model in a fresh process"),
        MeasuredMetric("size", False, "bytes", False, "model file with its external data, or a checkpoint's tensors"),
        MeasuredMetric("size_ratio", True, "x", False, "baseline's size over the candidate's"),
    )
}
