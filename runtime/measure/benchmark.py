"""How fast and how big: baseline and candidate, interleaved on this machine.

What is measured, always of both models in the same rounds: latency percentiles at `batch_size`, throughput at
`throughput_batch_size` (batch over the median time), and with `latency_limit_ms` the throughput at the largest
power-of-two batch whose p95 keeps the limit. Of a decoder whole requests are timed instead, `batch_size` prompts of
`prompt_tokens` and `new_tokens` after each: the first token, and every further one. Load time and peak memory come from
fresh processes. Whole answers, from bytes to labels, are timed beside calls; and energy, where the machine counts it.

Time is bounded: each of these stops after its budget below, but never before `timing.MIN_ROUNDS` rounds. Rounds whose
speed a gate is about last ten seconds at least, and rounds that drift are added to for as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends import BACKENDS, Feeds, Session, find_backend, open_artifact, open_model, open_options
from runtime.backends.base import Options
from runtime.backends.tensorrt import engine_problems
from runtime.bundle.engine import ENGINES
from runtime.bundle.format import (
    Artifact,
    Benchmark,
    Gate,
    Judgement,
    KvCacheSpec,
    Manifest,
    inside,
    read_samples,
    verify,
)
from runtime.decode.kv_cache import Decoder, EncodedDecoder
from runtime.decode.scoring import language_encoder
from runtime.encode.preprocess import Preprocessor
from runtime.encode.seq2seq import Seq2SeqEncoder, source_length
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.judge.evidence import (
    Evidence,
    cost_evidence,
    energy_evidence,
    latency_percentiles,
    range_evidence,
    request_evidence,
    size_evidence,
    throughput_under_latency_evidence,
    timing_evidence,
)
from runtime.judge.stats import fresh_processes_needed
from runtime.measure.answering import Answerer, make_sent, time_answers
from runtime.measure.energy import find_meter, measure_energy
from runtime.measure.environment import environment
from runtime.measure.probe import Probe, probe
from runtime.measure.timing import (
    LASTING_S,
    SETTLING_S,
    Best,
    Prompts,
    RequestTimes,
    device_rounds,
    find_limited_batches,
    goodput,
    large_batch_rounds,
    make_prompts,
    make_sources,
    run_request,
    time_requests,
    time_rounds,
)
from runtime.measure.workload import bound_batch, make_feeds, settings_for
from runtime.metrics.measured import END_TO_END_PERCENTILES, LATENCY_PERCENTILES
from runtime.tasks import find_task
from runtime.tasks.predict import bundle_preprocessor, encoding_views, facts_of

USUAL = "onnxruntime-cpu"
"""The backend that runs everything."""
LATENCY_BUDGET_S = 60.0
SHOWN_PROCESSES = 3
"""Fresh processes for load time and memory that no gate is about."""
THROUGHPUT_BUDGET_S = 30.0
ANSWERS_BUDGET_S = 20.0
LATENCIES = frozenset({*LATENCY_PERCENTILES, "latency_percentile"})
RATES = frozenset({"throughput", "cost_per_million"})
"""Metrics of single calls, and of large batches."""
Between = tuple[Path, KvCacheSpec | None]
"""A model's file, and a decoder's cache."""


@dataclass(frozen=True)
class Variant:
    """A way to run a model of the bundle."""

    artifact: Artifact
    backend: str
    precision: str
    """For people: the artifact's own, or what the backend is told to compute in."""
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class BenchmarkResult:
    """Raw times in seconds, row 0 the baseline and row 1 the candidate, and what they were taken with.

    Of a candidate that ran alone each array has its row only.
    """

    backend: str
    settings: Benchmark
    latency_s: np.ndarray  # [2, rounds]; of a decoder every step of every round
    throughput_s: np.ndarray | None  # [2, rounds]; None of a decoder
    limited: tuple[Best, Best] | None
    """None without `latency_limit_ms`, or of a decoder without `ttft_limit_ms` and `tpot_limit_ms`."""
    probes: tuple[Probe, ...]
    sizes: tuple[int | None, int]
    """Bytes; of a baseline that is not in the bundle those of the files that it came in."""
    environment: dict[str, Any]
    requests: RequestTimes | None = None
    """Of a decoder."""
    between_s: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    """[models, rounds]: of the models between the two, in the same rounds; of a decoder for each token."""
    device_s: np.ndarray | None = None
    """[2, rounds] by the GPU's own clock, copies left out; None where there is none."""
    answers_s: np.ndarray | None = None
    """[2, rounds, stages]: whole answers, by `answering.STAGES`; None of a decoder."""
    energy: np.ndarray | str = "it is not measured"
    """Joules for each sample or generated token, [2, blocks]; or why they are not known."""

    @property
    def rounds(self) -> int:
        """Return how many rounds were timed."""
        return int(self.latency_s.shape[1] if self.requests is None else self.requests.first.shape[1])


def benchmark(path: str | Path, backend: str | None = None, threads: int | None = None) -> BenchmarkResult:
    """Measure baseline and candidate of a bundle; `threads` replaces the bundle's own setting. Writes nothing.

    Raises BundleError if the bundle is not intact, UsageError for an unknown backend, RuntimeFailure where a run fails.
    """
    root = Path(path)
    manifest = verify(root)
    columns = read_samples(root, manifest)
    chosen, _ = backend_of(manifest, backend)
    return measure(root, manifest, columns, chosen, threads)


def choose_backend(target: str, asked: str | None, generates: bool = False) -> tuple[str, str | None]:
    """Return the backend to run on, and a note where it is not the one that the bundle was made for.

    UsageError for an unknown backend or one that does not run such a model, RuntimeFailure where it does not work here.
    """
    if asked is not None:
        _check_backend(asked)
        if generates and not BACKENDS[asked].decoders:
            some = ", ".join(backend.name for backend in BACKENDS.values() if backend.decoders)
            raise UsageError(f"backend '{asked}' does not run decoders; use one of {some}")
        return asked, None
    reason = explain_unavailable(target, generates)
    if reason is None:
        return target, None
    _check_backend(USUAL)
    return USUAL, f"The bundle was made for {target}, but it runs on {USUAL} here: {reason}."


def graph_backend(target: str, generates: bool = False) -> str:
    """Return what runs ONNX files on the way to a bundle for `target`: its backend, unless that runs engines alone."""
    name, _ = choose_backend(target, None, generates)
    return USUAL if name in ENGINES else name


def backend_of(manifest: Manifest, asked: str | None) -> tuple[str, str | None]:
    """Choose a bundle's backend as `choose_backend` does: its engine must be there, and run on this machine."""
    name, note = choose_backend(manifest.target, asked, manifest.generates)
    why = engine_trouble(manifest, name)
    if why is None:
        return name, note
    if asked is not None:
        raise RuntimeFailure(f"backend '{name}': {why}")
    return USUAL, f"The bundle was made for {manifest.target}, but it runs on {USUAL} here: {why}."


def engine_trouble(manifest: Manifest, backend: str) -> str | None:
    """Return why the bundle's engines for a backend that works here cannot be run.

    None where they can, or it runs graphs.
    """
    if backend not in ENGINES:
        return None
    for artifact in (manifest.candidate_for(backend), manifest.baseline_for(backend)):
        if artifact.engine is None:
            return f"the {artifact.name} has not been compiled for it: compress compile BUNDLE"
        if problems := engine_problems(artifact.engine):
            return f"{artifact.name}: {problems[0]}"
    return None


def explain_unavailable(target: str, generates: bool) -> str | None:
    """Return why a bundle for `target` is not run on it here; None where it is."""
    if target not in BACKENDS:
        return "there is no backend of that name here"
    if generates and not BACKENDS[target].decoders:
        return "that backend does not run decoders"
    return BACKENDS[target].available()


def _check_backend(name: str) -> None:
    reason = find_backend(name).available()
    if reason is not None:
        raise RuntimeFailure(f"backend '{name}' does not work here: {reason}")


def pair(manifest: Manifest, backend: str) -> tuple[Variant, Variant]:
    """Return baseline and candidate on a backend; BundleError if one of them is missing or cannot be run."""
    names = {artifact.name for artifact in manifest.artifacts}
    if "baseline" not in names:
        raise BundleError(f"the bundle has no artifact 'baseline' to compare with; it has {', '.join(sorted(names))}")
    before, after = manifest.baseline_for(backend), manifest.candidate_for(backend)
    for artifact in (before, after):
        if artifact.is_checkpoint:
            raise BundleError(f"the {artifact.name} is a checkpoint for {artifact.target}, which is not run here")
    if manifest.is_scored(backend):
        raise BundleError(f"the {after.name} is a graph for {after.target}, whose numbers nothing else computes with")
    return Variant(before, backend, before.precision), Variant(after, backend, after.precision)


def list_variants(manifest: Manifest, backend: str) -> tuple[Variant, ...]:
    """Return baseline and candidate on a backend as `pair` does; of a bundle without a baseline the candidate alone."""
    if not manifest.alone:
        return pair(manifest, backend)
    after = manifest.candidate_for(backend)
    return (Variant(after, backend, after.precision),)


def measure(
    root: Path,
    manifest: Manifest,
    columns: Mapping[str, Any],
    backend: str,
    threads: int | None = None,
    between: Sequence[Between] = (),
) -> BenchmarkResult:
    """Measure a bundle that has been read already, as `benchmark` does.

    The models `between` run in the same rounds; only their latency is measured.
    """
    (settings, _), seed = settings_for(manifest, threads), manifest.judgement.seed
    n_threads = settings.threads
    variants = list_variants(manifest, backend)
    if manifest.generates:
        return _measure_requests(root, manifest, columns, settings, variants, between)
    given = encoding_views(manifest.task, columns)[0]
    budget_s = LATENCY_BUDGET_S * (1 + len(between) / 2)  # as many rounds as without them
    with ExitStack() as stack:
        sessions = [open_variant(stack, root, variant, n_threads) for variant in variants]
        sessions += [_open_graph(stack, backend, path, n_threads) for path, _ in between]
        preprocessors = [bundle_preprocessor(root, manifest, session.inputs) for session in sessions]

        def make_batches(batch_size: int) -> list[list[Feeds]]:
            return [make_feeds(p, given, batch_size, seed, settings.sequence_length) for p in preprocessors]

        single = make_batches(settings.batch_size)
        gates = manifest.judgement.gates
        lasting_s = find_lasting_s(gates, LATENCIES)
        latency = time_rounds(
            sessions, single, settings.iterations, settings.warmup, seed, budget_s, SETTLING_S, lasting_s
        )
        del sessions[2:], preprocessors[2:], single[2:]
        on_device = device_rounds(sessions, single, settings.iterations)
        many, rounds = make_batches(settings.throughput_batch_size), large_batch_rounds(settings)
        throughput = time_rounds(
            sessions,
            many,
            rounds,
            min(settings.warmup, 3),
            seed,
            THROUGHPUT_BUDGET_S,
            SETTLING_S,
            find_lasting_s(gates, RATES),
        )
        answers = _time_answers(manifest, given, sessions, preprocessors, settings)
        energy = _measure_energy(
            backend, [_run_feeds(*pair) for pair in zip(sessions, many, strict=True)], settings.throughput_batch_size
        )
        fixed = bound_batch(manifest)
        limited = (
            find_limited_batches(sessions, make_batches, fixed, settings, seed) if settings.latency_limit_ms else None
        )
    repeats = _count_processes(manifest.judgement)
    before, after = (
        probe(
            v.backend,
            inside(root, v.artifact.path),
            n_threads,
            batches[0],
            open_options(root, v.artifact, v.options),
            None,
            0,
            repeats,
        )
        for v, batches in zip(variants, single, strict=True)
    )
    sizes = variants[0].artifact.size_bytes, variants[1].artifact.size_bytes
    return BenchmarkResult(
        backend,
        settings,
        latency[:2],
        throughput,
        limited,
        (before, after),
        sizes,
        environment(n_threads),
        between_s=latency[2:],
        device_s=on_device,
        answers_s=answers,
        energy=energy,
    )


def find_lasting_s(gates: Sequence[Gate], metrics: frozenset[str]) -> float:
    """Return how many seconds the rounds that tell these metrics last at least: some, where a gate is about them."""
    return LASTING_S if metrics & {gate.metric for gate in gates} else 0.0


def _time_answers(
    manifest: Manifest,
    columns: Mapping[str, Any],
    sessions: Sequence[Session],
    preprocessors: Sequence[Preprocessor],
    settings: Benchmark,
) -> np.ndarray:
    """Time whole answers of baseline and candidate, float64 [2, rounds, stages]."""
    task, seed = find_task(manifest.task), manifest.judgement.seed
    answerers = [
        Answerer(session, preprocessor, task, facts_of(manifest))
        for session, preprocessor in zip(sessions, preprocessors, strict=True)
    ]
    sent = make_sent(preprocessors[0], columns, settings.batch_size, seed)
    return time_answers(answerers, sent, settings.iterations, settings.warmup, seed, ANSWERS_BUDGET_S)


def _measure_energy(backend: str, works: Sequence[Callable[[int], object]], amount: int) -> np.ndarray | str:
    """Return joules for each piece of work, [2, blocks], `amount` pieces a call; or why they are not known."""
    meter = find_meter(backend)
    return meter if isinstance(meter, str) else measure_energy(meter, works, [amount] * len(works))


def _measure_requests(
    root: Path,
    manifest: Manifest,
    columns: Mapping[str, Any],
    settings: Benchmark,
    variants: tuple[Variant, ...],
    between: Sequence[Between],
) -> BenchmarkResult:
    """Measure decoders, as `measure` does other models. `variants`: the last one is the candidate."""
    n_models, (*_, last) = len(variants), variants
    seed, threads = manifest.judgement.seed, settings.threads
    with ExitStack() as stack:
        sessions = [open_variant(stack, root, variant, threads) for variant in variants]
        encoder = bundle_preprocessor(root, manifest, sessions[0].inputs)
        opened = [(session, variant.artifact.cache) for session, variant in zip(sessions, variants, strict=True)]
        opened += [(_open_graph(stack, variants[0].backend, path, threads), cache) for path, cache in between]
        start = encoder.target.start_tokens if isinstance(encoder, Seq2SeqEncoder) else ()
        decoders = [EncodedDecoder(s, start) if start else Decoder(s, cache) for s, cache in opened]

        def make_batches(batch_size: int) -> Sequence[Prompts]:
            if isinstance(encoder, Seq2SeqEncoder):
                return make_sources(encoder, columns, batch_size, settings.prompt_tokens, seed)
            return make_prompts(language_encoder(encoder), columns, batch_size, settings.prompt_tokens, seed)

        def time_batch(batch_size: int, rounds: int, warmup: int, budget_s: float) -> RequestTimes:
            prompts = make_batches(batch_size)
            return time_requests(decoders, prompts, settings.new_tokens, rounds, warmup, seed, budget_s)

        budget_s = LATENCY_BUDGET_S * (1 + len(between) / 2)  # as many rounds as without them
        every = time_batch(settings.batch_size, settings.iterations, min(settings.warmup, 3), budget_s)
        times = RequestTimes(every.first[:n_models], every.steps[:n_models], of_prompts=reads_prompts(encoder))
        del decoders[n_models:]
        prompts = make_batches(settings.batch_size)
        energy = _measure_energy(
            variants[0].backend,
            [_run_prompts(decoder, prompts, settings.new_tokens) for decoder in decoders],
            settings.batch_size * settings.new_tokens,
        )
        limits = settings.ttft_limit_ms, settings.tpot_limit_ms
        limited = None if limits == (None, None) or n_models == 1 else goodput(time_batch, settings)
    given = prompts[0] if isinstance(prompts[0], dict) else {"prompts": np.stack(prompts[0])}
    probes = tuple(
        probe(
            v.backend,
            inside(root, v.artifact.path),
            threads,
            given,
            open_options(root, v.artifact, v.options),
            v.artifact.cache,
            settings.new_tokens,
            _count_processes(manifest.judgement),
            start,
        )
        for v in variants
    )
    return BenchmarkResult(
        variants[0].backend,
        settings,
        times.steps.reshape(n_models, -1),
        None,
        limited,
        probes,
        (manifest.source_bytes if n_models == 1 else variants[0].artifact.size_bytes, last.artifact.size_bytes),
        environment(threads),
        times,
        every.per_token[n_models:],
        energy=energy,
    )


def reads_prompts(encoder: Preprocessor) -> bool:
    """Return whether requests are texts, whose tokens can be counted."""
    return not isinstance(encoder, Seq2SeqEncoder) or source_length(encoder.spec.source) is not None


def _run_feeds(session: Session, feeds: Sequence[Feeds]) -> Callable[[int], object]:
    """Return what makes the n-th call of a model, its batches in turn."""
    return lambda n: session.run(feeds[n % len(feeds)])


def _run_prompts(
    decoder: Decoder | EncodedDecoder, prompts: Sequence[Prompts], new_tokens: int
) -> Callable[[int], object]:
    """Return what makes the n-th request of a decoder, its prompts in turn."""
    return lambda n: run_request(decoder, prompts[n % len(prompts)], new_tokens)


def _count_processes(judgement: Judgement) -> int:
    """Return how many fresh processes measure load time and memory: what an interval needs, where a gate asks."""
    gated = {gate.metric for gate in judgement.gates} & {"load_time", "peak_memory"}
    return fresh_processes_needed(judgement.confidence) if gated else SHOWN_PROCESSES


def open_variant(stack: ExitStack, root: Path, variant: Variant, threads: int) -> Session:
    """Open a session of the variant, which closes with the stack."""
    session = open_artifact(root, variant.artifact, variant.backend, threads, variant.options)
    stack.callback(session.close)
    return session


def _open_graph(stack: ExitStack, backend: str, path: Path, threads: int) -> Session:
    session = open_model(find_backend(backend), path, threads, {})
    stack.callback(session.close)
    return session


def speed_evidence(result: BenchmarkResult, judgement: Judgement) -> dict[str, Evidence]:
    """Return evidence of every measured metric, by name."""
    if result.requests is not None:
        evidence = request_evidence(result.requests, replace(judgement, benchmark=result.settings))
    else:
        percentiles = latency_percentiles(result.settings)
        evidence = {n: timing_evidence(n, p, result.latency_s, judgement) for n, p in percentiles.items()}
    if result.answers_s is not None:
        whole = result.answers_s.sum(axis=2)
        evidence |= {n: timing_evidence(n, p, whole, judgement) for n, p in END_TO_END_PERCENTILES.items()}
    if not isinstance(result.energy, str):
        evidence["energy"] = energy_evidence(result.energy, judgement)
    batch_size = result.settings.throughput_batch_size
    if result.throughput_s is not None:
        evidence["throughput"] = timing_evidence("throughput", 50, result.throughput_s, judgement, batch_size)
        if result.settings.price_per_hour is not None:
            evidence["cost_per_million"] = cost_evidence(
                result.throughput_s, replace(judgement, benchmark=result.settings)
            )
    if result.limited is not None:
        name = "throughput_under_latency" if result.requests is None else "goodput"
        evidence[name] = throughput_under_latency_evidence(result.limited, judgement, name)
    *first, after = result.probes
    before = first[0] if first else None
    memory, load = (before.peak_memory_bytes, before.load_ms) if before else (None, None)
    evidence["peak_memory"] = range_evidence("peak_memory", memory, after.peak_memory_bytes, judgement)
    evidence["load_time"] = range_evidence("load_time", load, after.load_ms, judgement)
    return evidence | size_evidence(*result.sizes)
