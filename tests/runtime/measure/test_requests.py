"""Requests of a slow model are cut to the tokens for which there is time; a whole one is told of those."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.decode.kv_cache import Decoder
from runtime.measure.requests import LEAST_TOKENS, time_requests


class Counting(Decoder):
    """Makes the same token over and over, and counts."""

    def __init__(self) -> None:
        self.answers: list[int] = []

    def start(self, prompts: Sequence[np.ndarray], capacity: int, features: object = None) -> np.ndarray:
        self.answers.append(1)
        return np.eye(1, 4, dtype=np.float32)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        self.answers[-1] += 1
        return np.eye(1, 4, dtype=np.float32)


@pytest.mark.parametrize(
    ("new_tokens", "budget_s", "shape", "timed"),
    [
        (64, 0.0, None, (1, LEAST_TOKENS)),
        (5, 0.0, None, (1, 5)),
        (64, 3600.0, None, (3, 64)),
        (64, 3600.0, (2, 20), (2, 20)),
    ],
)
def test_what_is_timed_fits(
    new_tokens: int, budget_s: float, shape: tuple[int, int] | None, timed: tuple[int, int]
) -> None:
    decoders = [Counting(), Counting()]
    times = time_requests(decoders, [[np.zeros(3, np.int64)]], new_tokens, 3, 1, 0, budget_s, shape=shape)
    assert (times.first.shape, times.timed_tokens) == ((2, timed[0]), timed[1])
    assert all(decoder.answers[1:] == [timed[1]] * timed[0] for decoder in decoders)  # the first warms up
    np.testing.assert_allclose(times.whole, times.first + (new_tokens - 1) * times.steps.mean(axis=-1))
