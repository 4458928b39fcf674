"""Time several models against each other, so that a change of the machine's pace hits them all.

Every round calls each model once, in a random order. Just before a timed call the same model is called untimed:
otherwise a model would meet the caches, and with several threads the spinning workers, that the other one left behind,
which it does not meet where it is deployed. Slow calls (SETTLED_S and up) need no such help and get none.

A decoder is timed by whole requests, a prompt read and its answer generated. Tokens are chosen greedily, and an answer
goes on after the token that would end it, so that all requests are equally long.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.backends import DeviceTimed, Feeds, Session
from runtime.bundle.columns import Array, Columns, count
from runtime.bundle.format import Benchmark
from runtime.decode.answers import repeat_tokens
from runtime.decode.kv_cache import Decoder, EncodedDecoder
from runtime.encode.language import LanguageEncoder
from runtime.encode.seq2seq import Seq2SeqEncoder
from runtime.errors import UsageError
from runtime.judge.stats import is_drifting

MIN_ROUNDS = 30
"""Rounds that are made whatever they take: fewer seldom give an interval (`stats.MIN_DRIFTING_ROUNDS`)."""
SURE_ROUNDS = 200
"""Of fewer, a slow drift shows too little to be told from none: as many are made where `SETTLING_S` is long enough."""
SETTLED_S = 0.05
WARMUP_BUDGET_S = 10.0
LASTING_S = 10.0
"""How long rounds last where a gate asks for speed: a shared machine has several paces, and keeps each for seconds."""
SETTLING_S = 10.0
"""How long rounds that drift are added to: 200 of a model of 50 us are over in one hiccup of the machine."""
PROMPTS = 16
"""Different batches of prompts that the rounds go through in turn."""
LIMIT_BUDGET_S = 10.0
"""For each batch size that is tried."""
MAX_LIMITED_POWER = 10
"""Batches of up to 2^10 are tried; of a decoder up to 2^MAX_REQUEST_POWER."""
MAX_REQUEST_POWER = 6
Prompts = Sequence[Array] | Feeds
"""A batch of prompts: tokens of each, or of an encoder-decoder the inputs of its encoder."""
Best = tuple[int, np.ndarray] | None
"""(batch size, seconds [rounds]) of the largest batch in time; None if even one sample is late."""


def time_rounds(
    sessions: Sequence[Session],
    feeds: Sequence[Sequence[Feeds]],
    rounds: int,
    warmup: int,
    seed: int,
    budget_s: float,
    settling_s: float = 0.0,
    lasting_s: float = 0.0,
) -> np.ndarray:
    """Return seconds per call, float64 [models, rounds].

    feeds[m] are model m's batches, taken in turn, round r the r-th. At most `rounds`; fewer, but at least MIN_ROUNDS
    (or `rounds`, if that is less), where they would take more than `budget_s`; more, where they would not last
    `lasting_s`. Where the ratio of the first two models drifts from round to round, as many are added again and again
    until it does no longer, for at most `settling_s`; so are they where fewer than SURE_ROUNDS were made. Only that
    decides, never the ratio itself, so that its interval keeps its promise.
    """
    rng = np.random.default_rng(seed)
    pace = [_warm_up(session, batches, warmup) for session, batches in zip(sessions, feeds, strict=True)]
    repeats = [1 if seconds >= SETTLED_S else 2 for seconds in pace]
    per_round = max(1e-9, sum(seconds * calls for seconds, calls in zip(pace, repeats, strict=True)))
    made = max(min(rounds, MIN_ROUNDS), min(rounds, int(budget_s / per_round)), int(lasting_s / per_round))

    def run_rounds(first: int, n: int) -> np.ndarray:
        seconds = np.empty((len(sessions), n))
        for turn in range(n):
            for m in rng.permutation(len(sessions)):
                batch = feeds[m][(first + turn) % len(feeds[m])]
                if repeats[m] == 2:
                    sessions[m].run(batch)
                seconds[m, turn] = _time_call(sessions[m], batch)
        return seconds

    with no_garbage_collection():
        seconds = run_rounds(0, made)
        until = time.perf_counter() + settling_s
        while made >= MIN_ROUNDS and time.perf_counter() < until and may_drift(seconds[0] / seconds[1]):
            left = int((until - time.perf_counter()) / per_round)
            seconds = np.hstack([seconds, run_rounds(seconds.shape[1], max(1, min(seconds.shape[1], left)))])
    return seconds


def may_drift(ratios: np.ndarray) -> bool:
    """Return whether the ratio drifts from round to round, or there are too few rounds to say that it does not."""
    return len(ratios) < SURE_ROUNDS or is_drifting(ratios)


def device_rounds(sessions: Sequence[Session], feeds: Sequence[Sequence[Feeds]], rounds: int) -> np.ndarray | None:
    """Return seconds per call by the device's own clock (CUDA events), copies left out: float64 [models, rounds].

    The models take turns. None where one of them runs on no such device.
    """
    clocks = [session for session in sessions if isinstance(session, DeviceTimed)]
    if len(clocks) < len(sessions):
        return None
    seconds = np.empty((len(sessions), rounds))
    for turn in range(rounds):
        for m, (session, clock) in enumerate(zip(sessions, clocks, strict=True)):
            session.run(feeds[m][turn % len(feeds[m])])
            seconds[m, turn] = clock.device_ms / 1000
    return seconds


def _warm_up(session: Session, feeds: Sequence[Feeds], calls: int) -> float:
    """Run at least one call; return the seconds of the last."""
    start = time.perf_counter()
    seconds = _time_call(session, feeds[0])
    for call in range(1, calls):
        if time.perf_counter() - start > WARMUP_BUDGET_S:
            break
        seconds = _time_call(session, feeds[call % len(feeds)])
    return seconds


def _time_call(session: Session, feeds: Feeds) -> float:
    start = time.perf_counter()
    session.run(feeds)
    return time.perf_counter() - start


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of every round, one row a model."""

    first: Array  # [models, rounds]: the prompts read and the first tokens chosen
    steps: Array  # [models, rounds, new_tokens - 1]: each further token
    of_prompts: bool = True
    """Whether prompts are texts, whose tokens can be counted; a recording is none."""

    @property
    def whole(self) -> Array:
        """Return the seconds of each whole request, [models, rounds]."""
        result: Array = self.first + self.steps.sum(axis=2)
        return result

    @property
    def per_token(self) -> Array:
        """Return the mean seconds over a request's further tokens, [models, rounds]."""
        result: Array = self.steps.mean(axis=2)
        return result


def make_prompts(
    encoder: LanguageEncoder, columns: Columns, batch_size: int, n_tokens: int, seed: int
) -> list[list[Array]]:
    """Cut PROMPTS batches of prompts of exactly `n_tokens` at random places out of the samples' tokens in a row."""
    tokens = np.concatenate(encoder.sequences(encoder.samples(columns)))
    tokens = np.resize(tokens, max(len(tokens), n_tokens))  # repeated where there are too few
    starts = np.random.default_rng(seed).integers(0, len(tokens) - n_tokens + 1, (PROMPTS, batch_size))
    return [[tokens[start : start + n_tokens] for start in batch] for batch in starts]


def make_sources(encoder: Seq2SeqEncoder, columns: Columns, batch_size: int, n_tokens: int, seed: int) -> list[Feeds]:
    """Return at most PROMPTS batches of what an encoder reads, drawn from the samples, each text `n_tokens` long."""
    n = count(columns)
    drawn = np.random.default_rng(seed).integers(0, n, (min(PROMPTS, n), batch_size))
    return [repeat_tokens(encoder.source_feeds(columns, rows), n_tokens) for rows in drawn]


def time_requests(
    decoders: Sequence[Decoder | EncodedDecoder],
    prompts: Sequence[Prompts],
    new_tokens: int,
    rounds: int,
    warmup: int,
    seed: int,
    budget_s: float,
) -> RequestTimes:
    """Time whole requests of every decoder, in at most `rounds` rounds.

    Fewer, but at least MIN_ROUNDS (or `rounds`, if less), where they take more than `budget_s`.
    """
    if new_tokens < 2:
        raise UsageError(f"new_tokens is {new_tokens}, below 2: there is no time between tokens")
    rng = np.random.default_rng(seed)
    pace = sum(_warm_up_decoder(decoder, prompts[0], new_tokens, warmup) for decoder in decoders)
    made = max(min(rounds, MIN_ROUNDS), min(rounds, int(budget_s / max(pace, 1e-9))))
    seconds = np.empty((len(decoders), made, new_tokens))
    with no_garbage_collection():
        for turn in range(made):
            for m in rng.permutation(len(decoders)):
                seconds[m, turn] = run_request(decoders[m], prompts[turn % len(prompts)], new_tokens)
    return RequestTimes(seconds[:, :, 0], seconds[:, :, 1:])


def run_request(decoder: Any, prompts: Prompts, new_tokens: int) -> Array:
    """Generate greedily; return the seconds that each token of the answers took, float64 [new_tokens].

    `decoder`: a Decoder or an EncodedDecoder, with prompts of its kind.
    """
    marks = [time.perf_counter()]
    tokens = decoder.start(prompts, decoder.room(prompts, new_tokens)).argmax(axis=1)
    marks.append(time.perf_counter())
    for _ in range(new_tokens - 1):
        tokens = decoder.step(tokens).argmax(axis=1)
        marks.append(time.perf_counter())
    return np.diff(marks)


def _warm_up_decoder(decoder: Decoder | EncodedDecoder, prompts: Prompts, new_tokens: int, requests: int) -> float:
    """Run at least one request; return the seconds of the last."""
    start = time.perf_counter()
    seconds = float(run_request(decoder, prompts, new_tokens).sum())
    for _ in range(1, requests):
        if time.perf_counter() - start > WARMUP_BUDGET_S:
            break
        seconds = float(run_request(decoder, prompts, new_tokens).sum())
    return seconds


def large_batch_rounds(settings: Benchmark) -> int:
    """Return the rounds for a large batch: a quarter of the iterations, each being many samples."""
    return min(settings.iterations, max(MIN_ROUNDS, settings.iterations // 4))


def find_limited_batches(
    sessions: Sequence[Session],
    feeds: Callable[[int], list[list[Feeds]]],
    fixed: int | None,
    settings: Benchmark,
    seed: int,
) -> tuple[Best, Best]:
    """Find for each model the largest batch whose `latency_percentile` keeps the limit, with its times.

    `fixed`: the only size that can be tried.
    """
    limit_s = (settings.latency_limit_ms or 0.0) / 1000
    best: list[Best] = [None, None]
    growing = [True, True]
    for batch_size in [fixed] if fixed else [2**power for power in range(MAX_LIMITED_POWER + 1)]:
        seconds = time_rounds(sessions, feeds(batch_size), large_batch_rounds(settings), 2, seed, LIMIT_BUDGET_S)
        in_time = np.percentile(seconds, settings.latency_percentile, axis=1) <= limit_s
        for m in range(2):
            growing[m] = growing[m] and bool(in_time[m])
            best[m] = (batch_size, seconds[m]) if growing[m] else best[m]
        if not any(growing):
            break
    return best[0], best[1]


def goodput(timed: Callable[[int, int, int, float], RequestTimes], settings: Benchmark) -> tuple[Best, Best]:
    """Find for each decoder the largest batch whose `latency_percentile` keeps the limits, and its requests' times."""

    def keep_limit(seconds: np.ndarray, limit_ms: float | None) -> np.ndarray:
        late = 1000 * np.percentile(seconds, settings.latency_percentile, axis=1)  # [2]
        kept: np.ndarray = late <= (np.inf if limit_ms is None else limit_ms)
        return kept

    best: list[Best] = [None, None]
    growing = np.array([True, True])
    for batch_size in (2**power for power in range(MAX_REQUEST_POWER + 1)):
        times = timed(batch_size, large_batch_rounds(settings), 1, LIMIT_BUDGET_S)
        growing &= keep_limit(times.first, settings.ttft_limit_ms) & keep_limit(times.per_token, settings.tpot_limit_ms)
        best = [(batch_size, times.whole[m]) if growing[m] else best[m] for m in range(2)]
        if not growing.any():
            break
    return best[0], best[1]
