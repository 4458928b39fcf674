"""Hold what is judged, and the report as a record: what was measured of both models, what the gates say of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runtime.bundle.columns import Array
from runtime.bundle.manifest import Manifest
from runtime.judge.changes import Changes, Confusion
from runtime.judge.copies import Draws
from runtime.judge.evidence import Evidence, SliceEvidence
from runtime.judge.gates import GateResult, Verdict
from runtime.judge.samples import EvaluatedOn, KeptSamples
from runtime.judge.slices import Groups
from runtime.judge.why import Explanation
from runtime.metrics import MEASURED, Metric, Outputs
from runtime.metrics.measured import END_TO_END_PERCENTILES, LATENCY_PERCENTILES
from runtime.stats import Estimate
from runtime.tasks.metrics import METRICS

FORMAT_VERSION = 1
WIDE = 0.5
"""Width of the interval of a fraction beyond which a slice may be anything."""
Interval = tuple[float, float]
DifferenceVerdict = Literal["better", "worse", "within noise", "not known"]


@dataclass(frozen=True)
class Case:
    """A bundle that has been read and found fit to be judged, and how to judge it."""

    root: Path
    manifest: Manifest
    columns: Mapping[str, Any]
    baseline: Outputs
    layers: Sequence[Mapping[str, Any]]
    """What the build wrote about each layer, and its notes."""
    metrics: Sequence[Metric]
    backend: str
    others: Sequence[str]
    threads: int | None
    notes: Sequence[str]
    elsewhere: str = ""
    """Why speed and memory are not judged here; "": they are."""
    groups: Groups = field(default_factory=dict)
    """The slices of the evaluation set."""
    recorded: Sequence[tuple[Array, Array]] = ()
    """What each of the recipe's own metrics gave at the build, (baseline, candidate)."""
    draws: Draws | None = None
    """Which samples are copies of one another; None: not looked."""
    outputs: Outputs | None = None
    """What the candidate gave on the samples, where the build that judges it has just run it; None: it is run."""

    @property
    def labels(self) -> Any | None:
        """Return the labels, int64 [N] or float [N]; None without labels."""
        return self.columns.get("label")

    @property
    def alone(self) -> bool:
        """Return whether there is no baseline to run beside the candidate."""
        return self.manifest.alone

    @property
    def is_scored(self) -> bool:
        """Return whether the candidate is not run here, and its quality what was measured at the build."""
        return self.manifest.is_scored(self.backend)


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
class SliceValue:
    """A metric on one slice. The intervals hold for all slices of the column at once (Bonferroni)."""

    n: int
    """Samples."""
    candidate: float
    interval: Interval
    baseline: float | None = None
    difference: float | None = None
    """Candidate minus baseline, or minus the ideal."""
    difference_interval: Interval | None = None
    too_few: bool = False
    """Whether so little is known that the slice may be anything."""


@dataclass(frozen=True)
class MetricSlices:
    """A metric on each slice of a column."""

    column: str
    metric: str
    higher_is_better: bool
    worst: str
    """The value whose slice is the worst for the candidate."""
    may_be_chance: bool
    """Whether the worst slice's interval holds the value of all samples, so that being the worst may be chance."""
    lost_most: str
    """The value whose slice lost most against the baseline; "" where none lost."""
    values: dict[str, SliceValue]
    """By the value that the column has."""


@dataclass(frozen=True)
class Change:
    """A metric's value minus that of the pass before, paired by sample where its interval is known."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class PassRow:
    """What was measured after one pass; None and nothing for what was not."""

    name: str
    """"float" for the model as it came, then each pass's."""
    seconds: float | None = None
    """Seconds that the pass took when it was done: of a run that was broken off, its last part."""
    size_bytes: int | None = None
    smaller: float | None = None
    """How many times smaller than the float model."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """None where a value is infinite."""
    changes: dict[str, Change] = field(default_factory=dict)
    """Metric -> change since the last row before that was measured."""
    latency_ms: float | None = None
    faster: float | None = None
    """How many times faster than the float model: the median of the rounds' own ratios."""
    error: str = ""
    """Why nothing, or not all, was measured."""
    peak_memory_bytes: int | None = None
    """The most memory that the process held while the pass worked."""


@dataclass(frozen=True)
class PassTable:
    """The float model, and what each pass made of it; the last row is the candidate."""

    rows: tuple[PassRow, ...]
    latency: str
    """The metric that `latency_ms` is: latency_p50, or of a decoder tpot."""
    shown: tuple[str, ...]
    """The metrics that the gates are about, or the first: what a narrow table has room for."""
    cpu: str
    """Where it was measured."""
    manifest_digest: str
    recorded: bool = False
    """True where it is not of this validation, but of the one that ended the build."""


@dataclass(frozen=True)
class Difference:
    """One metric of two candidates. `change` is after minus before or, of speed, how many times as fast after is.

    The values of speed are each candidate's speed-up over its own baseline.
    """

    metric: str
    unit: str
    higher_is_better: bool
    scale: Literal["difference", "ratio"]
    before: float
    after: float
    change: Estimate
    verdict: DifferenceVerdict
    remark: str = ""
    """What the interval does not say: that it is not paired, that machines differ, what is missing."""


@dataclass(frozen=True)
class Comparison:
    """What is known of the differences of one bundle from another, all intervals holding at once."""

    before: str
    after: str
    confidence: float
    """Of all intervals together."""
    n_intervals: int
    """Those of the other bundles of the same comparison included."""
    differences: tuple[Difference, ...]
    not_compared: dict[str, str]
    """Metric -> why."""
    notes: tuple[str, ...] = ()

    def find(self, verdict: DifferenceVerdict) -> list[Difference]:
        """Return the differences with a verdict."""
        return [difference for difference in self.differences if difference.verdict == verdict]


@dataclass(frozen=True)
class SliceDifference:
    """One metric of two candidates on the `n` samples whose `column` is `value`."""

    column: str
    value: str
    n: int
    difference: Difference


@dataclass(frozen=True)
class SliceComparison:
    """What is known of the slices of one bundle against another; `not_compared`: "metric by column" -> why."""

    confidence: float
    """Of all intervals together."""
    slices: tuple[SliceDifference, ...] = ()
    not_compared: Mapping[str, str] | None = None

    def find(self, verdict: DifferenceVerdict) -> list[SliceDifference]:
        """Return the slices with a verdict."""
        return [found for found in self.slices if found.difference.verdict == verdict]


@dataclass(frozen=True)
class Findings:
    """One judgement of one bundle on one machine. `verdict` is "unjudged" without gates, and for a benchmark alone."""

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
    slices: tuple[MetricSlices, ...] = ()
    """Each quality metric on each slice, column by column."""
    recorded: tuple[str, ...] = ()
    """Metrics that were computed when the bundle was built, by code that is not in it."""
    confusion: Confusion | None = None
    """Which class is taken for which; None where no single class is chosen."""
    changes: Changes | None = None
    """The samples whose answers changed most; None where the candidate's outputs are broken."""
    distributions: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    """latency, end_to_end, of a decoder ttft and itl -> "baseline", "candidate" -> ms at 0 %, 1 %, ... 100 % of all
    calls (answers, requests, tokens), the fastest first."""
    gates: tuple[GateResult, ...] = ()
    layers: tuple[Any, ...] = ()
    """The bundle's layers.json."""
    backends: tuple[dict[str, Any], ...] = ()
    """`alternatives.Row`s."""
    advice: tuple[str, ...] = ()
    """Sentences, the most important first."""
    environment: dict[str, Any] = field(default_factory=dict)
    """`runtime.clock.machine.environment`'s."""
    benchmark: dict[str, Any] = field(default_factory=dict)
    """The settings as they were followed, "processes": how many timed, "taken": the share of the time that other work
    had the processor, and "set_apart": rounds that it disturbed."""
    explanation: Explanation | None = None
    """Where the time of both models' calls goes, and why the candidate is not faster; None where it is, or where
    nothing was profiled."""
    steps: PassTable | None = None
    """What each pass of the build cost and gave; None where that was not measured."""
    evaluation: EvaluatedOn | None = None
    """What quality was measured on, and against."""
    per_sample: KeptSamples | None = None
    """What report.samples.npz beside the report holds; None where no quality was measured."""
    since: Comparison | None = None
    """The differences from an earlier report, of what counts; None where none was given."""
    format_version: int = FORMAT_VERSION

    @property
    def exit_code(self) -> int:
        """Return 3 if a gate does not hold, else 0."""
        return 3 if self.verdict in ("fail", "undecided") else 0


MEASURED_FIELDS = {
    "throughput": "throughput_per_s",
    "throughput_under_latency": "throughput_under_latency_per_s",
    "size": "size_bytes",
    "load_time": "load_ms",
    "peak_memory": "peak_memory_bytes",
}


COST = "cost_per_million"
OF_DECODERS = (*(name for name, metric in MEASURED.items() if metric.of_decoders), COST)
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
        metrics={name: e.value for name, e in estimates.items() if name not in MEASURED},
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
        if name not in MEASURED and e.difference is not None and e.baseline is not None
    }


def order_metrics(names: Iterable[str]) -> list[str]:
    """Return the names of quality metrics as tables show them: those of `METRICS` in its order, then the others."""
    given = list(names)
    known = [name for name in METRICS if name in given]
    return [*known, *(name for name in given if name not in known)]


def tabulate_slices(evidence: Mapping[str, Evidence]) -> tuple[MetricSlices, ...]:
    """Return each metric on each slice, by column in the order of the judgement."""
    columns = list(dict.fromkeys(column for e in evidence.values() for column in e.slices))
    return tuple(
        _tabulate_metric(column, evidence[name])
        for column in columns
        for name in order_metrics(evidence)
        if column in evidence[name].slices
    )


def _tabulate_metric(column: str, whole: Evidence) -> MetricSlices:
    slices, sign = whole.slices[column], 1.0 if whole.higher_is_better else -1.0
    worst = min(slices, key=lambda part: order_worst_first(sign * part.at_once.candidate.value))
    drops = {part.value: d.value for part in slices if (d := part.at_once.difference) is not None}
    lost = min(drops, key=lambda value: order_worst_first(sign * drops[value]), default="")
    low, high = worst.at_once.candidate.low, worst.at_once.candidate.high
    return MetricSlices(
        column=column,
        metric=whole.name,
        higher_is_better=whole.higher_is_better,
        worst=worst.value,
        may_be_chance=low <= whole.candidate.value <= high,
        lost_most=lost if lost and sign * drops[lost] < 0 else "",
        values={part.value: _describe_slice(part) for part in slices},
    )


def order_worst_first(goodness: float) -> float:
    """Return the key that sorts slices from the worst on; one without a value comes last."""
    return goodness if math.isfinite(goodness) else math.inf


def _describe_slice(part: SliceEvidence) -> SliceValue:
    known = part.at_once
    after, change = known.candidate, known.difference
    wide = known.unit == "fraction" and after.high - after.low > WIDE
    return SliceValue(
        n=known.n,
        candidate=after.value,
        interval=(after.low, after.high),
        baseline=known.baseline.value if known.baseline else None,
        difference=change.value if change else None,
        difference_interval=(change.low, change.high) if change else None,
        too_few=wide or not (math.isfinite(after.low) and math.isfinite(after.high)),
    )
