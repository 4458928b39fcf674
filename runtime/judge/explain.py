"""Profile a bundle's two models as they are judged, and explain where the time goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runtime.backends import Feeds, Session, open_options
from runtime.bundle.engine import ENGINES
from runtime.bundle.format import inside, read_layers, read_remedies, read_samples
from runtime.bundle.manifest import Benchmark, Manifest
from runtime.bundle.records import from_json, to_json
from runtime.clock.fresh import Answer, run_fresh
from runtime.clock.machine import environment, say_busy
from runtime.clock.peaks import measure_peaks, time_products
from runtime.errors import UsageError
from runtime.judge.twins import ProfiledPair
from runtime.judge.why import Explanation, explain
from runtime.measure.benchmark import Variant, backend_of, list_variants
from runtime.measure.profile_models import PROFILERS, ProfileOrder, profile_models
from runtime.measure.requests import make_decoder, make_requests, run_request
from runtime.measure.workload import make_feeds, settings_for
from runtime.tasks import find_task
from runtime.tasks.manifest import read_manifest, verify
from runtime.tasks.predict import bundle_preprocessor, encoding_views

NEW_TOKENS = 6
"""Of a profiled answer, at most: its steps are alike. Five answers of 16 tokens by Qwen2.5-Coder 0.5B's float graph had
120,000 events, which took 0.9 GiB to hold and to read."""


def explain_path(path: str | Path, backend: str | None = None, threads: int | None = None) -> Explanation:
    """Explain a bundle's speed on a backend, by default the one that it is made for.

    Takes some ten seconds; writes nothing. BundleError if the bundle is not intact; UsageError for what is not run
    here, or a backend whose profile cannot be read; RuntimeFailure where a run fails.
    """
    root = Path(path)
    manifest = verify(root)
    chosen, note = backend_of(manifest, backend)
    if note is not None:
        raise UsageError(
            f"{root}: {note} A profile there says nothing of its speed; ask for it with --backend {chosen}"
        )
    if (reason := explain_unprofiled(manifest, chosen)) is not None:
        raise UsageError(f"{root}: {reason}")
    busy = say_busy(environment(0))  # before the profile's own work
    return replace(explain_bundle(root, manifest, chosen, threads), busy=busy)


def explain_unprofiled(manifest: Manifest, backend: str) -> str | None:
    """Return why a bundle's calls cannot be profiled on a backend; None where they can."""
    if manifest.is_scored(backend):
        return "the candidate is not run here, so that there is no profile of it"
    if manifest.streams:
        return "a call reads states that another one gives, and no profile makes them"
    if backend in ENGINES or backend not in PROFILERS:
        return f"the profile of {backend} cannot be read; those of {' and '.join(PROFILERS)} can"
    if backend == "openvino" and manifest.generates:
        return "decoders are profiled in onnxruntime-cpu alone: --backend onnxruntime-cpu"
    return None


def explain_apart(root: Path, backend: str, threads: int | None = None) -> Explanation:
    """Explain an intact bundle in a process of its own: where memory ends that one, the caller goes on.

    MemoryError or RuntimeFailure where it fails.
    """
    task = {"root": str(root), "backend": backend, "threads": threads}
    found, _ = run_fresh("runtime.judge.explain:explain_task", task, "profiling")
    return from_json(Explanation, found, "explanation", measured=True)


def explain_task(task: Mapping[str, Any]) -> Answer:
    """Do what `explain_apart` asks of a process."""
    root = Path(task["root"])
    return to_json(explain_bundle(root, read_manifest(root), task["backend"], task["threads"])), {}


def explain_bundle(root: Path, manifest: Manifest, backend: str, threads: int | None = None) -> Explanation:
    """Explain a bundle that is known to be intact, as `explain_path` does.

    Both models make calls of the judged batch size, or of decoders the steps of an answer, in short runs of their own.
    """
    columns, (settings, _) = read_samples(root, manifest), settings_for(manifest, threads)
    remedies = read_remedies(root, manifest)
    rows = [row for row in read_layers(root, manifest) if "layer" in row]
    histories = {str(row["layer"]): [str(line) for line in row.get("history", [])] for row in rows}

    def order(variant: Variant) -> ProfileOrder:
        path = inside(root, variant.artifact.path)
        options = open_options(root, variant.artifact, variant.options)
        feeds, request = _make_workload(root, manifest, columns, settings, variant)
        return ProfileOrder(path, feeds, request, options, tuple(histories))

    *before, candidate = profile_models(
        backend, settings.threads, [order(variant) for variant in list_variants(manifest, backend)]
    )
    baseline = before[0] if before else None
    peaks = measure_peaks(backend, settings.threads, candidate.n_bytes)
    pair = ProfiledPair(
        candidate,
        baseline,
        peaks,
        measure_peaks(backend, settings.threads, baseline.n_bytes) if baseline is not None else peaks,
        partial(time_products, backend, settings.threads),
        histories,
        _placed_by_time(root),
        manifest.target,
        remedies,
    )
    return explain(pair, find_task(manifest.task).unit)


def _placed_by_time(root: Path) -> bool:
    """Return whether the bundle's lock, if it has one, holds a choice that was made by times."""
    try:
        lock = json.loads((root / "lock.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(lock, dict) and bool(lock.get("choices"))


def _make_workload(
    root: Path, manifest: Manifest, columns: Mapping[str, Any], settings: Benchmark, variant: Variant
) -> tuple[Feeds | None, Callable[[Session], int] | None]:
    """Return a batch of usual size for a model's calls, or what makes a decoder's requests and counts its runs."""
    seed = manifest.judgement.seed
    preprocessor = bundle_preprocessor(root, manifest, variant.artifact.inputs)
    if find_task(manifest.task).unit == "call":
        view = encoding_views(manifest.task, columns)[0]
        batches = make_feeds(preprocessor, view, settings.batch_size, seed, settings.sequence_length)
        return sorted(batches, key=lambda feeds: sum(v.size for v in feeds.values()))[len(batches) // 2], None
    prompts, start = make_requests(preprocessor, columns, settings, seed)
    n_tokens = min(settings.new_tokens, NEW_TOKENS)

    def request(session: Session) -> int:
        run_request(make_decoder(session, start, variant.artifact.cache), prompts[0], n_tokens)
        return n_tokens

    return None, request
