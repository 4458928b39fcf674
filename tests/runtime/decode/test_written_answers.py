"""Answers to samples that are read in several parts: their texts one after another."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from runtime.decode.answers import continue_texts, join_results, join_texts
from runtime.decode.generate import GeneratedText, collect_results


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        (["ab"], "ab"),
        ([" ab "], " ab "),
        (["ab", "cd", "e"], "ab cd e"),
        ([" Ab.", " Cd."], " Ab. Cd."),
        (["ab ", "cd"], "ab cd"),
        (["", "ab", "", "cd", ""], "ab cd"),
        (["", ""], ""),
    ],
)
def test_texts_follow_each_other(texts: list[str], whole: str) -> None:
    assert join_texts(texts) == whole


def result(text: str, *ids: int, finish: str = "eos") -> GeneratedText:
    return GeneratedText(text, ids, finish, 2)  # type: ignore[arg-type]


def test_answers_to_parts_are_one() -> None:
    assert join_results([result("a", 1), result("b", 2, 3)]) == result("a b", 1, 2, 3)
    assert join_results([result("a", 1, finish="length"), result("b", 2)]).finish == "length"
    assert join_results([result("a", 1), result("b", 2, finish="stop")]).finish == "stop"


def test_streams_of_parts_go_on() -> None:
    def pieces(*given: tuple[int, str]) -> Generator[tuple[int, str], None, list[GeneratedText]]:
        yield from given
        return [result("", row) for row, _ in given[:2]]

    texts = ["ab", "", "x"]
    stream = continue_texts(pieces((0, "c"), (1, "y"), (0, "d"), (1, " z")), np.array([0, 2]), texts)
    assert list(stream) == [(0, " c"), (2, " y"), (0, "d"), (2, " z")]
    assert texts == ["ab cd", "", "x y z"]
    assert len(collect_results(continue_texts(pieces((0, "c"), (1, "y")), np.array([0, 1]), ["", ""]))) == 2
