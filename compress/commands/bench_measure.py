"""Measure one row of `compress bench`: quality on the evaluation set, times in turns with float32, memory, size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends import Feeds, Session, find_backend, open_options
from runtime.bundle.format import Gate, Judgement, inside
from runtime.errors import RuntimeFailure
from runtime.judge.evidence import Evidence, timing_evidence
from runtime.judge.explain import explain_bundle, explain_unprofiled
from runtime.judge.findings import Case
from runtime.judge.gates import judge
from runtime.judge.stats import Estimate, exact
from runtime.judge.validate import prepare, quality, run_candidate
from runtime.measure.benchmark import Variant, measure, open_variant, pair, speed_evidence
from runtime.measure.probe import probe
from runtime.measure.timing import time_rounds
from runtime.measure.workload import make_feeds, settings_for
from runtime.metrics import METRICS
from runtime.tasks.predict import bundle_preprocessor, encoding_views

LATENCY_S, THROUGHPUT_S, FINAL_S = 3.0, 2.0, 6.0
LEAST_ROUNDS, MOST_ROUNDS, MOST_LARGE = 12, 200, 30
"""Of calls, at most; and of calls with a large batch."""
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
        speed = _time_decoder(case) if case.manifest.generates else _time_calls(case)
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


def _time_calls(case: Case) -> dict[str, Any]:
    """Time calls of one sample and of many, float32 and candidate in turns."""
    (settings, _), seed = settings_for(case.manifest, case.threads), case.manifest.judgement.seed
    variants = pair(case.manifest, case.backend)
    given = encoding_views(case.manifest.task, case.columns)[0]
    with ExitStack() as stack:
        sessions = [open_variant(stack, case.root, variant, settings.threads) for variant in variants]
        encoders = [bundle_preprocessor(case.root, case.manifest, session.inputs) for session in sessions]

        def make_batches(size: int) -> list[list[Feeds]]:
            return [make_feeds(encoder, given, size, seed, settings.sequence_length) for encoder in encoders]

        single = make_batches(settings.batch_size)
        seconds = time_in_turns(sessions, single, LATENCY_S, MOST_ROUNDS)
        large = time_in_turns(sessions, make_batches(settings.throughput_batch_size), THROUGHPUT_S, MOST_LARGE)
    memory = _probe_memory(case, variants[1], settings.threads, single[1][0])
    return describe_times(seconds, large, settings.throughput_batch_size) | {"peak_memory_bytes": memory}


def time_in_turns(
    sessions: Sequence[Session], feeds: Sequence[Sequence[Feeds]], budget_s: float, most: int
) -> np.ndarray:
    """Return seconds [models, rounds] of calls in turns, as many as the budget allows; LEAST_ROUNDS at least."""
    pace = float(time_rounds(sessions, feeds, 1, 1, 0, 0.0).sum())
    least = LEAST_ROUNDS if LEAST_ROUNDS * 2 * pace < 2 * budget_s else 3
    rounds = max(least, min(most, int(budget_s / max(2 * pace, 1e-9))))
    return time_rounds(sessions, feeds, rounds, 2, 0, budget_s)


def describe_times(seconds: np.ndarray, large: np.ndarray, batch_size: int) -> dict[str, Any]:
    """Return p50 (ms), its ratio to float32 with its interval, and throughput, of times [2, rounds]."""
    latency = timing_evidence("latency_p50", 50, seconds, Judgement())
    rate = timing_evidence("throughput", 50, large, Judgement(), batch_size)
    return {
        "latency_ms": latency.candidate.value,
        **_describe_ratio(latency),
        "throughput_per_s": rate.candidate.value,
        "throughput_batch_size": batch_size,
    }


def _describe_ratio(known: Evidence) -> dict[str, Any]:
    if known.speedup is None:
        return {"speedup": 1.0, "speedup_interval": None}
    ends = known.speedup.low, known.speedup.high
    return {
        "speedup": known.speedup.value,
        "speedup_interval": tuple(end if math.isfinite(end) else None for end in ends),
    }


def _time_decoder(case: Case) -> dict[str, Any]:
    """Time whole requests of a decoder, as a judgement does, with the few rounds that the recipe asks for."""
    result = measure(case.root, case.manifest, case.columns, case.backend, case.threads)
    evidence = speed_evidence(result, case.manifest.judgement)
    rate = evidence.get("decode_rate")
    return {
        "latency_ms": evidence["tpot"].candidate.value,
        **_describe_ratio(evidence["tpot"]),
        "throughput_per_s": rate.candidate.value if rate is not None else None,
        "throughput_batch_size": result.settings.batch_size,
        "peak_memory_bytes": evidence["peak_memory"].candidate.value,
    }


def _probe_memory(case: Case, variant: Variant, threads: int, feeds: Feeds) -> float:
    path = inside(case.root, variant.artifact.path)
    options = open_options(case.root, variant.artifact, variant.options)
    return float(probe(case.backend, path, threads, feeds, options, repeats=1).peak_memory_bytes[0])


def measure_graphs(graphs: Graphs, backend: str) -> dict[str, Any]:
    """Return the fields of a `BenchRow` for a candidate's graph that stands for speed and size alone."""
    with ExitStack() as stack:
        sessions = []
        for path in (graphs.before, graphs.after):
            sessions.append(find_backend(backend).open(path, graphs.threads, {}))
            stack.callback(sessions[-1].close)
        seconds = time_in_turns(sessions, [[graphs.feeds]] * 2, LATENCY_S, MOST_ROUNDS)
    memory = probe(backend, graphs.after, graphs.threads, graphs.feeds, {}, repeats=1).peak_memory_bytes[0]
    times = describe_times(seconds, seconds, len(next(iter(graphs.feeds.values()))))
    size = sum(file.stat().st_size for file in graphs.after.parent.iterdir() if file.is_file())
    return {**times, "peak_memory_bytes": float(memory), "size_bytes": size}


def time_finalists(bundles: Sequence[tuple[Path, str]]) -> list[float]:
    """Return the p50 (ms) of several bundles' candidates, each on its backend, all timed in the same rounds."""
    with ExitStack() as stack:
        sessions, feeds = [], []
        for folder, backend in bundles:
            case = prepare(folder, [backend], None)
            (settings, _), (_, variant) = settings_for(case.manifest, case.threads), pair(case.manifest, backend)
            session = open_variant(stack, folder, variant, settings.threads)
            encoder = bundle_preprocessor(folder, case.manifest, session.inputs)
            given = encoding_views(case.manifest.task, case.columns)[0]
            sessions.append(session)
            feeds.append(make_feeds(encoder, given, settings.batch_size, 0, settings.sequence_length))
        seconds = time_in_turns(sessions, feeds, FINAL_S, MOST_ROUNDS)
    return [1000 * float(value) for value in np.median(seconds, axis=1)]
