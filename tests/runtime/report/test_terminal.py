"""What a terminal alone is shown."""

from __future__ import annotations

import io
from contextlib import redirect_stderr

import pytest

from runtime.report.terminal import align, fold, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_live_line_is_for_terminals(stream: io.StringIO) -> None:
    with redirect_stderr(stream):
        assert list(show_progress(range(3), "timing")) == [0, 1, 2]
    text = stream.getvalue()
    assert ("timing 2 of 3, about" in text, "\n" in text) == (stream.isatty(), False)
    assert text.endswith("\x1b[2K") or not stream.isatty()


def test_lines_are_broken_between_words_and_set_in() -> None:
    assert fold("  holds  top1 of 797 samples", 16) == ["  holds  top1 of", "    797 samples"]
    assert fold("top1 of 797 samples", None) == ["top1 of 797 samples"]
    assert fold("averylongname", 5) == ["averylongname"]


def test_rows_that_are_too_wide_lose_their_intervals() -> None:
    cells = [("", "before"), ("top1", "0.93 [0.92, 0.94]")]
    assert list(align(cells, 80))[1] == "  top1  0.93 [0.92, 0.94]"
    assert list(align(cells, 20)) == ["       before", "  top1 0.93"]
