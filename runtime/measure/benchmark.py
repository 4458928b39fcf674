"""How fast and how big: baseline and candidate, timed in turn in several fresh processes of this machine.

What is measured, always of both models in the same rounds: latency percentiles at `batch_size`, throughput at
`throughput_batch_size` (batch over the median time), and with `latency_limit_ms` the throughput at the largest
power-of-two batch whose `latency_percentile` keeps the limit. Of a decoder whole requests are timed instead,
`batch_size` prompts of `prompt_tokens` and `new_tokens` after each. Each process also tells the load time and the peak
memory of the model that it opened first, whole answers, from bytes to labels, and energy, where the machine counts it.

Time is bounded (the budgets below, of all processes together), but for a least number of rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from runtime.backends import BACKENDS, Feeds, Session, find_backend, open_artifact, open_options
from runtime.backends.base import Options
from runtime.backends.tensorrt import engine_problems
from runtime.bundle.columns import Array, Columns
from runtime.bundle.engine import COMPILED, ENGINES
from runtime.bundle.files import name_file
from runtime.bundle.format import Artifact, Benchmark, Judgement, KvCacheSpec, Manifest, inside, read_samples
from runtime.bundle.records import to_json
from runtime.clock.fresh import Answer, run_fresh, write_batches
from runtime.clock.machine import environment
from runtime.encode.preprocess import Preprocessor
from runtime.encode.seq2seq import Seq2SeqEncoder, source_length
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.measure.process import FEEDS, Order, Seconds, TimedModel
from runtime.measure.requests import RequestTimes, make_requests
from runtime.measure.workload import make_feeds, settings_for
from runtime.metrics import MEASURED, SIZES
from runtime.metrics.measured import END_TO_END_PERCENTILES, LATENCY_PERCENTILES
from runtime.progress import Progress, no_progress
from runtime.stats import fresh_processes_needed
from runtime.tasks import find_task
from runtime.tasks.manifest import verify
from runtime.tasks.predict import bundle_preprocessor, encoding_views

USUAL = "onnxruntime-cpu"
"""The backend that runs everything."""
LATENCY_BUDGET_S, THROUGHPUT_BUDGET_S, ANSWERS_BUDGET_S, LIMIT_BUDGET_S = 60.0, 30.0, 20.0, 30.0
"""Seconds of all processes together; the last for each batch size that is tried."""
LASTING_S = 6.0
"""How long calls last in all processes together where a gate asks for their speed: of a CNN of 0.1 ms ratios then
scatter by 0.7 % between processes, idle and beside two spinning ones alike."""
SHOWN = 3
"""Processes that time what no gate is about: whole answers, models beside the judged ones."""
LATENCIES = frozenset({*LATENCY_PERCENTILES, "latency_percentile"})
RATES = frozenset({"throughput", "cost_per_million"})
"""Metrics of single calls, and of large batches."""
MEMORY = frozenset({"load_time", "peak_memory"})
"""Metrics that each process tells of one model alone."""


@dataclass(frozen=True)
class Probe:
    """What each of several fresh processes saw of a model that it opened first."""

    load_ms: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]


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
    """Times in seconds, as each of several fresh processes took them, and what they were taken with.

    The axis of models has the baseline first and then the candidate; of a candidate that ran alone it alone.
    """

    backend: str
    settings: Benchmark
    calls: Array | None
    """[processes, models, rounds, calls]; None of a decoder."""
    large: Array | None
    """[processes, models, rounds, calls]: calls with `throughput_batch_size` samples; None of a decoder."""
    requests: RequestTimes | None
    """Of a decoder, with an axis of processes first."""
    probes: tuple[Probe, ...]
    sizes: tuple[int | None, int]
    """Bytes; of a baseline that is not in the bundle those of the files that it came in."""
    environment: dict[str, Any]
    taken: float
    """The share of the time that other work had the processor instead."""
    set_apart: int
    """Rounds that others disturbed, and that are not among these."""
    limited: Array | None = None
    """[processes, models]: samples (of a decoder requests) per second within the limit; None without one."""
    beside_ms: tuple[float | None, ...] = ()
    """Of the models beside: a call, of a decoder a further token; None where it failed."""
    errors: dict[int, str] = field(default_factory=dict)
    """Number of a model beside -> why it failed."""
    device: Array | None = None
    """[processes, models, rounds] by the GPU's own clock, copies left out; None where there is none."""
    answers: Array | None = None
    """[processes, models, rounds, stages]: whole answers, by `answering.STAGES`; None of a decoder."""
    energy: Array | str = "it is not measured"
    """Joules for each sample or generated token, [processes, models, blocks]; or why they are not known."""

    @property
    def n_processes(self) -> int:
        return len(self.first_times)

    @property
    def first_times(self) -> Array:
        """Return what was timed of a call, [processes, models, ...]; of a decoder each further token."""
        if self.requests is not None:
            return self.requests.steps
        assert self.calls is not None
        return self.calls


def benchmark(
    path: str | Path, backend: str | None = None, threads: int | None = None, progress: Progress = no_progress
) -> BenchmarkResult:
    """Measure baseline and candidate of a bundle; `threads` replaces the bundle's own setting. Writes nothing.

    Raises BundleError if the bundle is not intact, UsageError for an unknown backend, RuntimeFailure where a run fails.
    """
    root = Path(path)
    manifest = verify(root)
    columns = read_samples(root, manifest)
    chosen, _ = backend_of(manifest, backend)
    return measure(root, manifest, columns, chosen, threads, progress=progress)


class Judged(Protocol):
    """A recipe or a manifest: what its graphs are made for, and whether they are decoders."""

    @property
    def target(self) -> str: ...

    @property
    def generates(self) -> bool: ...


def can_run(backend: str, judged: Judged) -> bool:
    """Return whether a backend runs such a model, decoder or not."""
    return find_backend(backend).decoders or not judged.generates


def choose_backend(judged: Judged, asked: str | None = None) -> tuple[str, str | None]:
    """Return the backend to run on, and a note where it is not the one that the bundle was made for.

    UsageError for an unknown backend or one that does not run such a model, RuntimeFailure where it does not work here.
    """
    if asked is not None:
        _check_backend(asked)
        if not can_run(asked, judged):
            some = ", ".join(backend.name for backend in BACKENDS.values() if backend.decoders)
            raise UsageError(f"backend '{asked}' does not run decoders; use one of {some}")
        return asked, None
    reason = explain_unavailable(judged)
    if reason is None:
        return judged.target, None
    _check_backend(USUAL)
    return USUAL, f"The bundle was made for {judged.target}, but it runs on {USUAL} here: {reason}."


def graph_backend(judged: Judged) -> str:
    """Return what runs ONNX files on the way to a bundle: its target's backend, unless that runs compiled ones."""
    name, _ = choose_backend(judged)
    return USUAL if name in COMPILED else name


def backend_of(manifest: Manifest, asked: str | None) -> tuple[str, str | None]:
    """Choose a bundle's backend as `choose_backend` does: its engine must be there, and run on this machine."""
    name, note = choose_backend(manifest, asked)
    why = engine_trouble(manifest, name)
    if why is None:
        return name, note
    if asked is not None:
        raise RuntimeFailure(f"backend '{name}': {why}")
    return USUAL, f"The bundle was made for {manifest.target}, but it runs on {USUAL} here: {why}."


def engine_trouble(manifest: Manifest, backend: str) -> str | None:
    """Return why the bundle's engines, or .pte files, for a backend that works here cannot be run.

    None where they can, or it runs graphs.
    """
    if backend not in COMPILED:
        return None
    for artifact in (manifest.candidate_for(backend), manifest.baseline_for(backend)):
        if artifact.kind == "pte":
            continue
        if backend not in ENGINES:
            return f"the {artifact.name} has not been written for it: add {{kind: {backend}}} to the recipe's export"
        if artifact.engine is None:
            return f"the {artifact.name} has not been compiled for it: compress compile BUNDLE"
        if problems := engine_problems(artifact.engine):
            return f"{artifact.name}: {problems[0]}"
    return None


def explain_unavailable(judged: Judged) -> str | None:
    """Return why a bundle is not run here on what it is made for; None where it is."""
    if judged.target not in BACKENDS:
        return "there is no backend of that name here"
    if not can_run(judged.target, judged):
        return "that backend does not run decoders"
    return BACKENDS[judged.target].available()


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


@dataclass(frozen=True)
class Beside:
    """A model that is timed beside the judged ones: where its file lies, and how it is opened."""

    path: Path
    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    cache: KvCacheSpec | None = None


def measure(
    root: Path,
    manifest: Manifest,
    columns: Mapping[str, Any],
    backend: str,
    threads: int | None = None,
    beside: Sequence[Beside] = (),
    progress: Progress = no_progress,
) -> BenchmarkResult:
    """Measure a bundle that has been read already, as `benchmark` does, in fresh processes one after the other.

    The models `beside` are timed in the same processes; one that fails is said in `errors`, and nothing else.
    `progress` is told which process it is.
    """
    settings, _ = settings_for(manifest, threads)
    variants = list_variants(manifest, backend)
    unit, start = find_task(manifest.task).unit, tuple[int, ...]()
    with tempfile.TemporaryDirectory(prefix="measure.") as folder:
        if unit == "token":  # what is read is the same on every backend; the graph of the model names all of it
            graph = next(artifact for artifact in manifest.artifacts if artifact.kind == "onnx")
            encoder = bundle_preprocessor(root, manifest, graph.inputs)
            prompts, start = make_requests(encoder, columns, settings, manifest.judgement.seed)
            batches = {"single 0": [p if isinstance(p, dict) else {"prompts": np.stack(p)} for p in prompts]}
        else:
            preprocessors = [bundle_preprocessor(root, manifest, variant.artifact.inputs) for variant in variants]
            encoder, batches = preprocessors[0], _make_batches(preprocessors, manifest, columns, settings)
        with name_file(Path(folder) / FEEDS):
            write_batches(Path(folder) / FEEDS, batches)
        models = [_describe_model(root, variant, number) for number, variant in enumerate(variants)]
        models += [TimedModel(str(model.path), model.backend, model.options, 0, model.cache) for model in beside]
        order = Order(
            models=tuple(models),
            n_judged=len(variants),
            root=str(root.absolute()),
            folder=folder,
            settings=settings,
            seconds=Seconds(0.0, 0.0, 0.0, 0.0),
            index=0,
            seed=manifest.judgement.seed,
            unit=unit,
            start_tokens=start,
        )
        answers = _run_processes(order, manifest.judgement, str(root), progress)
    return _collect(answers, order, settings, variants, manifest, encoder)


def _make_batches(
    preprocessors: Sequence[Preprocessor], manifest: Manifest, columns: Columns, settings: Benchmark
) -> dict[str, list[Feeds]]:
    """Return what each model's calls read, single batches and large ones, by part and number of the model."""
    given, seed, length = encoding_views(manifest.task, columns)[0], manifest.judgement.seed, settings.sequence_length
    batches = {}
    for number, encoder in enumerate(preprocessors):
        batches[f"single {number}"] = make_feeds(
            encoder, given, settings.batch_size, seed, length, streams=manifest.streams
        )
        size = settings.throughput_batch_size
        # 8 different ones: a process reads all of them before it measures
        batches[f"large {number}"] = make_feeds(encoder, given, size, seed, length, 8, manifest.streams)
    return batches


def _describe_model(root: Path, variant: Variant, number: int) -> TimedModel:
    path = inside(root, variant.artifact.path).absolute()
    options = dict(open_options(root, variant.artifact, variant.options))
    return TimedModel(str(path), variant.backend, options, number, variant.artifact.cache)


def count_processes(judgement: Judgement) -> int:
    """Return how many fresh processes measure: as many as have an interval, and more where a gate is about speed.

    With more, an odd one on either side does not widen the interval.
    """
    least, gated = count_least_processes(judgement), {gate.metric for gate in judgement.gates}
    if judgement.benchmark.processes is not None:
        return judgement.benchmark.processes
    usual = fresh_processes_needed(judgement.confidence, odd=1) if gated & MEASURED.keys() - SIZES else least
    return max(least, usual)


def count_least_processes(judgement: Judgement) -> int:
    """Return how many fresh processes have an interval: twice as many of load time and memory, told by half of them."""
    half = {gate.metric for gate in judgement.gates} & MEMORY
    return fresh_processes_needed(judgement.confidence) * (2 if half else 1)


def _run_processes(order: Order, judgement: Judgement, name: str, progress: Progress) -> list[Answer]:
    """Run the order in one process after the other; all make as many calls as the first."""
    count = count_processes(judgement)
    gated = {gate.metric for gate in judgement.gates}
    each = max(1, -(-order.settings.iterations // count))
    order = replace(
        order,
        settings=replace(order.settings, iterations=each),
        seconds=Seconds(
            LATENCY_BUDGET_S / count,
            THROUGHPUT_BUDGET_S / count,
            ANSWERS_BUDGET_S / count,
            LIMIT_BUDGET_S / count,
            LASTING_S / count if gated & LATENCIES else 0.0,
            LASTING_S / count if gated & RATES else 0.0,
        ),
    )
    always, judged = bool(gated & END_TO_END_PERCENTILES.keys()), order.models[: order.n_judged]
    answers: list[Answer] = []
    for index in progress(range(count), "timing in fresh processes"):
        if index == count:
            break
        shown = index % max(1, count // SHOWN) == 0  # spread, so that what is done tells how long the rest takes
        asked = replace(order, index=index, models=order.models if shown else judged, answers=always or shown)
        answers.append(run_fresh("runtime.measure.process:measure_process", to_json(asked), f"{name}: timing"))
        if index == 0:
            record = answers[0][0]
            order = replace(order, shapes={part: (shape[0], shape[1]) for part, shape in record["shapes"].items()})
            # then as few processes as have an interval are started
            slow = record["starting_s"] > 5.0 and judgement.benchmark.processes is None
            if slow and not gated & MEMORY:
                count = min(count, fresh_processes_needed(judgement.confidence))
    return answers


def _collect(
    answers: Sequence[Answer],
    order: Order,
    settings: Benchmark,
    variants: Sequence[Variant],
    manifest: Manifest,
    preprocessor: Preprocessor,
) -> BenchmarkResult:
    records = [record for record, _ in answers]

    def stack(part: str) -> Array | None:
        arrays = [found[part] for _, found in answers if part in found]
        return np.stack(arrays) if arrays else None

    first, steps, energy = stack("first"), stack("steps"), stack("energy")
    requests = None
    if first is not None and steps is not None:
        requests = RequestTimes(first, steps, settings.new_tokens, reads_prompts(preprocessor))
    baseline_bytes = manifest.source_bytes if len(variants) == 1 else variants[0].artifact.size_bytes
    main = "calls" if requests is None else "requests"
    taken = float(np.mean([record["taken"].get(main, 0.0) for record in records]))
    probes = [
        [record["probe"] for record in records if record["probe"]["model"] == number] for number in range(len(variants))
    ]
    errors = {int(number): text for record in records for number, text in record["errors"].items()}
    result = BenchmarkResult(
        order.models[0].backend,
        settings,
        stack("calls"),
        stack("large"),
        requests,
        tuple(
            Probe(tuple(seen["load_ms"] for seen in of_model), tuple(seen["peak_memory_bytes"] for seen in of_model))
            for of_model in probes
        ),
        (baseline_bytes, variants[-1].artifact.size_bytes),
        environment(settings.threads) | {"taken": round(taken, 3)},
        taken,
        sum(record["set_apart"] for record in records),
        stack("limited"),
        errors=errors,
        device=stack("device"),
        answers=stack("answers"),
        energy=energy if energy is not None else records[0].get("energy", "it is not measured"),
    )
    ratios = stack("beside")  # [processes, models beside], to the baseline
    if ratios is None:
        return result
    baseline_ms = 1000 * float(np.median(find_medians(result.first_times)[:, 0]))
    return replace(
        result,
        beside_ms=tuple(
            None if number in errors else baseline_ms * float(np.median(of_model))
            for number, of_model in enumerate(ratios.T)
        ),
    )


def find_medians(seconds: Array) -> Array:
    """Return each process's median, [processes, models], of seconds [processes, models, ...]."""
    medians: Array = np.median(seconds.reshape(*seconds.shape[:2], -1), axis=2)
    return medians


def reads_prompts(encoder: Preprocessor) -> bool:
    """Return whether requests are texts, whose tokens can be counted."""
    return not isinstance(encoder, Seq2SeqEncoder) or source_length(encoder.spec.source) is not None


def open_variant(stack: ExitStack, root: Path, variant: Variant, threads: int) -> Session:
    """Open a session of the variant, which closes with the stack."""
    session = open_artifact(root, variant.artifact, variant.backend, threads, variant.options)
    stack.callback(session.close)
    return session
