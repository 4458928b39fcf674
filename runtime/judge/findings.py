"""Hold what is judged, and the report as a record: what was measured of both models, what the gates say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime.bundle.manifest import Manifest
from runtime.judge.evidence import Evidence
from runtime.judge.gates import GateResult, Verdict
from runtime.judge.stats import Estimate
from runtime.metrics import MEASURED, METRICS, Metric, Outputs
from runtime.metrics.measured import END_TO_END_PERCENTILES, LATENCY_PERCENTILES
from runtime.report.passes import PassTable

FORMAT_VERSION = 1
Interval = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """A bundle that has been read and found fit to be judged, and how to judge it."""

    root: Path
    manifest: Manifest
    columns: Mapping[str, Any]
    baseline: Outputs
    metrics: Sequence[Metric]
    backend: str
    others: Sequence[str]
    threads: int | None
    notes: Sequence[str]
    elsewhere: str = ""
    """Why speed and memory are not judged here; "": they are."""

    @property
    def labels(self) -> Any | None:
        """Return the labels, int64 [N] or float [N]; None without labels."""
        return self.columns.get("label")

    @property
    def is_checkpoint(self) -> bool:
        """Return whether the candidate is a checkpoint, which is not run here."""
        return self.manifest.candidate_for(self.backend).kind == "checkpoint"


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
    further: dict[str, float] = field(default_factory=dict)
    """latency_percentile, end_to_end_p50, end_to_end_p95 (ms), cost_per_million (of others than decoders) and energy
    (J), as far as they were measured."""


@dataclass(frozen=True)
class Findings:
    """One judgement of one bundle on one machine. `verdict` is "unjudged" for a benchmark alone."""

    verdict: Verdict | Literal["unjudged"]
    bundle: str
    backend: str
    """Where both models ran; "torch" for a checkpoint, which was scored when it was built."""
    baseline: Side
    candidate: Side
    manifest_digest: str = ""
    target: str = ""
    """What the bundle was made for."""
    scored_by: str = ""
    """What measured the quality at the build of a candidate that nothing here runs; "": the backend did, here."""
    task: str = ""
    n_samples: int = 0
    confidence: float = 0.95
    ratios: dict[str, float] = field(default_factory=dict)
    """How many times better the candidate is: size, latency_*, throughput, load_time, peak_memory."""
    ratio_intervals: dict[str, Interval] = field(default_factory=dict)
    """Of those `ratios` that are of paired measurements; none of what is exact."""
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
    """`runtime.measure.environment.environment`'s."""
    benchmark: dict[str, Any] = field(default_factory=dict)
    """The settings as they were followed, and "rounds": how many were timed."""
    steps: PassTable | None = None
    """What each pass of the build cost and gave; None where that was not measured."""
    format_version: int = FORMAT_VERSION

    @property
    def exit_code(self) -> int:
        """Return 0 if every gate holds, 3 if one does not."""
        return 3 if self.verdict in ("fail", "undecided") else 0


MEASURED_FIELDS = {
    "throughput": "throughput_per_s",
    "throughput_under_latency": "throughput_under_latency_per_s",
    "size": "size_bytes",
    "load_time": "load_ms",
    "peak_memory": "peak_memory_bytes",
}


COST = "cost_per_million"
OF_DECODERS = (*(name for name, metric in MEASURED.items() if metric.generates), COST)
"""The measured metrics that stand under `Side.generation`."""
FURTHER = ("latency_percentile", *END_TO_END_PERCENTILES, COST, "energy")
"""Those that stand under `Side.further`."""


def side(evidence: Mapping[str, Evidence], which: Literal["baseline", "candidate"], batch_size: int | None) -> Side:
    """Return one side's part of the evidence."""
    estimates: dict[str, Estimate] = {
        name: estimate for name, e in evidence.items() if (estimate := getattr(e, which)) is not None
    }
    generates = "tpot" in evidence
    measured = {MEASURED_FIELDS[name]: estimates[name].value for name in MEASURED_FIELDS if name in estimates}
    return Side(
        metrics={name: e.value for name, e in estimates.items() if name in METRICS},
        intervals={name: (e.low, e.high) for name, e in estimates.items() if e.method != "exact"},
        latency_ms={n.removeprefix("latency_"): e.value for n, e in estimates.items() if n in LATENCY_PERCENTILES},
        throughput_batch_size=batch_size if "throughput" in estimates else None,
        generation={name: e.value for name, e in estimates.items() if generates and name in OF_DECODERS},
        further={n: e.value for n, e in estimates.items() if n in FURTHER and not (generates and n in OF_DECODERS)},
        **measured,  # type: ignore[arg-type]
    )


def ratios(evidence: Mapping[str, Evidence]) -> dict[str, float]:
    """Return, by metric, how many times better the candidate is (faster, smaller), where both sides were measured."""
    factors = {}
    for name in MEASURED:
        if name not in evidence or (before := evidence[name].baseline) is None:
            continue
        after, speedup = evidence[name].candidate, evidence[name].speedup
        if speedup is not None:
            factors[name] = speedup.value
            continue
        part, whole = (after, before) if MEASURED[name].higher_is_better else (before, after)
        if whole.value > 0:
            factors[name] = part.value / whole.value
    return factors


def ratio_intervals(evidence: Mapping[str, Evidence]) -> dict[str, Interval]:
    """Return, by metric, the interval of how many times faster the candidate is, where its ratio is not exact."""
    speedups = {name: e.speedup for name, e in evidence.items() if name in MEASURED}
    return {name: (s.low, s.high) for name, s in speedups.items() if s is not None and s.method != "exact"}


def differences(evidence: Mapping[str, Evidence]) -> dict[str, dict[str, Any]]:
    """Return, by quality metric, candidate minus baseline, with interval and the method that made it."""
    return {
        name: {
            "value": e.difference.value,
            "interval": (e.difference.low, e.difference.high),
            "method": e.difference.method,
        }
        for name, e in evidence.items()
        if name in METRICS and e.difference is not None and e.baseline is not None
    }
