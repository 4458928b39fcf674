"""The table of a build's passes: made of what was measured of their models, kept, and read again.

`report.steps.json` is written by the validation that ends a build, while the models between the passes are still there.
Later validations show it as it is. Like the reports it is in no manifest, because times differ from run to run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.bundle.columns import Array
from runtime.bundle.files import put_in_place
from runtime.bundle.format import canonical_json
from runtime.bundle.manifest import KvCacheSpec, Manifest
from runtime.bundle.records import from_json
from runtime.errors import BundleError
from runtime.judge.evidence import quality_evidence
from runtime.judge.findings import Case, Change, Findings, PassRow, PassTable, Side
from runtime.measure.benchmark import BenchmarkResult
from runtime.metrics import NonFiniteOutputs, Outputs, check_finite
from runtime.tasks import find_task
from runtime.tasks.metrics import METRICS

PASSES_FILE, FLOAT = "report.steps.json", "float"


@dataclass(frozen=True)
class PassModel:
    """What a build hands to the judge of one pass: a model that is measured beside the bundle's own and not kept.

    The last pass's model is the candidate, so that it has no `path`. Neither has one that could not be made: `error`
    says why. `outputs`: over the frozen samples, as `runtime.tasks.predict.run_samples` gives them (beside the
    baseline).
    """

    name: str
    seconds: float
    path: Path | None = None
    size_bytes: int | None = None
    cache: KvCacheSpec | None = None
    outputs: dict[str, Array] | None = None
    error: str = ""
    peak_memory_bytes: int | None = None


def write_pass_table(table: PassTable, root: Path) -> None:
    """Write `report.steps.json` into the bundle in `root`, whole or not at all."""
    draft = root / f"{PASSES_FILE}.{os.getpid()}.tmp"
    try:
        draft.write_bytes(canonical_json(table))
        put_in_place(draft, root / PASSES_FILE)
    finally:
        draft.unlink(missing_ok=True)


def read_pass_table(root: Path, manifest: Manifest) -> PassTable | None:
    """Read what the build recorded, or None; BundleError where the file is damaged or of another bundle."""
    file = root / PASSES_FILE
    if not file.is_file():
        return None
    try:
        table = from_json(PassTable, json.loads(file.read_bytes()), "steps")
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: {error}; remove it, and the bundle is judged without it") from error
    if table.manifest_digest != manifest.digest:
        raise BundleError(f"{file}: is of another bundle; remove it, and this one is judged without it")
    return replace(table, recorded=True)


def make_pass_table(
    case: Case, models: Sequence[PassModel], candidate: Outputs, timed: BenchmarkResult | None, report: Findings
) -> PassTable:
    """Return a row for the float model and one for each pass; both ends are the report's own numbers.

    `models`: at least one, the last being the candidate, whose outputs over the frozen samples are `candidate`.
    `timed`: with the models that have a path, in their order, first beside the judged ones; None where nothing was run.
    """
    latency = find_task(case.manifest.task).latency
    rows, before = [_fill_from_side(PassRow(FLOAT), report.baseline, latency)], case.baseline
    for row, outputs in _measure_passes(case, models, candidate, timed, report, latency):
        previous = next((earlier for earlier in reversed(rows) if earlier.metrics), rows[0])
        rows.append(replace(row, changes=_compute_changes(case, row, outputs, previous, before)))
        before = outputs if outputs is not None and row.metrics else before
    return PassTable(
        rows=tuple(rows),
        latency=latency,
        shown=choose_metrics(report),
        cpu=str(report.environment.get("cpu", "")),
        manifest_digest=report.manifest_digest,
    )


def choose_metrics(report: Findings) -> tuple[str, ...]:
    """Return the quality metrics that the gates are about; where none is, the first that was measured."""
    measured = [name for name in METRICS if name in report.candidate.metrics]  # of recorded ones no pass is known
    gated = {gate.metric for gate in report.gates}
    return tuple(name for name in measured if name in gated) or tuple(measured[:1])


def _measure_passes(
    case: Case,
    models: Sequence[PassModel],
    candidate: Outputs,
    timed: BenchmarkResult | None,
    report: Findings,
    latency: str,
) -> Iterator[tuple[PassRow, Outputs | None]]:
    """Yield each pass's row, still without its changes, and the outputs that it was measured on."""
    latencies = iter(timed.beside_ms if timed is not None else ())
    for model in models[:-1]:
        memory = model.peak_memory_bytes
        row = PassRow(model.name, model.seconds, model.size_bytes, error=model.error, peak_memory_bytes=memory)
        if timed is not None and model.path is not None:
            row = _add_times(row, next(latencies), report.baseline, latency)
        yield _add_scores(row, model.outputs, case), model.outputs
    *_, model = models
    row = PassRow(model.name, model.seconds, peak_memory_bytes=model.peak_memory_bytes)
    last, faster = _fill_from_side(row, report.candidate, latency), report.ratios.get(latency)
    error = "" if report.candidate.metrics else next(iter(report.advice), "")
    yield replace(last, smaller=report.ratios.get("size"), faster=faster, error=error), candidate


def _fill_from_side(row: PassRow, side: Side, latency: str) -> PassRow:
    """Return the row with what the report has measured of a side."""
    ms = side.generation.get("tpot") if latency == "tpot" else side.latency_ms.get("p50")
    metrics = {name: _finite_or_none(value) for name, value in side.metrics.items()}
    return replace(row, size_bytes=side.size_bytes, metrics=metrics, latency_ms=ms)


def _add_times(row: PassRow, ms: float | None, baseline: Side, latency: str) -> PassRow:
    """Return the row with its times: milliseconds from rounds that it took in turn with the baseline."""
    smaller = baseline.size_bytes / row.size_bytes if baseline.size_bytes and row.size_bytes else None
    base = baseline.generation.get("tpot") if latency == "tpot" else baseline.latency_ms.get("p50")
    faster = base / ms if base and ms else None
    return replace(row, smaller=smaller, latency_ms=ms, faster=faster)


def _add_scores(row: PassRow, outputs: Outputs | None, case: Case) -> PassRow:
    if outputs is None:
        return row
    try:
        check_finite(outputs)
    except NonFiniteOutputs as error:
        return replace(row, error=f"its outputs are broken: {error}")
    references = {"labels": case.labels, "baseline": case.baseline, "texts": None}
    metrics = {
        metric.name: _finite_or_none(metric.compute(outputs, references[metric.against])) for metric in case.metrics
    }
    return replace(row, metrics=metrics)


def _compute_changes(
    case: Case, row: PassRow, outputs: Outputs | None, previous: PassRow, before: Outputs
) -> dict[str, Change]:
    """Return the changes by metric since the last pass that was measured.

    They have an interval where both rows are held against the truth.
    """
    changes = {
        name: Change(value - then)
        for name, value in row.metrics.items()
        if value is not None and (then := previous.metrics.get(name)) is not None
    }
    paired = [metric for metric in case.metrics if metric.against != "baseline" and metric.name in changes]
    if outputs is None or not paired:
        return changes
    evidence = quality_evidence(paired, outputs, before, case.labels, case.manifest.judgement, None, case.draws)
    for name, metric_evidence in evidence.items():
        if (difference := metric_evidence.difference) is not None:
            low, high = difference.low, difference.high
            changes[name] = Change(difference.value, (low, high) if math.isfinite(high - low) else None)
    return changes


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
