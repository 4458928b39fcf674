"""What each pass of a build cost and gave, as cells of a table and its notes."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.judge.findings import Change, PassRow, PassTable
from runtime.words import figure_text, ms_text, size_text

LATENCY = {"latency_p50": "latency p50", "tpot": "time per token"}


def pass_heads(table: PassTable) -> tuple[str, ...]:
    """Return the heads of the columns."""
    quality = [text for name in table.shown for text in (name, "change")]
    memory = ("memory",) if _knows_memory(table) else ()
    return ("pass", "size", "smaller", *quality, LATENCY[table.latency], "faster", "took", *memory, "")


def pass_cells(table: PassTable) -> list[tuple[str, ...]]:
    """Return one row for each pass, the float model first."""
    return [tuple(_format_cells(row, table)) for row in table.rows]


def pass_notes(table: PassTable) -> list[str]:
    """Return what a reader of the table must know, as sentences."""
    where = f" on {table.cpu}" if table.cpu else ""
    notes = ["Each change is to the row above that was measured; smaller and faster are against the float model."]
    return [*notes, *([f"Measured when the bundle was built{where}, not in this run."] if table.recorded else [])]


def _format_cells(row: PassRow, table: PassTable) -> Iterator[str]:
    yield row.name
    yield size_text(row.size_bytes)
    yield _format_ratio(row.smaller)
    for name in table.shown:
        value = row.metrics.get(name)
        yield "-" if value is None else f"{value:.4f}"
        yield _format_change(row.changes.get(name))
    yield ms_text(row.latency_ms)
    yield _format_ratio(row.faster)
    yield "" if row.seconds is None else _format_seconds(row.seconds)
    if _knows_memory(table):
        yield "" if row.peak_memory_bytes is None else size_text(row.peak_memory_bytes)
    yield row.error


def _knows_memory(table: PassTable) -> bool:
    return any(row.peak_memory_bytes is not None for row in table.rows)


def _format_change(change: Change | None) -> str:
    if change is None:
        return ""
    return figure_text(change.value, change.interval, "+z")


def _format_ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
