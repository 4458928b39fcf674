"""Sizes, times and intervals for people."""

from __future__ import annotations

import math

SMALL = 0.001
"""Below this four places show next to nothing of a figure."""


def ms_text(value: float | None) -> str:
    """Format milliseconds."""
    return "-" if value is None else f"{value:.4g} ms"


def size_text(n_bytes: float | None) -> str:
    """Format bytes in units of 1024, as limits of memory are given: 1536 -> "1.5 KiB"."""
    if n_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"


def interval_words(low: float, high: float, spec: str = ".4g", unit: str = "") -> str:
    """Format the ends by `spec`; an end that is not known in words, never as an infinite number."""
    first, last = (f"{end:{spec}}{unit}" for end in (low, high))
    known = math.isfinite(low), math.isfinite(high)
    return {
        (True, True): f"{first} to {last}",
        (True, False): f"at least {first}",
        (False, True): f"at most {last}",
        (False, False): "unknown",
    }[known]


def interval_brackets(ends: tuple[float, float] | None, spec: str = ".4f") -> str:
    """Format an interval as it stands behind a value, "[0.12, 0.34]"; "" where there is none with two ends."""
    return f"[{ends[0]:{spec}}, {ends[1]:{spec}}]" if ends is not None and all(map(math.isfinite, ends)) else ""


def figure_text(value: float, ends: tuple[float, float] | None = None, sign: str = "") -> str:
    """Format a figure with its interval, both to four places, or by their powers of ten where these show nothing."""
    widest = max((abs(figure) for figure in (value, *(ends or ())) if math.isfinite(figure)), default=0.0)
    spec = f"{sign}.4f" if widest >= SMALL or widest == 0 else f"{sign}.1e"
    return f"{value:{spec}} {interval_brackets(ends, spec)}".rstrip()
