"""The other ways to run the same bundle here: other backends, and the float model in a lower precision.

All are timed in the processes that the judged models are timed in; OpenVINO compiles for the shapes that are timed.
A handful of samples says how close each stays to the baseline's frozen outputs, because a fast model that answers
otherwise is no alternative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends import BACKENDS, Session, open_options
from runtime.bundle.columns import count, take
from runtime.bundle.format import Manifest, inside
from runtime.measure.benchmark import (
    BenchmarkResult,
    Beside,
    Variant,
    engine_trouble,
    find_medians,
    list_variants,
    open_variant,
    pair,
)
from runtime.measure.workload import settings_for
from runtime.metrics import Outputs
from runtime.tasks.metrics import METRICS, why_not
from runtime.tasks.predict import bundle_preprocessor, facts_of, run_samples

JUDGED = 2
"""Rows of the models that are judged: baseline and candidate on the main backend."""
Row = dict[str, Any]
"""{"name", "artifact", "precision", "latency_ms", "speedup", "fidelity", "fastest"} or, if it fails, {..., "error"}."""


def variants(manifest: Manifest, main: str, others: Sequence[str]) -> list[Variant]:
    """List baseline and candidate on the main backend, then what else could run; speed-ups refer to the first."""
    listed = [*pair(manifest, main), *list_other_files(manifest, main)]
    for backend in (main, *others):
        before, after = pair(manifest, backend)
        if backend == "openvino":
            listed += [Variant(before.artifact, backend, p, {"precision": p}) for p in ("f32", "bf16")]
        elif backend != main:
            listed.append(before)
        if backend != main:
            listed.append(after)
    return listed


def list_other_files(manifest: Manifest, main: str) -> list[Variant]:
    """List what the backend can run beside its candidate: the same model in another format."""
    return [Variant(a, main, a.precision) for a in manifest.artifacts if a.kind == "ort" and a.target == main]


def available_others(manifest: Manifest, main: str) -> list[str]:
    """Return the backends besides `main` that work here, and have what they run; of decoders none is tried."""
    if manifest.generates:
        return []
    working = [name for name, backend in BACKENDS.items() if name != main and backend.available() is None]
    return [name for name in working if engine_trouble(manifest, name) is None]


Way = tuple[Row, Beside | None]
"""A row, and what is to be timed for it; None where it failed, or where it is one of the two that are judged."""


def find_ways(
    root: Path,
    manifest: Manifest,
    columns: Mapping[str, Any],
    baseline: Outputs,
    main: str,
    others: Sequence[str],
    threads: int | None,
) -> list[Way]:
    """Return a row for each variant, the two judged ones first, with how close its outputs stay to the baseline's.

    Whatever a variant fails with is its row's error: it is no part of the judgement.
    """
    settings, _ = settings_for(manifest, threads)
    ways: list[Way] = []
    for number, variant in enumerate(variants(manifest, main, others)):
        row: Row = {"name": variant.backend, "artifact": variant.artifact.name, "precision": variant.precision}
        options = dict(open_options(root, variant.artifact, variant.options))
        if variant.backend == "openvino" and number >= JUDGED:
            options["static"] = True  # timed calls all have one shape, so it may compile for that shape
        beside: Beside | None = Beside(inside(root, variant.artifact.path).absolute(), variant.backend, options)
        try:
            with ExitStack() as stack:
                session = open_variant(stack, root, variant, settings.threads)
                preprocessor = bundle_preprocessor(root, manifest, session.inputs)
                row["fidelity"] = _measure_fidelity(session, preprocessor, manifest, columns, baseline)
        except Exception as error:  # noqa: BLE001 - an optional row never ends the run, whatever a library raises
            row["error"], beside = str(error) or type(error).__name__, None
        ways.append((row, beside if number >= JUDGED else None))
    return ways


def add_latencies(ways: Sequence[Way], timed: BenchmarkResult, first: int, speedup: float) -> list[Row]:
    """Return the rows with their latencies: of the judged ones, and of their `speedup`, those of the report.

    Those of the others are of the same processes: their ratio to the baseline, times its own. `first`: number of the
    first of them among the models that were timed beside the judged ones.
    """
    judged = iter(1000 * np.median(find_medians(timed.first_times), axis=0))  # [models]
    rows: list[Row] = []
    for number, (row, beside) in enumerate(ways):
        if number < JUDGED:
            rows.append({**row, "latency_ms": {"p50": float(next(judged))}})
        elif beside is None:
            rows.append(row)
        elif (ms := timed.beside_ms[first]) is not None:
            rows.append({**row, "latency_ms": {"p50": ms}})
        else:
            rows.append({**row, "error": timed.errors[first]})
        first += beside is not None
    rows = _rank(rows)
    rows[1]["speedup"] = speedup
    return rows


def _rank(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with how many times as fast as the first each is, and which is the fastest."""
    known = [row["latency_ms"]["p50"] for row in rows if "latency_ms" in row]
    return [
        row
        if "latency_ms" not in row
        else {
            **row,
            "speedup": known[0] / row["latency_ms"]["p50"],
            "fastest": row["latency_ms"]["p50"] == min(known),
        }
        for row in rows
    ]


def only_main(manifest: Manifest, main: str, timed: BenchmarkResult) -> list[Row]:
    """Return the rows where there is nothing to compare with: baseline and candidate as the benchmark timed them."""
    medians = 1000 * np.median(find_medians(timed.first_times), axis=0)  # [models]
    return _rank(
        [
            {
                "name": main,
                "artifact": variant.artifact.name,
                "precision": variant.precision,
                "latency_ms": {"p50": float(ms)},
            }
            for variant, ms in zip(list_variants(manifest, main), medians, strict=True)
        ]
    )


def _measure_fidelity(
    session: Session, preprocessor: Any, manifest: Manifest, columns: Mapping[str, Any], baseline: Outputs
) -> Row:
    """Measure how close the outputs on the first samples are to the baseline's frozen ones."""
    # the first samples are compared with the baseline
    n = min(256, count(columns))
    few = {name: take(columns, name, slice(0, n)) for name in columns}
    size = manifest.judgement.batch_size
    outputs = run_samples(session, preprocessor, manifest.task, few, size, facts=facts_of(manifest))
    reference = {name: values[:n] for name, values in baseline.items()}
    close = [metric for metric in METRICS.values() if metric.against == "baseline" and metric.ideal == 1.0]
    fits = [metric for metric in close if why_not(metric, manifest.task, outputs, None) is None]
    return {"n_samples": n, **{metric.name: metric.compute(outputs, reference) for metric in fits}}
