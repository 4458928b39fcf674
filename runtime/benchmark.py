"""How fast and how big: baseline and candidate, interleaved on this machine.

What is measured, always of both models in the same rounds: latency percentiles at `batch_size`, throughput at
`throughput_batch_size` (batch over the median time), and with `latency_limit_ms` the throughput at the largest
power-of-two batch whose p95 keeps the limit. Load time and peak memory come from fresh processes.

Time is bounded: each of these stops after its budget below, but never before `timing.MIN_ROUNDS` rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends import BACKENDS, Feeds, Session, find_backend
from runtime.bundle import Artifact, Benchmark, Judgement, Manifest, inside, read_samples, verify
from runtime.environment import environment
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.evidence import (
    Best,
    Evidence,
    range_evidence,
    size_evidence,
    throughput_under_latency_evidence,
    timing_evidence,
)
from runtime.feeds import make_feeds
from runtime.manifest import fixed_batch
from runtime.metrics import LATENCY_PERCENTILES
from runtime.predict import bundle_preprocessor, encoding_views
from runtime.probe import Probe, probe
from runtime.timing import MIN_ROUNDS, time_rounds

LATENCY_BUDGET_S = 60.0
THROUGHPUT_BUDGET_S = 30.0
LIMIT_BUDGET_S = 10.0
"""For each batch size that is tried."""
MAX_LIMITED_POWER = 10
"""Batches of up to 2^10 are tried."""
LIMIT_PERCENTILE = 95


@dataclass(frozen=True)
class Variant:
    """A way to run a model of the bundle."""

    artifact: Artifact
    backend: str
    precision: str
    """For people: the artifact's own, or what the backend is told to compute in."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchmarkResult:
    """Raw times in seconds, row 0 the baseline and row 1 the candidate, and what they were taken with."""

    backend: str
    settings: Benchmark
    latency_s: np.ndarray  # [2, rounds]
    throughput_s: np.ndarray  # [2, rounds]
    limited: tuple[Best, Best] | None
    """None without `latency_limit_ms`."""
    probes: tuple[Probe, Probe]
    sizes: tuple[int, int]
    """Bytes."""
    environment: dict[str, Any]


def benchmark(path: str | Path, backend: str | None = None, threads: int | None = None) -> BenchmarkResult:
    """Measure baseline and candidate of a bundle; `threads` replaces the bundle's own setting. Writes nothing.

    Raises BundleError if the bundle is not intact, UsageError for an unknown backend, RuntimeFailure where a run fails.
    """
    root = Path(path)
    manifest = verify(root)
    columns = read_samples(root, manifest)
    chosen, _ = choose_backend(manifest.target, backend)
    return measure(root, manifest, columns, chosen, threads)


def choose_backend(target: str, asked: str | None) -> tuple[str, str | None]:
    """The backend to run on, and a note where it is not the one that the bundle was made for."""
    if asked is not None:
        _check_backend(asked)
        return asked, None
    if target in BACKENDS and BACKENDS[target].available() is None:
        return target, None
    _check_backend("onnxruntime-cpu")
    reason = BACKENDS[target].available() if target in BACKENDS else "there is no backend of that name here"
    return "onnxruntime-cpu", f"The bundle was made for {target}, but it runs on onnxruntime-cpu here: {reason}."


def _check_backend(name: str) -> None:
    reason = find_backend(name).available()
    if reason is not None:
        raise RuntimeFailure(f"backend '{name}' does not work here: {reason}")


def pair(manifest: Manifest, backend: str) -> tuple[Variant, Variant]:
    """Baseline and candidate on a backend; BundleError if the bundle has no baseline model."""
    names = {artifact.name for artifact in manifest.artifacts}
    if "baseline" not in names:
        raise BundleError(f"the bundle has no artifact 'baseline' to compare with; it has {', '.join(sorted(names))}")
    before, after = manifest.artifact("baseline"), manifest.candidate_for(backend)
    return Variant(before, backend, before.precision), Variant(after, backend, after.precision)


def measure(
    root: Path, manifest: Manifest, columns: Mapping[str, Any], backend: str, threads: int | None = None
) -> BenchmarkResult:
    """`benchmark` of a bundle that has been read already."""
    (settings, _), seed = settings_for(manifest, threads), manifest.judgement.seed
    n_threads = settings.threads
    variants = pair(manifest, backend)
    given = encoding_views(manifest.task, columns)[0]
    with ExitStack() as stack:
        sessions = [opened(stack, root, variant, n_threads) for variant in variants]
        preprocessors = [bundle_preprocessor(root, manifest, session.inputs) for session in sessions]

        def feeds(batch_size: int) -> list[list[Feeds]]:
            return [make_feeds(p, given, batch_size, seed, settings.sequence_length) for p in preprocessors]

        single = feeds(settings.batch_size)
        latency = time_rounds(sessions, single, settings.iterations, settings.warmup, seed, LATENCY_BUDGET_S)
        many = feeds(settings.throughput_batch_size)
        throughput = time_rounds(sessions, many, _rounds(settings), min(settings.warmup, 3), seed, THROUGHPUT_BUDGET_S)
        fixed = _bound_batch(manifest)
        sizes_tried = [fixed] if fixed else [2**power for power in range(MAX_LIMITED_POWER + 1)]
        limited = _limited(sessions, feeds, sizes_tried, settings, seed) if settings.latency_limit_ms else None
    before, after = (
        probe(v.backend, inside(root, v.artifact.path), n_threads, own[0], v.options)
        for v, own in zip(variants, single, strict=True)
    )
    sizes = variants[0].artifact.size_bytes, variants[1].artifact.size_bytes
    return BenchmarkResult(
        backend, settings, latency, throughput, limited, (before, after), sizes, environment(n_threads)
    )


def opened(stack: ExitStack, root: Path, variant: Variant, threads: int) -> Session:
    """A session of the variant, which closes with the stack."""
    path = inside(root, variant.artifact.path)
    session = find_backend(variant.backend).open(path, threads, variant.options)
    stack.callback(session.close)
    return session


def settings_for(manifest: Manifest, threads: int | None) -> tuple[Benchmark, str | None]:
    """The benchmark's settings as they can be followed, and a note where a model's fixed batch size overrules them.

    Raises UsageError for a sequence length where the samples are no texts.
    """
    settings = manifest.judgement.benchmark
    if settings.sequence_length is not None and manifest.preprocess["kind"] != "text":
        raise UsageError(
            f"benchmark.sequence_length fits texts; this bundle's samples are {manifest.preprocess['kind']}s"
        )
    settings = replace(settings, threads=threads or settings.threads)
    fixed = _bound_batch(manifest)
    if fixed is None or fixed == settings.batch_size == settings.throughput_batch_size:
        return settings, None
    note = f"The model takes batches of exactly {fixed}, so that latency and throughput were measured at that size."
    return replace(settings, batch_size=fixed, throughput_batch_size=fixed), note


def _bound_batch(manifest: Manifest) -> int | None:
    """The batch size that one of the bundle's models is bound to, if any."""
    return fixed_batch([spec for artifact in manifest.artifacts for spec in artifact.inputs])


def _rounds(settings: Benchmark) -> int:
    """Rounds for a large batch: a quarter of the iterations, each being many samples."""
    return min(settings.iterations, max(MIN_ROUNDS, settings.iterations // 4))


def _limited(
    sessions: Sequence[Session],
    feeds: Callable[[int], list[list[Feeds]]],
    batch_sizes: Sequence[int],
    settings: Benchmark,
    seed: int,
) -> tuple[Best, Best]:
    """For each model the largest batch, of rising sizes, whose p95 keeps the limit, with its times."""
    limit_s = (settings.latency_limit_ms or 0.0) / 1000
    best: list[Best] = [None, None]
    growing = [True, True]
    for batch_size in batch_sizes:
        seconds = time_rounds(sessions, feeds(batch_size), _rounds(settings), 2, seed, LIMIT_BUDGET_S)
        in_time = np.percentile(seconds, LIMIT_PERCENTILE, axis=1) <= limit_s
        for m in range(2):
            growing[m] = growing[m] and bool(in_time[m])
            best[m] = (batch_size, seconds[m]) if growing[m] else best[m]
        if not any(growing):
            break
    return best[0], best[1]


def speed_evidence(result: BenchmarkResult, judgement: Judgement) -> dict[str, Evidence]:
    """Evidence of every measured metric, by name."""
    found = {n: timing_evidence(n, p, result.latency_s, judgement) for n, p in LATENCY_PERCENTILES.items()}
    batch_size = result.settings.throughput_batch_size
    found["throughput"] = timing_evidence("throughput", 50, result.throughput_s, judgement, batch_size)
    if result.limited is not None:
        found["throughput_under_latency"] = throughput_under_latency_evidence(result.limited, judgement)
    before, after = result.probes
    found["peak_memory"] = range_evidence("peak_memory", before.peak_memory_bytes, after.peak_memory_bytes)
    found["load_time"] = range_evidence("load_time", before.load_ms, after.load_ms)
    return found | size_evidence(*result.sizes)
