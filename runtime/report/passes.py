"""Hold what each pass of a build cost and gave: the rows of a table, the file that keeps them, and its cells as text.

`report.steps.json` is written by the validation that ends a build, while the models between the passes are still there.
Later validations show it as it is. Like the reports it is in no manifest, because times differ from run to run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from runtime.bundle.columns import Array
from runtime.bundle.files import put_in_place
from runtime.bundle.format import canonical_json
from runtime.bundle.manifest import KvCacheSpec, Manifest
from runtime.bundle.records import from_json
from runtime.errors import BundleError
from runtime.words import figure_text, ms_text, size_text

PASSES_FILE = "report.steps.json"
LATENCY = {"latency_p50": "latency p50", "tpot": "time per token"}


@dataclass(frozen=True)
class PassModel:
    """What a build hands to the judge of one pass: a model that is measured beside the bundle's own and not kept.

    The last pass's model is the candidate, so that it has no `path`. Neither has one that could not be made: `error`
    says why. `outputs`: over the frozen samples, as `runtime.tasks.predict.run_samples` gives them (beside the
    baseline).
    """

    name: str
    seconds: float
    path: Path | None = None
    size_bytes: int | None = None
    cache: KvCacheSpec | None = None
    outputs: dict[str, Array] | None = None
    error: str = ""
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Change:
    """A metric's value minus that of the pass before, paired by sample where its interval is known."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class PassRow:
    """What was measured after one pass; None and nothing for what was not."""

    name: str
    """"float" for the model as it came, then each pass's."""
    seconds: float | None = None
    """Seconds that the pass took when it was done: of a run that was broken off, its last part."""
    size_bytes: int | None = None
    smaller: float | None = None
    """How many times smaller than the float model."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """None where a value is infinite."""
    changes: dict[str, Change] = field(default_factory=dict)
    """Metric -> change since the last row before that was measured."""
    latency_ms: float | None = None
    faster: float | None = None
    """How many times faster than the float model: the median of the rounds' own ratios."""
    error: str = ""
    """Why nothing, or not all, was measured."""
    peak_memory_bytes: int | None = None
    """The most memory that the process held while the pass worked."""


@dataclass(frozen=True)
class PassTable:
    """The float model, and what each pass made of it; the last row is the candidate."""

    rows: tuple[PassRow, ...]
    latency: str
    """The metric that `latency_ms` is: latency_p50, or of a decoder tpot."""
    shown: tuple[str, ...]
    """The metrics that the gates are about, or the first: what a narrow table has room for."""
    cpu: str
    """Where it was measured."""
    manifest_digest: str
    recorded: bool = False
    """True where it is not of this validation, but of the one that ended the build."""


def write_pass_table(table: PassTable, root: Path) -> None:
    """Write `report.steps.json` into the bundle in `root`, whole or not at all."""
    draft = root / f"{PASSES_FILE}.{os.getpid()}.tmp"
    try:
        draft.write_bytes(canonical_json(table))
        put_in_place(draft, root / PASSES_FILE)
    finally:
        draft.unlink(missing_ok=True)


def read_pass_table(root: Path, manifest: Manifest) -> PassTable | None:
    """Read what the build recorded, or None; BundleError where the file is damaged or of another bundle."""
    file = root / PASSES_FILE
    if not file.is_file():
        return None
    try:
        table = from_json(PassTable, json.loads(file.read_bytes()), "steps")
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: {error}; remove it, and the bundle is judged without it") from error
    if table.manifest_digest != manifest.digest:
        raise BundleError(f"{file}: is of another bundle; remove it, and this one is judged without it")
    return replace(table, recorded=True)


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
