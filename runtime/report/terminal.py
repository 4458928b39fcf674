"""Text as a terminal shows it: broken at its width, verdicts in colour; a file or a pipe gets whole lines without."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from runtime.progress import Item

COLORS = {"pass": 32, "fail": 31, "undecided": 33, "unjudged": 2}
"""Verdict -> the SGR code it is painted with."""


def find_width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal behind `stream` (default: stdout); None where there is no terminal."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def fold(text: str, width: int | None) -> list[str]:
    """Return the lines of a text that is broken between words at `width`, what is carried over set in."""
    if width is None or len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines or [text]


def paint(lines: Sequence[str], verdict: str, width: int | None) -> list[str]:
    """Return the lines with their first word in the verdict's colour; unchanged without a terminal or by NO_COLOR."""
    if width is None or os.environ.get("NO_COLOR"):
        return list(lines)
    first = re.sub(r"\w+", f"\x1b[1;{COLORS[verdict]}m\\g<0>\x1b[0m", lines[0], count=1)
    return [first, *lines[1:]]


def align(cells: Sequence[tuple[str, ...]], width: int | None = None) -> Iterator[str]:
    """Yield rows with their columns one below the other; closer and without the intervals where `width` is less."""
    rows = _set_in_columns(cells, "  ")
    if width is not None and max(map(len, rows)) > width:
        rows = _set_in_columns([tuple(re.sub(r" \[[^]]*\]", "", cell) for cell in row) for row in cells], " ")
    yield from rows


def _set_in_columns(cells: Sequence[tuple[str, ...]], gap: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


ERASED = "\r\x1b[2K"
"""What empties the line that the cursor is in."""


def show_progress(items: Sequence[Item], text: str, /, most_s: float | None = None) -> Iterable[Item]:
    """Return the items, with a live line on stderr that counts down and is gone in the end; none without a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    begun = time.monotonic()
    try:
        for done, item in enumerate(items):
            left_s = (time.monotonic() - begun) / max(done, 1) * (len(items) - done)
            left = f", about {left_s:.0f} s left" if done else ""
            print(f"{ERASED}{text} {done} of {len(items)}{left}", end="", file=sys.stderr, flush=True)
            yield item
    finally:
        print(ERASED, end="", file=sys.stderr, flush=True)
