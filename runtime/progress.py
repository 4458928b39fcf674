"""How long loops say where they are, to whoever wants to hear it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Progress = Callable[[Sequence[int], str], Iterable[int]]
"""Wraps the numbers of a loop, which say where it is as they are taken; the text names it in a word or two."""


def no_progress(items: Sequence[int], text: str) -> Iterable[int]:
    """Say nothing."""
    return items
