"""Read report.json back into the record that it was written from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.bundle.records import from_json
from runtime.errors import UsageError
from runtime.judge.findings import FORMAT_VERSION
from runtime.report.report import Report


def read_report(file: Path) -> Report:
    """Read a report.json, an older one too: what it lacks is as the record's defaults have it.

    Numbers that could not be measured are NaN. Raises UsageError where there is none, it is damaged (it is in no
    manifest: anybody may have written it), or of a newer format.
    """
    again = "`compress validate DIR` writes it anew"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        version = data.get("format_version", 1) if isinstance(data, dict) else 1
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise UsageError(
                f"{file}: is of format {version}, and this version of compress reads up to {FORMAT_VERSION}; update it"
            )
        return _restore_numbers(from_json(Report, data, "report.json", measured=True))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}; `compress validate DIR` writes it") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: no report of a judgement: {error}; {again}") from error


def _restore_numbers(report: Report) -> Report:
    """Return the report with the ends of its differences' intervals as tuples of numbers."""
    differences: dict[str, dict[str, Any]] = {}
    for name, change in report.differences.items():
        ends = change.get("interval")
        if not isinstance(ends, (list, tuple)) or len(ends) != 2:
            raise ValueError(f"differences[{name!r}].interval: expected a list of 2 numbers")
        numbers = [float("nan") if number is None else float(number) for number in (change.get("value"), *ends)]
        differences[name] = {**change, "value": numbers[0], "interval": (numbers[1], numbers[2])}
    return replace(report, differences=differences)
