"""Time decoders by whole requests: a prompt read, and its answer generated.

Tokens are chosen greedily, and an answer goes on after the token that would end it, so that all requests are equally
long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.backends import Feeds, Session
from runtime.bundle.columns import Array, Columns, count
from runtime.bundle.format import Benchmark
from runtime.bundle.manifest import KvCacheSpec
from runtime.clock.turns import no_garbage_collection, take_off_others
from runtime.decode.answers import repeat_tokens
from runtime.decode.kv_cache import Decoder, EncodedDecoder
from runtime.decode.scoring import language_encoder
from runtime.encode.preprocess import Preprocessor
from runtime.encode.seq2seq import Seq2SeqEncoder
from runtime.errors import UsageError

LEAST_REQUESTS = 1
"""Requests of each decoder that a process times, whatever they take: each is many tokens, and more processes follow."""
LEAST_TOKENS = 16
"""Of a request's answer that are timed, whatever they take. 64 of Qwen2.5-Coder 1.5B in float32, 0.33 s each, took two
minutes of six processes; what scatters is one process from the next."""
WARM_TOKENS = 8
"""Tokens of an answer that warms a decoder up, or shows the memory that it takes: its cache has room for all."""
PROMPTS = 16
"""Different batches of prompts that the rounds go through in turn."""
Prompts = Sequence[Array] | Feeds
"""A batch of prompts: tokens of each, or of an encoder-decoder the inputs of its encoder."""


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of every round, one row a model; each array with an axis of processes before these, or without."""

    first: Array  # [models, rounds]: the prompts read and the first tokens chosen
    steps: Array  # [models, rounds, tokens - 1]: each further token that was timed
    new_tokens: int
    """Of a whole request; where these take long, the first of them are timed."""
    of_prompts: bool = True
    """Whether prompts are texts, whose tokens can be counted; a recording is none."""

    @property
    def timed_tokens(self) -> int:
        """Return how many tokens of each request were timed."""
        return int(self.steps.shape[-1]) + 1

    @property
    def per_token(self) -> Array:
        """Return the mean seconds over a request's further tokens, [..., models, rounds]."""
        result: Array = self.steps.mean(axis=-1)
        return result

    @property
    def whole(self) -> Array:
        """Return the seconds of each whole request, [..., models, rounds]."""
        result: Array = self.first + (self.new_tokens - 1) * self.per_token
        return result


def make_requests(
    encoder: Preprocessor, columns: Columns, settings: Benchmark, seed: int
) -> tuple[list[Prompts], tuple[int, ...]]:
    """Return at most PROMPTS batches of prompts, and the tokens that begin their answers: none of a decoder's.

    A decoder's prompts are cut at random places out of the samples' tokens in a row, an encoder-decoder's are samples;
    each is `prompt_tokens` long.
    """
    random, size, n_tokens = np.random.default_rng(seed), settings.batch_size, settings.prompt_tokens
    if isinstance(encoder, Seq2SeqEncoder):
        n = count(columns)
        drawn = random.integers(0, n, (min(PROMPTS, n), size))
        feeds = [repeat_tokens(encoder.source_feeds(columns, rows), n_tokens) for rows in drawn]
        return [*feeds], tuple(encoder.target.start_tokens)
    language = language_encoder(encoder)
    tokens = np.concatenate(language.sequences(language.samples(columns)))
    tokens = np.resize(tokens, max(len(tokens), n_tokens))  # repeated where there are too few
    starts = random.integers(0, len(tokens) - n_tokens + 1, (PROMPTS, size))
    return [[tokens[start : start + n_tokens] for start in batch] for batch in starts], ()


def make_decoder(session: Session, start_tokens: Sequence[int], cache: KvCacheSpec | None) -> Decoder | EncodedDecoder:
    """Return what makes requests of an open model; `start_tokens`: as `make_requests` gives them."""
    return EncodedDecoder(session, start_tokens) if start_tokens else Decoder(session, cache)


def time_requests(
    decoders: Sequence[Decoder | EncodedDecoder],
    prompts: Sequence[Prompts],
    new_tokens: int,
    rounds: int,
    warmup: int,
    seed: int,
    budget_s: float,
    one_thread: bool = True,
    shape: tuple[int, int] | None = None,
) -> RequestTimes:
    """Time requests of every decoder: at most `rounds` of each, as many as fit into `budget_s`.

    LEAST_REQUESTS (or `rounds`, if less) whatever they take, of their answers then as many tokens as fit, LEAST_TOKENS
    at least. `shape`: requests and tokens of each, where they are given.
    """
    if new_tokens < 2:
        raise UsageError(f"new_tokens is {new_tokens}, below 2: there is no time between tokens")
    rng = np.random.default_rng(seed)
    pace = sum(_warm_up_decoder(decoder, prompts[0], new_tokens, warmup) for decoder in decoders)
    fit = budget_s / max(pace, 1e-9)  # requests
    made, n_tokens = shape or (
        max(min(rounds, LEAST_REQUESTS), min(rounds, int(fit))),
        max(min(new_tokens, LEAST_TOKENS), min(new_tokens, int(fit * new_tokens))),
    )
    seconds = np.empty((len(decoders), made, n_tokens))
    with no_garbage_collection():
        for turn in range(made):
            for m in rng.permutation(len(decoders)):
                seconds[m, turn] = run_request(
                    decoders[m], prompts[turn % len(prompts)], new_tokens, one_thread, n_tokens
                )
    return RequestTimes(seconds[:, :, 0], seconds[:, :, 1:], new_tokens)


def run_request(
    decoder: Any, prompts: Prompts, new_tokens: int, one_thread: bool = False, made: int | None = None
) -> Array:
    """Generate greedily; return the seconds that each token of the answers took, float64 [made].

    `decoder`: a Decoder or an EncodedDecoder, with prompts of its kind. `one_thread`: it computes on one thread, and
    what other work took of the processor is taken off. `made`: tokens after which it ends, of those that there is room
    for; None: all.
    """
    marks = [(time.perf_counter(), time.process_time())]
    tokens = decoder.start(prompts, decoder.room(prompts, new_tokens)).argmax(axis=1)
    marks.append((time.perf_counter(), time.process_time()))
    for _ in range((made or new_tokens) - 1):
        tokens = decoder.step(tokens).argmax(axis=1)
        marks.append((time.perf_counter(), time.process_time()))
    seconds: Array = np.diff(marks, axis=0)  # [tokens, 2]: of the wall, of the processor
    return take_off_others(*seconds.T) if one_thread else seconds[:, 0]


def _warm_up_decoder(decoder: Decoder | EncodedDecoder, prompts: Prompts, new_tokens: int, requests: int) -> float:
    """Run the beginnings of requests, at least one; return the seconds of a whole one, as the last tells it."""
    start, made = time.perf_counter(), min(new_tokens, WARM_TOKENS)
    seconds = run_request(decoder, prompts, new_tokens, made=made)
    for _ in range(1, requests):
        # A decoder whose answers take so long has read all its weights in each of many calls. Three of each model were
        # about a quarter of what a process took for Qwen2.5 0.5B, float32 and 4 bits.
        if time.perf_counter() - start > 1.0:
            break
        seconds = run_request(decoder, prompts, new_tokens, made=made)
    return float(seconds[0] + (new_tokens - 1) * seconds[1:].mean())


def find_goodput(timed: Callable[[int], RequestTimes], settings: Benchmark) -> list[float]:
    """Return requests per second of each decoder at its largest batch that keeps the limits; 0 where even one is late.

    `timed`: times requests of so many prompts. Limits hold for `latency_percentile` of the requests.
    """

    def keep_limit(seconds: Array, limit_ms: float | None) -> Array:
        late = 1000 * np.percentile(seconds, settings.latency_percentile, axis=1)  # [models]
        kept: Array = late <= (np.inf if limit_ms is None else limit_ms)
        return kept

    rates, growing = [0.0, 0.0], np.array([True, True])
    # batches of up to 2^6 prompts are tried for goodput
    for batch_size in (2**power for power in range(6 + 1)):
        times = timed(batch_size)
        growing &= keep_limit(times.first, settings.ttft_limit_ms) & keep_limit(times.per_token, settings.tpot_limit_ms)
        medians = np.median(times.whole, axis=1)
        rates = [batch_size / float(medians[m]) if growing[m] else rates[m] for m in range(2)]
        if not growing.any():
            break
    return rates
