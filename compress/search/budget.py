"""A budget of time as people write it."""

from __future__ import annotations

import re

from runtime.errors import UsageError

UNITS = {"h": 3600, "m": 60, "s": 1}


def read_seconds(text: str | None) -> float | None:
    """Return the seconds of "45m", "1h30m" or "90s"; None of None. Raises UsageError for anything else."""
    if text is None:
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise UsageError(f"--budget {text}: write hours, minutes or seconds, as in 45m, 2h or 1h30m")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if seconds <= 0:
        raise UsageError(f"--budget {text}: no time at all; write 45m")
    return seconds
