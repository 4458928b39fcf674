"""Timing a decoder: whole requests, a prompt read and its answer generated, of several models against each other.

As in `runtime.measure.timing` every round runs each model once, in a random order. Tokens are chosen greedily, and an
answer goes on after the token that would end it, so that all requests are equally long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.bundle.columns import Array, Columns
from runtime.decode.kv_cache import Decoder
from runtime.encode.language import LanguageEncoder
from runtime.errors import UsageError
from runtime.measure.timing import MIN_ROUNDS, WARMUP_BUDGET_S, no_garbage_collection

PROMPTS = 16
"""Different batches of prompts that the rounds go through in turn."""


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of every round, one row a model."""

    first: Array  # [models, rounds]: the prompts read and the first tokens chosen
    steps: Array  # [models, rounds, new_tokens - 1]: each further token

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


def time_requests(
    decoders: Sequence[Decoder],
    prompts: Sequence[Sequence[Array]],
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
    pace = sum(_warm_up(lambda d=decoder: run_request(d, prompts[0], new_tokens), warmup) for decoder in decoders)  # type: ignore[misc]
    made = max(min(rounds, MIN_ROUNDS), min(rounds, int(budget_s / max(pace, 1e-9))))
    seconds = np.empty((len(decoders), made, new_tokens))
    with no_garbage_collection():
        for turn in range(made):
            for m in rng.permutation(len(decoders)):
                seconds[m, turn] = run_request(decoders[m], prompts[turn % len(prompts)], new_tokens)
    return RequestTimes(seconds[:, :, 0], seconds[:, :, 1:])


def run_request(decoder: Decoder, prompts: Sequence[Array], new_tokens: int) -> Array:
    """Generate greedily; return the seconds that each token of the answers took, float64 [new_tokens]."""
    marks = [time.perf_counter()]
    tokens = decoder.start(prompts, max(map(len, prompts)) + new_tokens).argmax(axis=1)
    marks.append(time.perf_counter())
    for _ in range(new_tokens - 1):
        tokens = decoder.step(tokens).argmax(axis=1)
        marks.append(time.perf_counter())
    return np.diff(marks)


def _warm_up(run: Callable[[], Array], calls: int) -> float:
    """Run at least one request; return the seconds of the last."""
    start = time.perf_counter()
    seconds = float(run().sum())
    for _ in range(1, calls):
        if time.perf_counter() - start > WARMUP_BUDGET_S:
            break
        seconds = float(run().sum())
    return seconds
