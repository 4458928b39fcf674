"""The report as a record: what was measured of both models, and what the gates say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.evidence import Evidence
from runtime.gates import GateResult, Verdict
from runtime.manifest import GENERATION
from runtime.metrics import MEASURED, METRICS
from runtime.stats import Estimate
from runtime.steps import StepTable

FORMAT_VERSION = 1
Interval = tuple[float, float]


@dataclass(frozen=True)
class Side:
    """What was measured of one model; None for what was not."""

    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    """Of `metrics` and of the measured quantities, by metric name; none for what is exact."""
    latency_ms: dict[str, float] = field(default_factory=dict)
    """p50, p90, p95, p99 of one call at benchmark.batch_size."""
    throughput_per_s: float | None = None
    throughput_batch_size: int | None = None
    throughput_under_latency_per_s: float | None = None
    size_bytes: int | None = None
    load_ms: float | None = None
    peak_memory_bytes: float | None = None
    generation: dict[str, float] = field(default_factory=dict)
    """Of a decoder: ttft, tpot, itl_p50, itl_p95, itl_p99 (ms), prefill_rate, decode_rate (tokens/s), goodput (1/s)
    and cost_per_million, as far as they were measured."""


@dataclass(frozen=True)
class Report:
    """One judgement of one bundle on one machine. `verdict` is "unjudged" for a benchmark alone."""

    verdict: Verdict | Literal["unjudged"]
    bundle: str
    backend: str
    baseline: Side
    candidate: Side
    manifest_digest: str = ""
    task: str = ""
    n_samples: int = 0
    confidence: float = 0.95
    ratios: dict[str, float] = field(default_factory=dict)
    """How many times better the candidate is: size, latency_*, throughput, load_time, peak_memory."""
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metric -> {"value", "interval", "method"} of candidate minus baseline."""
    gates: tuple[GateResult, ...] = ()
    layers: tuple[Any, ...] = ()
    """The bundle's layers.json."""
    backends: tuple[dict[str, Any], ...] = ()
    """`alternatives.Row`s."""
    advice: tuple[str, ...] = ()
    """Sentences, the most important first."""
    environment: dict[str, Any] = field(default_factory=dict)
    """`runtime.environment.environment`'s."""
    benchmark: dict[str, Any] = field(default_factory=dict)
    """The settings as they were followed, and "rounds": how many were timed."""
    steps: StepTable | None = None
    """What each step of the build cost and gave; None where that was not measured."""
    format_version: int = FORMAT_VERSION

    @property
    def exit_code(self) -> int:
        """0 if every gate holds, 3 if one does not."""
        return 3 if self.verdict in ("fail", "undecided") else 0

    def _repr_html_(self) -> str:
        from runtime.report_html import report_html  # it shows the tables of `report`, which imports this

        return report_html(self)


MEASURED_FIELDS = {
    "throughput": "throughput_per_s",
    "throughput_under_latency": "throughput_under_latency_per_s",
    "size": "size_bytes",
    "load_time": "load_ms",
    "peak_memory": "peak_memory_bytes",
}


OF_DECODERS = tuple(name for name, metric in MEASURED.items() if metric.tasks == GENERATION)
"""The measured metrics that only a decoder has."""


def side(evidence: Mapping[str, Evidence], which: Literal["baseline", "candidate"], batch_size: int | None) -> Side:
    """One side's part of the evidence."""
    estimates: dict[str, Estimate] = {
        name: estimate for name, e in evidence.items() if (estimate := getattr(e, which)) is not None
    }
    measured = {MEASURED_FIELDS[name]: estimates[name].value for name in MEASURED_FIELDS if name in estimates}
    return Side(
        metrics={name: e.value for name, e in estimates.items() if name in METRICS},
        intervals={name: (e.low, e.high) for name, e in estimates.items() if e.method != "exact"},
        latency_ms={n.removeprefix("latency_"): e.value for n, e in estimates.items() if n.startswith("latency_")},
        throughput_batch_size=batch_size if "throughput" in estimates else None,
        generation={name: e.value for name, e in estimates.items() if name in OF_DECODERS},
        **measured,  # type: ignore[arg-type]
    )


def ratios(evidence: Mapping[str, Evidence]) -> dict[str, float]:
    """Metric -> how many times better the candidate is (faster, smaller), where both sides were measured."""
    found = {}
    for name in MEASURED:
        if name not in evidence or (before := evidence[name].baseline) is None:
            continue
        after, speedup = evidence[name].candidate, evidence[name].speedup
        if speedup is not None:
            found[name] = speedup.value
            continue
        part, whole = (after, before) if MEASURED[name].higher_is_better else (before, after)
        if whole.value > 0:
            found[name] = part.value / whole.value
    return found


def differences(evidence: Mapping[str, Evidence]) -> dict[str, dict[str, Any]]:
    """Quality metric -> candidate minus baseline, with interval and the method that made it."""
    return {
        name: {
            "value": e.difference.value,
            "interval": (e.difference.low, e.difference.high),
            "method": e.difference.method,
        }
        for name, e in evidence.items()
        if name in METRICS and e.difference is not None and e.baseline is not None
    }
