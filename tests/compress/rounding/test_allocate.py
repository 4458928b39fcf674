"""Choices by an integer programme: its optimum is that of trying everything, its answer always the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.rounding.allocate import OutOfReach, choose_within_budget


def sum_up(table: Any, chosen: Sequence[int]) -> float:
    return float(sum(np.asarray(table)[i, k] for i, k in enumerate(chosen)))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(2, 4), st.sampled_from(["bits", "bytes", "ms"]))
def test_the_answer_is_the_best_of_all(seed: int, n: int, n_choices: int, unit: str) -> None:
    rng = np.random.default_rng(seed)
    bits = np.sort(rng.choice([2, 3, 4, 8], n_choices, replace=False))
    sizes = rng.choice([512, 768, 1024, 98304], (n, 1))
    losses = np.exp(rng.normal(-8, 4, (n, 1))) * 4.0**-bits * rng.uniform(0.5, 1.5, (n, n_choices))
    costs: np.ndarray = sizes * bits
    if unit == "bytes":
        costs = costs // 8 + rng.integers(0, 9, costs.shape)
    if unit == "ms":  # more bits may be faster
        costs = costs * rng.uniform(1e-6, 1e-4, costs.shape)
    least, most = costs.min(axis=1).sum(), costs.max(axis=1).sum()
    budget = float(least + rng.uniform(0, 1) * (most - least))
    chosen = choose_within_budget(losses.tolist(), costs.tolist(), budget)
    assert sum_up(costs, chosen) <= budget * (1 + 1e-9)
    within = [some for some in product(range(n_choices), repeat=n) if sum_up(costs, some) <= budget]
    assert sum_up(losses, chosen) == pytest.approx(min(sum_up(losses, some) for some in within), rel=1e-6)
    assert choose_within_budget(losses.tolist(), costs.tolist(), budget) == chosen


def test_the_next_answers_lose_less_somewhere_and_are_the_best_of_those() -> None:
    losses, costs = [[5.0, 0.0], [4.0, 0.0], [3.0, 0.0]], [[1, 4]] * 3
    answers: list[list[int]] = []
    for _ in range(3):
        answers.append(choose_within_budget(losses, costs, 6, answers))
    assert answers == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    with pytest.raises(OutOfReach):
        choose_within_budget(losses, costs, 6, answers)


def test_what_cannot_be_kept_is_refused_with_the_least() -> None:
    with pytest.raises(OutOfReach, match="the least that the choices cost is 20, more than the budget of 19") as caught:
        choose_within_budget([[1.0, 0.5]], [[20, 40]], 19)
    assert caught.value.least == 20
    assert choose_within_budget([[1.0, 0.5]], [[20, 40]], 20) == [0]
    with pytest.raises(ValueError, match="not finite"):
        choose_within_budget([[float("nan"), 0.5]], [[20, 40]], 40)


def test_items_that_cost_or_lose_nothing_are_no_error() -> None:
    assert choose_within_budget([[0.0, 0.0], [0.0, 0.0]], [[16, 32], [16, 32]], 32) == [0, 0]
    assert choose_within_budget([[1.0, 0.0]], [[7.5, 7.5]], 7.5) == [1]
