"""A build's steps as cells of a table: for the terminal, Markdown and notebooks alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

from runtime.steps import Change, StepRow, StepTable
from runtime.units import bytes_text, ms_text

LATENCY = {"latency_p50": "latency p50", "tpot": "time per token"}


def step_heads(table: StepTable) -> tuple[str, ...]:
    """The heads of the columns."""
    quality = [text for name in table.shown for text in (name, "change")]
    return ("step", "size", "smaller", *quality, LATENCY[table.latency], "faster", "took", "")


def step_cells(table: StepTable) -> list[tuple[str, ...]]:
    """One row for each step, the float model first."""
    return [tuple(_cells(row, table)) for row in table.rows]


def step_notes(table: StepTable) -> list[str]:
    """What a reader of the table must know, as sentences."""
    where = f" on {table.cpu}" if table.cpu else ""
    notes = ["Each change is to the row above that was measured; smaller and faster are against the float model."]
    return [*notes, *([f"Measured when the bundle was built{where}, not in this run."] if table.recorded else [])]


def _cells(row: StepRow, table: StepTable) -> Iterator[str]:
    yield row.name
    yield bytes_text(row.size_bytes)
    yield _times(row.smaller)
    for name in table.shown:
        value = row.metrics.get(name)
        yield "-" if value is None else f"{value:.4f}"
        yield _change(row.changes.get(name))
    yield ms_text(row.latency_ms)
    yield _times(row.faster)
    yield "" if row.seconds is None else _seconds(row.seconds)
    yield row.error


def _change(change: Change | None) -> str:
    if change is None:
        return ""
    interval = change.interval
    ends = "" if interval is None or not all(map(math.isfinite, interval)) else "[{:+z.4f}, {:+z.4f}]".format(*interval)
    return f"{change.value:+z.4f} {ends}".strip()


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
