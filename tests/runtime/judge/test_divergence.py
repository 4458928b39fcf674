"""The first tensor that differs, found with few questions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from runtime.judge.divergence import AT_ONCE, first_divergence, relative_error


@pytest.mark.parametrize("n", [1, 2, 9, 10, 100, 1000])
def test_every_place_is_found_with_few_questions(n: int) -> None:
    tensors = [f"t{i}" for i in range(n)]
    for wrong in {0, 1, n // 3, n // 2, n - 2, n - 1} & set(range(n)):
        asked: list[int] = []

        def compare(names: Sequence[str], wrong: int = wrong, asked: list[int] = asked) -> dict[str, float]:
            asked.append(len(names))
            return {name: 1.0 if int(name[1:]) >= wrong else 0.001 for name in names}

        found = first_divergence(tensors, compare, 0.01)
        assert found is not None and found.tensor == f"t{wrong}"
        assert found.before == (f"t{wrong - 1}" if wrong else "")
        assert max(asked) <= AT_ONCE and found.questions == len(asked) <= 2 + np.ceil(np.log(n + 1) / np.log(AT_ONCE))


def test_nothing_differs() -> None:
    assert first_divergence(["a", "b"], lambda names: dict.fromkeys(names, 0.01), 0.01) is None
    with pytest.raises(ValueError, match="no tensor to compare"):
        first_divergence([], lambda names: {}, 0.01)


def test_the_end_of_another_branch_may_differ() -> None:
    names = [f"a{i}" for i in range(20)] + ["b0", "b1"]
    found = first_divergence(names, lambda asked: {n: float(n[0] == "a" and int(n[1:]) >= 17) for n in asked}, 0.01)
    assert found is not None and found.tensor == "a17"


def test_errors_are_relative_and_what_is_not_finite_is_infinite() -> None:
    x = np.array([3.0, -4.0], np.float32)
    assert relative_error(x, x) == 0.0
    assert relative_error(1.1 * x, x) == pytest.approx(0.1, rel=1e-5)
    assert relative_error(np.array([np.nan]), np.array([1.0])) == float("inf")
    mask = np.array([0.0, -np.inf, 2.0])
    assert relative_error(mask, mask) == 0.0 and relative_error(np.array([0.0, -np.inf, 2.2]), mask) == pytest.approx(
        0.1
    )
    assert relative_error(np.array([0.0, 0.0, 2.0]), mask) == float("inf")
    zero = np.zeros(2, np.float32)
    assert relative_error(zero, zero) == 0.0 and relative_error(x, zero) == float("inf")
    assert relative_error(np.zeros((0,)), np.zeros((0,))) == 0.0
