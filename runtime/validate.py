"""Judge a bundle on this machine: is it intact, good enough, fast enough? Writes report.json, .md and .xml into it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.advice import advise
from runtime.alternatives import available_others, compare, only_main
from runtime.benchmark import (
    BenchmarkResult,
    choose_backend,
    measure,
    opened,
    pair,
    settings_for,
    speed_evidence,
)
from runtime.bundle import Manifest, inside, read_outputs, read_samples, verify
from runtime.errors import BundleError
from runtime.evidence import Evidence, quality_evidence, select_metrics
from runtime.findings import Report, differences, ratios, side
from runtime.gates import check_gates, judge, overall
from runtime.metrics import METRICS, Metric, NonFiniteOutputs, Outputs, check_finite
from runtime.onnx_graph import graph_facts
from runtime.predict import bundle_preprocessor, run_samples
from runtime.report import remove_report, write_report


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

    @property
    def labels(self) -> Any | None:
        """int64 [N] or float [N]; None without labels."""
        return self.columns.get("label")


def validate(path: str | Path, backends: Sequence[str] | None = None, threads: int | None = None) -> Report:
    """Verify the bundle, run it on its frozen samples, time it, decide its gates, and write the report into it.

    `backends`: the first is the one that is judged, the others are compared; by default the bundle's target, compared
    with all that work here. `threads` replaces the benchmark's. A candidate that gives NaN or infinity gets the verdict
    "fail". Raises BundleError (not intact), UsageError (a gate that cannot be judged, labels out of range),
    RuntimeFailure.
    """
    case = prepare(Path(path), backends, threads)
    remove_report(case.root)
    evidence, failures = quality(case)
    timed = measure(case.root, case.manifest, case.columns, case.backend, threads)
    evidence |= speed_evidence(timed, case.manifest.judgement)
    rows = other_ways(case, timed)
    graph = graph_facts(inside(case.root, case.manifest.candidate_for(case.backend).path))
    advice = [*list(failures.values())[:1], *advise(evidence, case.backend, timed.environment, graph, rows, case.notes)]
    report = assemble(case, timed, evidence, failures, rows, advice)
    write_report(report, case.root)
    return report


def prepare(root: Path, backends: Sequence[str] | None, threads: int | None) -> Case:
    """Read the bundle and refuse what cannot be judged, before any model runs; errors as `validate` says."""
    manifest = verify(root)
    columns, baseline = read_samples(root, manifest), read_outputs(root, manifest)
    labels = columns.get("label")
    check_gates(manifest.judgement, manifest.task, labels is not None)
    _, batch_note = settings_for(manifest, threads)
    main, backend_note = choose_backend(manifest.target, backends[0] if backends else None)
    others = [choose_backend(manifest.target, name)[0] for name in backends[1:]] if backends else available_others(main)
    pair(manifest, main)
    try:
        metrics = select_metrics(manifest.task, baseline, labels, manifest.judgement)
    except NonFiniteOutputs as error:
        raise BundleError(f"{root}: the baseline cannot be compared with: {error}") from error
    notes = [*build_notes(root, manifest), *(note for note in (backend_note, batch_note) if note)]
    return Case(root, manifest, columns, baseline, metrics, main, others, threads, notes)


def quality(case: Case) -> tuple[dict[str, Evidence], dict[str, str]]:
    """Evidence of the quality metrics or, where the candidate's outputs are broken, why there is none."""
    candidate = run_candidate(case)
    try:
        check_finite(candidate)
        judgement = case.manifest.judgement
        return quality_evidence(case.metrics, candidate, case.baseline, case.labels, judgement), {}
    except NonFiniteOutputs as error:
        return {}, dict.fromkeys(METRICS, f"The candidate's outputs are broken: {error}.")


def run_candidate(case: Case) -> Outputs:
    """The candidate's outputs over the frozen samples."""
    manifest = case.manifest
    with ExitStack() as stack:
        _, variant = pair(manifest, case.backend)
        session = opened(stack, case.root, variant, case.threads or manifest.judgement.benchmark.threads)
        preprocessor = bundle_preprocessor(case.root, manifest, session.inputs)
        outputs: Outputs = run_samples(
            session, preprocessor, manifest.task, case.columns, manifest.judgement.batch_size
        )
    return outputs


def other_ways(case: Case, timed: BenchmarkResult) -> list[dict[str, Any]]:
    """Rows for every way to run the bundle; with one backend only, what the benchmark timed."""
    if not case.others and case.backend != "openvino":
        return only_main(case.manifest, case.backend, timed.latency_s)
    return compare(case.root, case.manifest, case.columns, case.baseline, case.backend, case.others, case.threads)


def assemble(
    case: Case,
    timed: BenchmarkResult,
    evidence: Mapping[str, Evidence],
    failures: Mapping[str, str],
    rows: Sequence[dict[str, Any]],
    advice: Sequence[str],
) -> Report:
    """The report of what is known; a candidate with broken outputs fails even without a gate."""
    manifest = case.manifest
    gates = judge(manifest.judgement, evidence, failures)
    return Report(
        verdict="fail" if failures else overall(gates),
        gates=gates,
        backends=tuple(rows),
        advice=tuple(advice),
        layers=read_layers(case.root, manifest),
        n_samples=manifest.evaluation.n_samples if manifest.evaluation else 0,
        **_common(manifest, timed, evidence),
    )


def unjudged(manifest: Manifest, timed: BenchmarkResult) -> Report:
    """A benchmark alone in a report's form."""
    return Report(verdict="unjudged", **_common(manifest, timed, speed_evidence(timed, manifest.judgement)))


def _common(manifest: Manifest, timed: BenchmarkResult, evidence: Mapping[str, Evidence]) -> dict[str, Any]:
    batch_size = timed.settings.throughput_batch_size
    return {
        "bundle": manifest.name,
        "backend": timed.backend,
        "task": manifest.task,
        "manifest_digest": manifest.digest,
        "confidence": manifest.judgement.confidence,
        "baseline": side(evidence, "baseline", batch_size),
        "candidate": side(evidence, "candidate", batch_size),
        "ratios": ratios(evidence),
        "differences": differences(evidence),
        "environment": timed.environment,
        "benchmark": {**asdict(timed.settings), "rounds": timed.latency_s.shape[1]},
    }


def build_notes(root: Path, manifest: Manifest) -> list[str]:
    """What the build had to say beyond single layers: what went back to float, what collapsed and why."""
    return [str(row["reason"]) for row in read_layers(root, manifest) if row.get("type") == "note"]


def read_layers(root: Path, manifest: Manifest) -> tuple[Any, ...]:
    """What the build wrote about each layer, layers.json; nothing where the bundle has none."""
    if "layers.json" not in manifest.files:
        return ()
    try:
        layers = json.loads((root / "layers.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{root / 'layers.json'}: not JSON: {error}") from error
    return tuple(layers) if isinstance(layers, list) else (layers,)
