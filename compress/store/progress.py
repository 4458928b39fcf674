"""A log that nobody reads."""

from __future__ import annotations


def no_log(text: str) -> None:
    """Leave a line out of the log."""
