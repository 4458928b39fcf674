"""Bits by an integer programme: its optimum is that of trying everything, its answer always the same."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.quantize.allocate import choose_bits


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([(2, 4), (2, 3, 4), (2, 3, 4, 8)]), st.data())
def test_the_answer_is_the_best_of_all(seed: int, n: int, choices: tuple[int, ...], data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.choice([512, 768, 1024, 98304], n)]
    losses = np.exp(rng.normal(-8, 4, (n, 1))) * 4.0 ** -np.array(choices) * rng.uniform(0.5, 1.5, (n, len(choices)))
    budget = data.draw(st.integers(min(choices) * sum(sizes), max(choices) * sum(sizes)))
    found = choose_bits(sizes, losses.tolist(), choices, budget)
    assert sum(size * bits for size, bits in zip(sizes, found, strict=True)) <= budget

    def total(chosen: tuple[int, ...]) -> float:
        return sum(losses[i, choices.index(bits)] for i, bits in enumerate(chosen))

    within = [some for some in product(choices, repeat=n) if np.dot(sizes, some) <= budget]
    assert total(tuple(found)) == pytest.approx(min(map(total, within)), rel=1e-6)
    assert choose_bits(sizes, losses.tolist(), choices, budget) == found


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bits for each weight are more than the budget of 19 bits"):
        choose_bits([10], [[1.0, 0.5]], [2, 4], 19)
    with pytest.raises(ValueError, match="a predicted loss is not finite"):
        choose_bits([10], [[float("nan"), 0.5]], [2, 4], 40)


def test_groups_that_cost_nothing_are_no_error() -> None:
    assert choose_bits([8, 8], [[0.0, 0.0], [0.0, 0.0]], [2, 4], 32) is not None
