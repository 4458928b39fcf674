"""The other ways to run the same bundle here: other backends, and the float model in a lower precision.

All are timed in the same rounds, so that their ratios are of one run; OpenVINO compiles for the shapes that are timed.
A handful of samples says how close each stays to the baseline's frozen outputs, because a fast model that answers
otherwise is no alternative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends import BACKENDS, Session
from runtime.bundle.columns import count, take
from runtime.bundle.format import Manifest
from runtime.measure.benchmark import (
    LATENCY_BUDGET_S,
    Variant,
    engine_trouble,
    list_variants,
    open_variant,
    pair,
)
from runtime.measure.timing import time_rounds
from runtime.measure.workload import make_feeds, settings_for
from runtime.metrics import LATENCY_PERCENTILES, METRICS, Outputs, why_not
from runtime.tasks.predict import bundle_preprocessor, encoding_views, facts_of, run_samples

FIDELITY_SAMPLES = 256
Row = dict[str, Any]
"""{"name", "artifact", "precision", "latency_ms", "speedup", "fidelity", "fastest"} or, if it fails, {..., "error"}."""


def variants(manifest: Manifest, main: str, others: Sequence[str]) -> list[Variant]:
    """List baseline and candidate on the main backend, then what else could run; speed-ups refer to the first."""
    listed = list(pair(manifest, main))
    for backend in (main, *others):
        before, after = pair(manifest, backend)
        if backend == "openvino":
            listed += [Variant(before.artifact, backend, p, {"precision": p}) for p in ("f32", "bf16")]
        elif backend != main:
            listed.append(before)
        if backend != main:
            listed.append(after)
    return listed


def available_others(manifest: Manifest, main: str) -> list[str]:
    """Return the backends besides `main` that work here, and have what they run."""
    working = [name for name, backend in BACKENDS.items() if name != main and backend.available() is None]
    return [name for name in working if engine_trouble(manifest, name) is None]


def compare(
    root: Path,
    manifest: Manifest,
    columns: Mapping[str, Any],
    baseline: Outputs,
    main: str,
    others: Sequence[str],
    threads: int | None,
) -> list[Row]:
    """Measure the latency of every variant, in one run of interleaved rounds.

    A variant that fails is a row that says so.
    """
    (settings, _), seed = settings_for(manifest, threads), manifest.judgement.seed
    given = encoding_views(manifest.task, columns)[0]
    rows: list[Row] = []
    runs: list[tuple[Row, Session, Any]] = []
    with ExitStack() as stack:
        for variant in variants(manifest, main, others):
            row: Row = {"name": variant.backend, "artifact": variant.artifact.name, "precision": variant.precision}
            rows.append(row)
            try:
                session = open_variant(stack, root, variant, settings.threads)
                preprocessor = bundle_preprocessor(root, manifest, session.inputs)
                row["fidelity"] = _measure_fidelity(session, preprocessor, manifest, columns, baseline)
                feeds = make_feeds(preprocessor, given, settings.batch_size, seed, settings.sequence_length)
                if variant.backend == "openvino":  # timed calls all have one shape, so it may compile for that shape
                    fixed = replace(variant, options={**variant.options, "static": True})
                    session = open_variant(stack, root, fixed, settings.threads)
                session.run(feeds[0])  # what cannot run costs its row, and not the rounds of all
            except Exception as error:  # noqa: BLE001 - an optional row never ends the run, whatever a library raises
                row["error"] = str(error) or type(error).__name__
            else:
                runs.append((row, session, feeds))

        def time_runs() -> np.ndarray:
            sessions, feeds = [session for _, session, _ in runs], [feeds for _, _, feeds in runs]
            return time_rounds(sessions, feeds, settings.iterations, settings.warmup, seed, LATENCY_BUDGET_S)

        try:
            seconds = time_runs()
        except Exception as error:
            failed = [row for row, _, _ in runs if row["name"] != main]
            if not failed:
                raise
            for row in failed:
                row["error"] = f"timed beside the others: {error or type(error).__name__}"
            runs = [run for run in runs if run[0]["name"] == main]
            seconds = time_runs()
    _add_timings([row for row, _, _ in runs], seconds)
    return rows


def only_main(manifest: Manifest, main: str, seconds: np.ndarray) -> list[Row]:
    """Return the rows where there is nothing to compare with: baseline and candidate as the benchmark timed them."""
    rows: list[Row] = [
        {"name": main, "artifact": variant.artifact.name, "precision": variant.precision}
        for variant in list_variants(manifest, main)
    ]
    _add_timings(rows, seconds)
    return rows


def _measure_fidelity(
    session: Session, preprocessor: Any, manifest: Manifest, columns: Mapping[str, Any], baseline: Outputs
) -> Row:
    """Measure how close the outputs on the first samples are to the baseline's frozen ones."""
    n = min(FIDELITY_SAMPLES, count(columns))
    few = {name: take(columns, name, slice(0, n)) for name in columns}
    size = manifest.judgement.batch_size
    outputs = run_samples(session, preprocessor, manifest.task, few, size, facts=facts_of(manifest))
    reference = {name: values[:n] for name, values in baseline.items()}
    close = [metric for metric in METRICS.values() if metric.against == "baseline" and metric.ideal == 1.0]
    fits = [metric for metric in close if why_not(metric, manifest.task, outputs, None) is None]
    return {"n_samples": n, **{metric.name: metric.compute(outputs, reference) for metric in fits}}


def _add_timings(rows: Sequence[Row], seconds: np.ndarray) -> None:
    medians = np.median(seconds, axis=1)
    for row, times, median in zip(rows, seconds, medians, strict=True):
        row["latency_ms"] = {
            name.removeprefix("latency_"): float(1000 * np.percentile(times, percentile))
            for name, percentile in LATENCY_PERCENTILES.items()
        }
        row["speedup"] = float(medians[0] / median)
        row["fastest"] = bool(median == medians.min())
