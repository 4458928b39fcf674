"""What one fresh process measures of a bundle's models: load time, peak memory, calls or requests in turn, energy.

The first model that it opens tells load time and memory: processes take turns in which one that is. The library is
imported before, so that what is counted is the model.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtime.backends import Feeds, Session, find_backend, open_model
from runtime.backends.base import DeviceTimed
from runtime.bundle.columns import Array
from runtime.bundle.format import Benchmark, read_samples
from runtime.bundle.manifest import KvCacheSpec, fixed_batch
from runtime.bundle.records import from_json
from runtime.clock.compare import RUNS
from runtime.clock.fresh import Answer, read_batches
from runtime.clock.machine import peak_memory_bytes
from runtime.clock.turns import MIN_ROUNDS, Call, make_call, time_in_turns
from runtime.decode.kv_cache import Decoder, EncodedDecoder
from runtime.measure.answering import Answerer, make_sent, time_answers
from runtime.measure.energy import find_meter, measure_energy
from runtime.measure.requests import (
    WARM_TOKENS,
    Prompts,
    RequestTimes,
    find_goodput,
    make_decoder,
    run_request,
    time_requests,
)
from runtime.tasks import find_task
from runtime.tasks.manifest import read_manifest
from runtime.tasks.predict import bundle_preprocessor, encoding_views, facts_of

FEEDS = "feeds.npz"


@dataclass(frozen=True)
class Seconds:
    """Seconds that the parts of a measurement may take in one process; `least_*`: last at least."""

    calls: float
    large: float
    answers: float
    limited: float
    least_calls: float = 0.0
    least_large: float = 0.0


@dataclass(frozen=True)
class TimedModel:
    """A model to open. `feeds`: number of the feeds that it reads, among those that were written for the process."""

    path: str
    backend: str
    options: dict[str, Any]
    feeds: int = 0
    cache: KvCacheSpec | None = None


@dataclass(frozen=True)
class Order:
    """What a process is to measure. `models`: the judged ones first, `n_judged`, the rest beside the first of them.

    `folder`: holds FEEDS; `root`: the bundle. `answers`: also time whole answers. `start_tokens`: of an
    encoder-decoder; `unit`: what is timed. `shapes`: rounds and calls that an earlier process made, by part; of
    "requests" their number and the tokens of each.
    """

    models: tuple[TimedModel, ...]
    n_judged: int
    root: str
    folder: str
    settings: Benchmark
    seconds: Seconds
    index: int
    seed: int
    unit: Literal["call", "token"] = "call"
    answers: bool = True
    start_tokens: tuple[int, ...] = ()
    shapes: dict[str, tuple[int, int]] | None = None


def measure_process(task: Mapping[str, Any]) -> Answer:
    """Do an `Order`, given as JSON values. Raises what the backends raise, but for models beside the judged ones."""
    order = from_json(Order, task, "order")
    with ExitStack() as stack:
        process: _Process = {"call": _Calls, "token": _Requests}[order.unit](order, stack)
        return process.measure()


class _Process(ABC):
    def __init__(self, order: Order, stack: ExitStack) -> None:
        self.order, self.stack, self.settings = order, stack, order.settings
        self.begun = time.perf_counter()
        self.batches = read_batches(Path(order.folder) / FEEDS)
        judged = [find_backend(model.backend) for model in order.models[: order.n_judged]]
        self.one_thread = order.settings.threads == 1 and not any(backend.on_gpu for backend in judged)
        self.record: dict[str, Any] = {"shapes": {}, "taken": {}, "set_apart": 0, "errors": {}}
        self.arrays: dict[str, Array] = {}

    def measure(self) -> Answer:
        n, first = self.order.n_judged, self.order.index % self.order.n_judged
        sessions = {first: self._probe(first)}
        if first:  # the larger one is opened first: its largest weight is held twice meanwhile
            sessions.pop(first).close()
        for number in range(n):
            sessions[number] = sessions.get(number) or self._open(self.order.models[number])
        self.record["starting_s"] = time.perf_counter() - self.begun
        self._time([sessions[number] for number in range(n)])
        return self.record, self.arrays

    def _probe(self, number: int) -> Session:
        """Open the first model of the process; record how long that took, and the memory that its first use takes."""
        model = self.order.models[number]
        find_backend(model.backend).library()
        bare, start = peak_memory_bytes(), time.perf_counter()
        session = self._open(model)
        self.record["probe"] = {"model": number, "load_ms": 1000 * (time.perf_counter() - start)}
        self._run_some(number, session)
        self.record["probe"]["peak_memory_bytes"] = max(peak_memory_bytes() - bare, 0)
        return session

    @abstractmethod
    def _run_some(self, number: int, session: Session) -> None:
        """Use a model for the first time, so that it holds what it needs."""

    @abstractmethod
    def _time(self, judged: Sequence[Session]) -> None:
        """Time the judged models in turn, and with the first of them those beside."""

    def _open(self, model: TimedModel) -> Session:
        session = open_model(find_backend(model.backend), Path(model.path), self.settings.threads, model.options)
        self.stack.callback(session.close)
        return session

    def _open_beside(self, make: Callable[[int, Session], Any]) -> list[Any]:
        """Return what is timed of the models beside the judged ones, made by `make`; None where one fails, and why."""
        opened = []
        for number in range(self.order.n_judged, len(self.order.models)):
            try:
                made = make(number, self._open(self.order.models[number]))
            except Exception as error:  # noqa: BLE001 - an optional model never ends the run, whatever a library raises
                self.record["errors"][str(number - self.order.n_judged)] = str(error) or type(error).__name__
                made = None
            opened.append(made)
        return opened

    def _measure_energy(self, works: Sequence[Call], amount: int) -> None:
        meter = find_meter(self.order.models[0].backend)
        if isinstance(meter, str):
            self.record["energy"] = meter
        else:
            self.arrays["energy"] = measure_energy(meter, works, [amount] * len(works))


class _Calls(_Process):
    """Of models that answer a call: calls of one batch size, of a large one, and whole answers."""

    def _run_some(self, number: int, session: Session) -> None:
        call = self._make_call(number, session, "single")
        for _ in range(RUNS):
            call(0)

    def _time(self, judged: Sequence[Session]) -> None:
        settings, seconds = self.settings, self.order.seconds
        single = [self._make_call(number, session, "single") for number, session in enumerate(judged)]
        self.arrays["calls"] = self._time_part("calls", single, settings.iterations, seconds.calls, seconds.least_calls)
        on_device = time_on_device(judged, single)
        if on_device is not None:
            self.arrays["device"] = on_device
        self._time_beside(single[0], lambda number, session: self._make_call(number, session, "single"))
        large = [self._make_call(number, session, "large") for number, session in enumerate(judged)]
        count = max(1, settings.iterations // 4)  # each is many samples
        self.arrays["large"] = self._time_part("large", large, count, seconds.large, seconds.least_large)
        self._measure_energy(large, settings.throughput_batch_size)
        if settings.latency_limit_ms:
            self.arrays["limited"] = np.array(self._find_limited(judged))
        if self.order.answers:
            self._time_answers(judged)

    def _read_batches(self, number: int, session: Session, part: str) -> list[Feeds]:
        """Return the batches that a model's calls read; inputs that it lacks are left out of them."""
        wanted = {spec.name for spec in session.inputs}
        return [
            {name: values for name, values in batch.items() if name in wanted}
            for batch in self.batches[f"{part} {self.order.models[number].feeds}"]
        ]

    def _make_call(self, number: int, session: Session, part: str) -> Call:
        return make_call(session, self._read_batches(number, session, part))

    def _time_part(self, part: str, calls: Sequence[Call], count: int, budget_s: float, least_s: float = 0.0) -> Array:
        """Time calls in turn; return seconds [models, rounds, calls]."""
        shape = (self.order.shapes or {}).get(part)
        turns = time_in_turns(
            calls,
            count,
            seed=self.order.seed + self.order.index,
            warmup=self.settings.warmup if part == "calls" else min(self.settings.warmup, 3),
            budget_s=budget_s,
            lasting_s=least_s,
            one_thread=self.one_thread,
            shape=None if shape is None else (shape[0], shape[1]),
        )
        self.record["shapes"][part] = list(turns.seconds.shape[1:])
        self.record["taken"][part] = turns.taken
        self.record["set_apart"] += turns.set_apart
        return turns.seconds

    def _time_beside(self, baseline: Call, make: Callable[[int, Session], Call]) -> None:
        """Time the models beside the judged ones, in rounds with the first of these; NaN for one that fails."""
        opened = self._open_beside(make)
        working = []
        for number, call in enumerate(opened):
            try:
                if call is not None:
                    call(0)
                    working.append(number)
            except Exception as error:  # noqa: BLE001 - as above
                self.record["errors"][str(number)] = str(error) or type(error).__name__
        if not opened:
            return
        calls = [baseline, *(opened[number] for number in working)]
        share, count = 1 + len(working) / 2, max(1, self.settings.iterations // 2)
        ratios = np.full(len(opened), np.nan)
        try:
            medians = np.median(self._time_part("beside", calls, count, share * self.order.seconds.calls / 2), axis=2)
            ratios[working] = np.median(medians[1:] / medians[0], axis=1)
        except Exception as error:  # noqa: BLE001 - as above; which of them failed is not known
            self.record["errors"] |= dict.fromkeys(map(str, working), str(error) or type(error).__name__)
        self.arrays["beside"] = ratios
        self.record["shapes"].pop("beside", None)  # they need not be alike: a ratio is kept of each

    def _find_limited(self, judged: Sequence[Session]) -> list[float]:
        """Return samples per second of each model at its largest batch in time; 0 where even one sample is late."""
        limit_s = (self.settings.latency_limit_ms or 0.0) / 1000
        fixed = fixed_batch([spec for session in judged for spec in session.inputs])
        rates, growing = [0.0, 0.0], [True, True]
        # batches of up to 2^10 are tried for the largest that keeps a limit
        sizes = [fixed] if fixed else [2**power for power in range(10 + 1)]
        for size in sizes:
            calls = []
            for number, session in enumerate(judged):
                batch = self._read_batches(number, session, "large")[0]
                calls.append(make_call(session, [_resize_feeds(batch, size)]))
            seconds = self._time_part(
                f"limited {size}", calls, self.settings.iterations // 4, self.order.seconds.limited
            )
            times = seconds.reshape(len(calls), -1)
            in_time = np.percentile(times, self.settings.latency_percentile, axis=1) <= limit_s
            for m in range(2):
                growing[m] = growing[m] and bool(in_time[m])
                rates[m] = size / float(np.median(times[m])) if growing[m] else rates[m]
            if not any(growing):
                break
        return rates

    def _time_answers(self, judged: Sequence[Session]) -> None:
        root, settings = Path(self.order.root), self.settings
        manifest = read_manifest(root)
        columns = encoding_views(manifest.task, read_samples(root, manifest))[0]
        preprocessors = [bundle_preprocessor(root, manifest, session.inputs) for session in judged]
        task, facts = find_task(manifest.task), facts_of(manifest)
        answerers = [
            Answerer(session, preprocessor, task, facts)
            for session, preprocessor in zip(judged, preprocessors, strict=True)
        ]
        sent = make_sent(preprocessors[0], columns, settings.batch_size, self.order.seed)
        shape = (self.order.shapes or {}).get("answers")
        self.arrays["answers"] = time_answers(
            answerers,
            sent,
            settings.iterations,
            settings.warmup,
            self.order.seed + self.order.index,
            self.order.seconds.answers,
            self.one_thread,
            None if shape is None else shape[0],
        )
        self.record["shapes"]["answers"] = list(self.arrays["answers"].shape[1:3])


class _Requests(_Process):
    """Of models that write text: whole requests, token by token."""

    def _run_some(self, number: int, session: Session) -> None:
        decoder, new_tokens = self._make_decoder(number, session), self.settings.new_tokens
        run_request(decoder, self._read_prompts()[0], new_tokens, made=min(new_tokens, WARM_TOKENS))

    def _time(self, judged: Sequence[Session]) -> None:
        decoders = [self._make_decoder(number, session) for number, session in enumerate(judged)]
        settings, seconds = self.settings, self.order.seconds
        seed, new_tokens = self.order.seed + self.order.index, settings.new_tokens
        prompts = self._read_prompts()
        shape = (self.order.shapes or {}).get("requests")
        warmup = min(settings.warmup, 3)
        times = time_requests(
            decoders,
            prompts,
            new_tokens,
            settings.iterations,
            warmup,
            seed,
            max(seconds.calls, seconds.least_calls),
            self.one_thread,
            shape,
        )
        self.arrays |= {"first": times.first, "steps": times.steps}
        shape = times.first.shape[1], times.timed_tokens
        self.record["shapes"]["requests"] = list(shape)

        def make_request(decoder: Decoder | EncodedDecoder) -> Call:
            return lambda n: run_request(decoder, prompts[n % len(prompts)], new_tokens)

        self._measure_energy([make_request(decoder) for decoder in decoders], settings.batch_size * new_tokens)
        opened = self._open_beside(self._make_decoder)
        working = [number for number, decoder in enumerate(opened) if decoder is not None]
        if working:
            some = [decoders[0], *(opened[number] for number in working)]
            beside = time_requests(some, prompts, new_tokens, shape[0], 1, seed, 0.0, self.one_thread, shape)
            ratios = np.full(len(opened), np.nan)
            ratios[working] = np.median(beside.per_token[1:] / beside.per_token[0], axis=1)
            self.arrays["beside"] = ratios
        if (settings.ttft_limit_ms, settings.tpot_limit_ms) != (None, None) and len(decoders) == 2:
            budget_s = seconds.limited

            def time_batch(size: int) -> RequestTimes:
                given = [_resize(batch, size) for batch in prompts]
                count = max(1, settings.iterations // 4)
                return time_requests(decoders, given, new_tokens, count, 1, seed, budget_s, self.one_thread)

            self.arrays["limited"] = np.array(find_goodput(time_batch, settings))

    def _read_prompts(self) -> list[Prompts]:
        batches = self.batches["single 0"]
        return list(batches) if self.order.start_tokens else [list(batch["prompts"]) for batch in batches]

    def _make_decoder(self, number: int, session: Session) -> Decoder | EncodedDecoder:
        return make_decoder(session, self.order.start_tokens, self.order.models[number].cache)


def _resize(batch: Prompts, size: int) -> Prompts:
    """Return a batch of another size, its rows in turn."""
    return _resize_feeds(batch, size) if isinstance(batch, dict) else [batch[row % len(batch)] for row in range(size)]


def _resize_feeds(batch: Feeds, size: int) -> Feeds:
    return {name: np.resize(values, (size, *values.shape[1:])) for name, values in batch.items()}


def time_on_device(judged: Sequence[Session], calls: Sequence[Call]) -> Array | None:
    """Read the device's own clock (CUDA events), copies left out: seconds [models, rounds]; None where one has none."""
    clocks = [session for session in judged if isinstance(session, DeviceTimed)]
    if len(clocks) < len(judged):
        return None
    device = np.empty((len(judged), MIN_ROUNDS))
    for turn in range(MIN_ROUNDS):
        for m, (call, clock) in enumerate(zip(calls, clocks, strict=True)):
            call(turn)
            device[m, turn] = clock.device_ms / 1000
    return device
