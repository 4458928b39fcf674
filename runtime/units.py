"""Sizes and times for people."""

from __future__ import annotations


def ms_text(value: float | None) -> str:
    """Milliseconds."""
    return "-" if value is None else f"{value:.4g} ms"


def bytes_text(value: float | None) -> str:
    """Bytes in the largest unit that they fill, of 1000 each."""
    if value is None:
        return "-"
    unit = next((u for u in ("B", "kB", "MB") if abs(value) < 1000 ** (1 + ("B", "kB", "MB").index(u))), "GB")
    return f"{value / 1000 ** ('B', 'kB', 'MB', 'GB').index(unit):.{0 if unit == 'B' else 2}f} {unit}"
