"""Choosing a token, against the definitions written out slowly."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.decode.sampling import Sampling, choose, penalise, probabilities

V = 40


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=V).astype(np.float32) * 2


def slow(scores: np.ndarray, s: Sampling) -> np.ndarray:
    """Token by token, in plain Python."""
    scaled = [float(x) / s.temperature for x in scores]
    if s.top_k:
        kth = sorted(scaled, reverse=True)[: s.top_k][-1]
        scaled = [x if x >= kth else -np.inf for x in scaled]
    chances = [float(np.exp(x - max(scaled))) for x in scaled]
    chances = [p / sum(chances) for p in chances]
    kept: list[int] = []
    for token in sorted(range(len(chances)), key=lambda t: -chances[t]):
        if kept and sum(chances[t] for t in kept) >= s.top_p:
            break
        kept.append(token)
    chances = [p if t in kept else 0.0 for t, p in enumerate(chances)]
    chances = [p if p >= s.min_p * max(chances) else 0.0 for p in chances]
    return np.array([p / sum(chances) for p in chances])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_k": 100},
        {"top_p": 0.8},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_probabilities_are_those_of_the_definition(settings: dict[str, float]) -> None:
    sampling = Sampling(**{"temperature": 1.0, **settings})  # type: ignore[arg-type]
    for seed in range(5):
        scores = logits(seed).astype(np.float64)
        found = probabilities(scores, sampling)
        np.testing.assert_allclose(found, slow(scores, sampling), atol=1e-12)
        assert found.sum() == pytest.approx(1)


def test_ties_with_the_kth_token_stay() -> None:
    assert np.count_nonzero(probabilities(np.array([1.0, 1, 1, 0]), Sampling(temperature=1, top_k=2))) == 3


def test_the_repetition_penalty_is_that_of_the_definition() -> None:
    scores, seen = logits(), np.array([3, 3, 7, 11])
    for token, value in enumerate(penalise(scores, seen, 1.3)):
        before = float(scores[token])
        want = before if token not in seen else before / 1.3 if before > 0 else before * 1.3
        assert value == pytest.approx(want)
    assert (penalise(scores, seen, 1.0) == scores).all()


def test_greedy_takes_the_lowest_of_the_most_likely() -> None:
    stream = Sampling().stream(0)
    assert choose(np.array([0, 5, 5, 1], np.float32), np.array([0]), Sampling(), stream) == 1
    assert choose(np.array([0, 5, 5, 1], np.float32), np.array([1]), Sampling(repetition_penalty=2), stream) == 2


def test_draws_come_as_often_as_their_probability_says() -> None:
    sampling = Sampling(temperature=1.0, top_k=6, seed=3)
    stream, scores = sampling.stream(0), logits(4)
    drawn = [choose(scores, np.array([0]), sampling, stream) for _ in range(4000)]
    chances = probabilities(scores.astype(np.float64), sampling)
    np.testing.assert_allclose(np.bincount(drawn, minlength=V) / 4000, chances, atol=0.03)
    assert set(drawn) <= set(np.flatnonzero(chances))


def test_rows_and_seeds_have_streams_of_their_own() -> None:
    one, two = Sampling(seed=1), Sampling(seed=2)
    values = [s.stream(row).random() for s, row in ((one, 0), (one, 1), (two, 0))]
    assert len(set(values)) == 3
    assert one.stream(0).random() == values[0]
