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
from runtime.benchmark import LATENCY_BUDGET_S, Variant, engine_trouble, opened, pair
from runtime.bundle import Manifest
from runtime.columns import count, take
from runtime.errors import RuntimeFailure
from runtime.feeds import make_feeds
from runtime.metrics import LATENCY_PERCENTILES, METRICS, Outputs, why_not
from runtime.predict import bundle_preprocessor, encoding_views, run_samples
from runtime.settings import settings_for
from runtime.timing import time_rounds

FIDELITY_SAMPLES = 256
Row = dict[str, Any]
"""{"name", "artifact", "precision", "latency_ms", "speedup", "fidelity", "fastest"} or, if it fails, {..., "error"}."""


def variants(manifest: Manifest, main: str, others: Sequence[str]) -> list[Variant]:
    """Baseline and candidate on the main backend, then what else could run; the first is what speed-ups refer to."""
    found = list(pair(manifest, main))
    for backend in (main, *others):
        before, after = pair(manifest, backend)
        if backend == "openvino":
            found += [Variant(before.artifact, backend, p, {"precision": p}) for p in ("f32", "bf16")]
        elif backend != main:
            found.append(before)
        if backend != main:
            found.append(after)
    return found


def available_others(manifest: Manifest, main: str) -> list[str]:
    """The backends besides `main` that work here, and have what they run."""
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
    """Latency of every variant, in one run of interleaved rounds. A variant that fails is a row that says so."""
    (settings, _), seed = settings_for(manifest, threads), manifest.judgement.seed
    given = encoding_views(manifest.task, columns)[0]
    rows: list[Row] = []
    runs: list[tuple[Row, Session, Any]] = []
    with ExitStack() as stack:
        for variant in variants(manifest, main, others):
            row: Row = {"name": variant.backend, "artifact": variant.artifact.name, "precision": variant.precision}
            rows.append(row)
            try:
                session = opened(stack, root, variant, settings.threads)
                preprocessor = bundle_preprocessor(root, manifest, session.inputs)
                row["fidelity"] = _fidelity(session, preprocessor, manifest, columns, baseline)
                feeds = make_feeds(preprocessor, given, settings.batch_size, seed, settings.sequence_length)
                if variant.backend == "openvino":  # timed calls all have one shape, so it may compile for that shape
                    fixed = replace(variant, options={**variant.options, "static": True})
                    session = opened(stack, root, fixed, settings.threads)
            except RuntimeFailure as error:
                row["error"] = str(error)
            else:
                runs.append((row, session, feeds))
        seconds = time_rounds(
            [s for _, s, _ in runs],
            [f for _, _, f in runs],
            settings.iterations,
            settings.warmup,
            seed,
            LATENCY_BUDGET_S,
        )
    _fill_in([row for row, _, _ in runs], seconds)
    return rows


def only_main(manifest: Manifest, main: str, seconds: np.ndarray) -> list[Row]:
    """The rows where there is nothing to compare with: baseline and candidate as the benchmark timed them."""
    rows: list[Row] = [
        {"name": main, "artifact": variant.artifact.name, "precision": variant.precision}
        for variant in pair(manifest, main)
    ]
    _fill_in(rows, seconds)
    return rows


def _fidelity(
    session: Session, preprocessor: Any, manifest: Manifest, columns: Mapping[str, Any], baseline: Outputs
) -> Row:
    """Closeness to the baseline's frozen outputs on the first samples."""
    n = min(FIDELITY_SAMPLES, count(columns))
    few = {name: take(columns, name, slice(0, n)) for name in columns}
    outputs = run_samples(session, preprocessor, manifest.task, few, manifest.judgement.batch_size)
    reference = {name: values[:n] for name, values in baseline.items()}
    fits = [m for m in (METRICS["agreement"], METRICS["cosine"]) if why_not(m, manifest.task, outputs, None) is None]
    return {"n_samples": n, **{metric.name: metric.compute(outputs, reference) for metric in fits}}


def _fill_in(rows: Sequence[Row], seconds: np.ndarray) -> None:
    medians = np.median(seconds, axis=1)
    for row, times, median in zip(rows, seconds, medians, strict=True):
        row["latency_ms"] = {
            name.removeprefix("latency_"): float(1000 * np.percentile(times, percentile))
            for name, percentile in LATENCY_PERCENTILES.items()
        }
        row["speedup"] = float(medians[0] / median)
        row["fastest"] = bool(median == medians.min())
