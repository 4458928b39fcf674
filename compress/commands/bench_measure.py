"""Measure one row of `compress bench`: quality on the evaluation set, times in turns with float32, memory, size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.timing.clock import CONFIDENCE, PROCESSES
from runtime.backends import Feeds
from runtime.bundle.format import Gate, Judgement
from runtime.clock.compare import compare_files
from runtime.clock.turns import Call, make_call, time_in_turns
from runtime.errors import RuntimeFailure
from runtime.judge.bundle import prepare, quality, run_candidate
from runtime.judge.evidence import Evidence
from runtime.judge.explain import explain_bundle, explain_unprofiled
from runtime.judge.findings import Case
from runtime.judge.gates import judge
from runtime.judge.speed import speed_evidence
from runtime.measure.benchmark import measure, open_variant, pair
from runtime.measure.workload import make_feeds, settings_for
from runtime.stats import Estimate, exact, process_interval
from runtime.tasks.metrics import METRICS
from runtime.tasks.predict import bundle_preprocessor, encoding_views

LATENCY_S, FINAL_S = 3.0, 6.0
MOST_CALLS = 200
MOST_SHOWN = 2
"""Metrics of quality that a row shows."""


@dataclass(frozen=True)
class Graphs:
    """Float32 and candidate as files, without a bundle: of a model that is timed without data."""

    before: Path
    after: Path
    feeds: Feeds
    threads: int


def measure_bundle(
    folder: Path, backend: str, gates: Sequence[Mapping[str, Any]], stage: Callable[[str], AbstractContextManager[None]]
) -> dict[str, Any]:
    """Return the fields of a `BenchRow` for a bundle that was built and not judged; errors as `validate`.

    `stage`: is entered for each stage, by its name.
    """
    with stage("quality"):
        case = prepare(folder, [backend], None)
        evidence, failures = quality(case, run_candidate(case))
    judged = Judgement(gates=tuple(Gate(**gate) for gate in gates))
    fields: dict[str, Any] = {"broken": next(iter(failures.values()), "")}
    if not failures:
        fields |= {"quality": _choose_shown(evidence, judged), "keeps": _keeps(evidence, judged)}
    with stage("timing"):
        speed = _describe_speed(case)
    return fields | speed | {"size_bytes": case.manifest.candidate_for(backend).size_bytes}


def _choose_shown(evidence: Mapping[str, Evidence], judged: Judgement) -> dict[str, float]:
    """Return a metric against the labels where there are some, those of the bounds, the first against float32."""
    labelled = [name for name in evidence if METRICS[name].against == "labels"]
    near = [name for name in evidence if METRICS[name].against == "baseline" and METRICS[name].ideal == 1.0]
    gated = [gate.metric for gate in judged.gates]
    names = dict.fromkeys([*(labelled[:1] if not set(gated) & set(labelled) else ()), *gated, *near])
    return {name: round(evidence[name].candidate.value, 6) for name in list(names)[:MOST_SHOWN] if name in evidence}


def _keeps(evidence: Mapping[str, Evidence], judged: Judgement) -> bool:
    """Return whether the values, whatever their intervals, keep to the gates."""

    def settle(estimate: Estimate | None) -> Estimate | None:
        return None if estimate is None else exact(estimate.value)

    settled = {
        name: replace(
            known,
            candidate=exact(known.candidate.value),
            baseline=settle(known.baseline),
            difference=settle(known.difference),
            retained=settle(known.retained),
        )
        for name, known in evidence.items()
    }
    return all(result.verdict == "pass" for result in judge(judged, settled))


def find_cause(folder: Path, backend: str) -> str:
    """Return the first reason for which a bundle's candidate is no faster; "" where no profile tells."""
    try:
        case = prepare(folder, [backend], None)
        if explain_unprofiled(case.manifest, case.backend) is not None:
            return ""
        causes = explain_bundle(case.root, case.manifest, case.columns, case.backend, case.threads).causes
    except RuntimeFailure:
        return ""  # the row stands without a reason
    return causes[0].seen.rstrip(".") if causes else ""


def _describe_speed(case: Case) -> dict[str, Any]:
    """Return p50 (of a decoder a further token's time), its ratio to float32 with its interval, rate and memory."""
    result = measure(case.root, case.manifest, case.columns, case.backend, case.threads)
    evidence = speed_evidence(result, case.manifest.judgement)
    generates, settings = case.manifest.generates, result.settings
    latency, rate = (
        evidence["tpot" if generates else "latency_p50"],
        evidence["decode_rate" if generates else "throughput"],
    )
    return {
        "latency_ms": latency.candidate.value,
        **_describe_ratio(latency.speedup),
        "throughput_per_s": rate.candidate.value,
        "throughput_batch_size": settings.batch_size if generates else settings.throughput_batch_size,
        "peak_memory_bytes": evidence["peak_memory"].candidate.value,
    }


def _describe_ratio(speedup: Estimate | None) -> dict[str, Any]:
    if speedup is None:
        return {"speedup": 1.0, "speedup_interval": None}
    ends = tuple(end if math.isfinite(end) else None for end in (speedup.low, speedup.high))
    return {"speedup": speedup.value, "speedup_interval": ends}


def measure_graphs(graphs: Graphs, backend: str) -> dict[str, Any]:
    """Return the fields of a `BenchRow` for a candidate's graph that stands for speed and size alone."""
    compared = compare_files(
        backend, graphs.threads, [graphs.before, graphs.after], [graphs.feeds], PROCESSES, LATENCY_S, 0
    )
    ms = float(np.median(compared.ms[:, 1]))
    batch_size = len(next(iter(graphs.feeds.values())))
    return {
        "latency_ms": ms,
        **_describe_ratio(process_interval(compared.ms[:, 0] / compared.ms[:, 1], CONFIDENCE)),
        "throughput_per_s": 1000 * batch_size / ms,
        "throughput_batch_size": batch_size,
        "peak_memory_bytes": float(np.median(compared.peak_memory_bytes[1])),
        "size_bytes": sum(file.stat().st_size for file in graphs.after.parent.iterdir() if file.is_file()),
    }


def time_finalists(bundles: Sequence[tuple[Path, str]]) -> list[float]:
    """Return the p50 (ms) of several bundles' candidates, each on its backend, all timed in the same rounds."""
    with ExitStack() as stack:
        calls: list[Call] = []
        for folder, backend in bundles:
            case = prepare(folder, [backend], None)
            (settings, _), (_, variant) = settings_for(case.manifest, case.threads), pair(case.manifest, backend)
            session = open_variant(stack, folder, variant, settings.threads)
            encoder = bundle_preprocessor(folder, case.manifest, session.inputs)
            given = encoding_views(case.manifest.task, case.columns)[0]
            batches = make_feeds(
                encoder, given, settings.batch_size, 0, settings.sequence_length, streams=case.manifest.streams
            )
            calls.append(make_call(session, batches))
        return time_in_turns(calls, MOST_CALLS, budget_s=FINAL_S, one_thread=settings.threads == 1).typical_ms
