"""What every fuzz test stands on: a case ends in time with a result or with a typed error that speaks, or it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fuzzing import COUNTS, TookTooLong, assert_done_or_refused
from tiny_bundles import assert_ends_in_child

from compress.errors import SourceError
from runtime.errors import UsageError


def refuse(message: str = "the file is cut") -> None:
    raise SourceError(message)


def test_a_result_and_an_allowed_refusal_pass_and_are_counted() -> None:
    assert assert_done_or_refused("contract", lambda: 3) == 3
    assert assert_done_or_refused("contract", refuse, allowed=(2,)) is None
    assert COUNTS["contract"] == {"done": 1, "SourceError": 1}


@pytest.mark.parametrize(
    ("case", "failure"),
    [
        (lambda: {}["key"], KeyError),
        (lambda: int("x"), ValueError),
        (lambda: refuse(" "), AssertionError),
        (lambda: [None for _ in iter(int, 1)], TookTooLong),
        (lambda: np.ones(2**31), MemoryError),
    ],
    ids=["another's error", "a ValueError", "an error without a word", "no end", "too much memory"],
)
def test_anything_else_fails(case: Callable[[], Any], failure: type[BaseException]) -> None:
    with pytest.raises(failure):
        assert_done_or_refused("contract", case, seconds=0.05)


def test_a_refusal_with_another_exit_code_fails() -> None:
    def refuse_use() -> None:
        raise UsageError("no such column")

    with pytest.raises(AssertionError, match="no such column"):
        assert_done_or_refused("contract", refuse_use, allowed=())


def test_a_failure_in_a_child_fails_here() -> None:
    with pytest.raises(AssertionError, match="KeyError"):
        assert_ends_in_child("contract", lambda: {}["key"])
