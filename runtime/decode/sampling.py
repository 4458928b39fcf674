"""The next token of a text, from its logits: greedy, or drawn from what the settings leave of the distribution.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from runtime.bundle.columns import Array
from runtime.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The defaults are greedy. UsageError for a value out of its range."""

    temperature: float = 0.0
    """Divides the logits; 0: the most likely token, the lowest id of equals."""
    top_k: int = 0
    """Only the k most likely tokens, and those as likely as the k-th; 0: all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability."""
    min_p: float = 0.0
    """Only tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of tokens that are in the text already: divided by it above 0, multiplied below; 1: none."""
    seed: int = 0
    """Row r of a batch draws from its own stream, (seed, r), so that its text does not depend on the others."""

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0, math.inf), ("top_p", 0, 1), ("min_p", 0, 1)):
            value = _as_float(getattr(self, name))
            if not low <= value <= high or not math.isfinite(value) or (name == "top_p" and value == 0):
                raise UsageError(f"{name} is {getattr(self, name)}: give {_RANGES[name]}")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} is {getattr(self, name)}: give 0 or more")
        if 0 < self.temperature < 1 / LARGEST_FACTOR:
            raise UsageError(f"temperature is {self.temperature}: give 0 (greedy), or at least {1 / LARGEST_FACTOR:g}")
        if not 1 / LARGEST_FACTOR <= _as_float(self.repetition_penalty) <= LARGEST_FACTOR:
            raise UsageError(
                f"repetition_penalty is {self.repetition_penalty}: give a number above 0, at most {LARGEST_FACTOR:g}; "
                "1 is none"
            )

    def stream(self, row: int) -> np.random.Generator:
        """Return the random generator that row `row` of a batch draws from."""
        return np.random.default_rng([self.seed, row])


LARGEST_FACTOR = 1e9
"""Of a logit: beyond, its products may become infinite, and chances of them NaN."""


def _as_float(value: float) -> float:
    """Return `value` as a float; infinity for an integer that no float can hold."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


_RANGES = {
    "temperature": "0 (greedy) or a number above it",
    "top_p": "a number above 0, at most 1 (all)",
    "min_p": "0 (all) to 1",
}


def choose(logits: Array, seen: Array, sampling: Sampling, stream: np.random.Generator) -> int:
    """Choose a token id from logits, float32 [vocab], after the tokens `seen`, int64 [t].

    A draw takes one uniform number from the stream and finds it in the cumulative distribution over token ids.
    """
    scores = penalise(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(scores.argmax())
    cumulative = np.cumsum(probabilities(scores, sampling))
    place = np.searchsorted(cumulative, stream.random() * cumulative[-1], side="right")
    return int(min(place, np.flatnonzero(np.diff(cumulative, prepend=0.0))[-1]))


def penalise(logits: Array, seen: Array, penalty: float) -> Array:
    """Apply the repetition penalty of CTRL (Keskar et al. 2019, 4.1) as transformers has it; float64 [vocab]."""
    scores: Array = logits.astype(np.float64)
    if penalty != 1:
        ids = np.unique(seen)
        scores[ids] = np.where(scores[ids] > 0, scores[ids] / penalty, scores[ids] * penalty)
    return scores


def probabilities(scores: Array, sampling: Sampling) -> Array:
    """Return the distribution that is drawn from: float64 [vocab], 0 for tokens that the settings leave out, sum 1.

    top_p is nucleus sampling (Holtzman et al. 2020), min_p that of Nguyen et al. 2024; the most likely token always
    stays.
    """
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores = np.where(scores >= np.partition(scores, -sampling.top_k)[-sampling.top_k], scores, -np.inf)
    chances = _softmax(scores)
    if sampling.top_p < 1:
        order = np.argsort(-chances, kind="stable")
        before = np.cumsum(chances[order]) - chances[order]  # of more likely tokens
        chances[order[(before >= sampling.top_p) & (np.arange(len(order)) > 0)]] = 0
    if sampling.min_p > 0:
        chances[chances < sampling.min_p * chances.max()] = 0
    result: Array = chances / chances.sum()
    return result


def _softmax(scores: Array) -> Array:
    powers: Array = np.exp(scores - scores.max())
    result: Array = powers / powers.sum()
    return result
