"""A build's steps as cells of a table: for the terminal, Markdown and notebooks alike."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.report.steps import Change, StepRow, StepTable
from runtime.report.units import bytes_text, interval_brackets, ms_text

LATENCY = {"latency_p50": "latency p50", "tpot": "time per token"}


def step_heads(table: StepTable) -> tuple[str, ...]:
    """Return the heads of the columns."""
    quality = [text for name in table.shown for text in (name, "change")]
    return ("step", "size", "smaller", *quality, LATENCY[table.latency], "faster", "took", "")


def step_cells(table: StepTable) -> list[tuple[str, ...]]:
    """Return one row for each step, the float model first."""
    return [tuple(_format_cells(row, table)) for row in table.rows]


def step_notes(table: StepTable) -> list[str]:
    """Return what a reader of the table must know, as sentences."""
    where = f" on {table.cpu}" if table.cpu else ""
    notes = ["Each change is to the row above that was measured; smaller and faster are against the float model."]
    return [*notes, *([f"Measured when the bundle was built{where}, not in this run."] if table.recorded else [])]


def _format_cells(row: StepRow, table: StepTable) -> Iterator[str]:
    yield row.name
    yield bytes_text(row.size_bytes)
    yield _format_ratio(row.smaller)
    for name in table.shown:
        value = row.metrics.get(name)
        yield "-" if value is None else f"{value:.4f}"
        yield _format_change(row.changes.get(name))
    yield ms_text(row.latency_ms)
    yield _format_ratio(row.faster)
    yield "" if row.seconds is None else _format_seconds(row.seconds)
    yield row.error


def _format_change(change: Change | None) -> str:
    if change is None:
        return ""
    return f"{change.value:+z.4f} {interval_brackets(change.interval, '+z.4f')}".strip()


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
