"""Compare judged bundles: which differences are beyond noise, and what was asked for and done otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.commands.bundle_diff import (
    LayerChange,
    LayerState,
    RecipeChange,
    compare_layers,
    compare_recipes,
    measure_layers,
)
from compress.errors import RecipeError
from compress.pages.comparison import ComparisonPart, render_comparison
from compress.recipe.templates import write_new
from runtime.bundle.format import MANIFEST
from runtime.errors import BundleError, UsageError
from runtime.judge.findings import Comparison, Difference, DifferenceVerdict, Side, SliceComparison
from runtime.report.differences import (
    SLICE_HEADS,
    comparison_notes,
    describe_slices,
    format_change,
    format_value,
    slice_cells,
)
from runtime.report.pairing import compare_reports, compare_slices, list_different_runs, order_slices
from runtime.report.report import finite
from runtime.report.stored import StoredReport, read_stored_report
from runtime.words import ms_text, size_text

MOST_LAYERS = 40
"""Layers that the terminal shows; JSON and the page have them all."""
WORDS = {"better": "better", "worse": "worse", "within noise": "noise", "not known": "unknown"}
STYLES = {"better": "green", "worse": "red", "within noise": "dim", "not known": "dim"}


@dataclass(frozen=True)
class ComparedBundle:
    """One bundle against the first: what was measured, the recipes, the layers."""

    measured: Comparison
    recipe: tuple[RecipeChange, ...]
    layers: tuple[LayerChange, ...]
    slices: SliceComparison | None
    """None where neither report has any."""
    runs: tuple[tuple[str, str, str], ...]
    """What each run measured by itself, as (name, before, after): of one machine and runtime, but of two runs."""
    notes: tuple[str, ...]


def compare_bundles(paths: Sequence[Path]) -> list[ComparedBundle]:
    """Compare each bundle (a folder, or a report.json) with the first one.

    Raises UsageError with all that cannot be compared: no report, one of a newer format, other tasks or evaluation
    sets, a bundle twice.
    """
    stored = _read_all(paths)
    measured = compare_reports(stored)
    first, *others = stored
    return [
        _compare_pair(first, other, paths[0], path, compared)
        for other, path, compared in zip(others, paths[1:], measured, strict=True)
    ]


def _read_all(paths: Sequence[Path]) -> list[StoredReport]:
    problems: list[str] = []
    stored: list[StoredReport] = []
    for path in paths:
        try:
            stored.append(read_stored_report(path))
        except (BundleError, UsageError) as error:
            problems += error.problems
    if problems:
        raise UsageError(problems)
    seen: dict[str, str] = {}
    for report in stored:
        if (digest := report.report.manifest_digest) and digest in seen:
            raise UsageError(
                f"{seen[digest]} and {report.name}: one bundle (digest {digest[:12]}), which differs from itself by "
                "nothing but the run; to compare two runs of it: `compress validate DIR --baseline REPORT`"
            )
        seen[report.report.manifest_digest] = report.name
    return stored


def _compare_pair(
    first: StoredReport, other: StoredReport, old: Path, new: Path, measured: Comparison
) -> ComparedBundle:
    recipe, notes = [], comparison_notes(measured)
    try:
        if all((path / "recipe.yaml").is_file() for path in (old, new)):
            recipe = compare_recipes(old, new)
        else:
            notes.append("The recipes are not compared: a report alone holds none; name the bundles' folders.")
    except RecipeError as error:
        notes.append(f"The recipes are not compared: {'; '.join(error.problems)}.")
    runs = [] if list_different_runs(first, other) else list_runs(first.report.candidate, other.report.candidate)
    sizes: tuple[dict[str, int], dict[str, int]] = ({}, {})
    try:
        if all((path / MANIFEST).is_file() for path in (old, new)):
            sizes = measure_layers(old, first.report), measure_layers(new, other.report)
    except BundleError as error:
        notes.append(f"The layers' sizes are not compared: {'; '.join(error.problems)}.")
    layers = compare_layers(first.report, other.report, sizes)
    slices = compare_slices(first, other)
    return ComparedBundle(measured, tuple(recipe), tuple(layers), slices, tuple(runs), tuple(notes))


def list_runs(before: Side, after: Side) -> Iterator[tuple[str, str, str]]:
    """Yield what one run alone says of each candidate, as (name, before, after): times, rates, memory."""
    for name, value in before.latency_ms.items():
        if name in after.latency_ms:
            yield f"latency {name}", ms_text(value), ms_text(after.latency_ms[name])
    for old, new in ((before.generation, after.generation), (before.further, after.further)):
        yield from ((name, f"{old[name]:.4g}", f"{new[name]:.4g}") for name in old if name in new)
    if before.throughput_per_s is not None and after.throughput_per_s is not None:
        yield "throughput", f"{before.throughput_per_s:.4g}/s", f"{after.throughput_per_s:.4g}/s"
    if before.load_ms is not None and after.load_ms is not None:
        yield "load time", ms_text(before.load_ms), ms_text(after.load_ms)
    if before.peak_memory_bytes is not None and after.peak_memory_bytes is not None:
        yield "peak memory", size_text(before.peak_memory_bytes), size_text(after.peak_memory_bytes)


def to_dict(bundles: Sequence[ComparedBundle]) -> dict[str, Any]:
    """Return the comparison as JSON values; ends of intervals that are not known are null."""
    comparisons = [
        {
            **asdict(bundle.measured),
            "notes": bundle.notes,
            "recipe": [asdict(change) for change in bundle.recipe],
            "layers": [asdict(change) for change in bundle.layers],
            "slices": None if bundle.slices is None else asdict(bundle.slices),
        }
        for bundle in bundles
    ]
    found: dict[str, Any] = finite({"against": bundles[0].measured.before, "comparisons": comparisons})
    return found


def summarize(measured: Comparison) -> str:
    """Return how many differences are real, and which: "1 better (size), 2 worse (top1, kl), 9 within noise"."""
    parts = []
    real: tuple[DifferenceVerdict, ...] = ("better", "worse")
    others: tuple[DifferenceVerdict, ...] = ("within noise", "not known")
    for verdict in real:
        names = [found.metric for found in measured.find(verdict)]
        parts += [f"{len(names)} {verdict} ({', '.join(names)})"] * bool(names)
    parts = parts or ["no difference beyond noise"]
    for verdict in others:
        parts += [f"{n} {verdict}" for n in [len(measured.find(verdict))] if n]
    return ", ".join(parts)


def print_comparison(bundles: Sequence[ComparedBundle], console: Console) -> None:
    """Print, for each bundle, what is known of its differences from the first one."""
    for bundle in bundles:
        names = f"[bold]{escape(bundle.measured.after)}[/] against {escape(bundle.measured.before)}"
        console.print(f"{names}: {escape(summarize(bundle.measured))}")
        _print_differences(bundle.measured, console)
        if bundle.slices is not None:
            _print_slices(bundle.slices, console)
        if bundle.runs:
            console.print("\nmeasured in each run: one machine and runtime, but two runs, so no verdict")
            console.print(_make_table(("", "before", "after"), bundle.runs))
        if bundle.recipe:
            console.print("\nrecipe")
        for change in bundle.recipe:
            console.print(escape(f"  {change.path}: {change.before} \u2192 {change.after}"), soft_wrap=True)
        if bundle.layers:
            rows = [(c.layer, format_layer(c.before), format_layer(c.after)) for c in bundle.layers[:MOST_LAYERS]]
            console.print()
            console.print(_make_table(("layer", "before", "after"), rows))
        if (more := len(bundle.layers) - MOST_LAYERS) > 0:
            console.print(f"  {more} more layers differ: --json and --html have them all")
        console.print()
        for note in bundle.notes:
            console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)


def _print_differences(measured: Comparison, console: Console) -> None:
    """Print quality and size, then speed. Speed without any interval is left to the notes."""
    for head, scale in (("quality and size", "difference"), ("speed-up", "ratio")):
        shown = [found for found in measured.differences if found.scale == scale and has_interval(found)]
        if not shown:
            continue
        table = _make_table((head, "before", "after", "change, interval", "verdict"), ())
        for found in shown:
            cells = found.metric, format_value(found, found.before), format_value(found, found.after)
            verdict = WORDS[found.verdict]
            table.add_row(*map(escape, (*cells, format_change(found), verdict)), style=STYLES[found.verdict])
        console.print()
        console.print(table)


def _print_slices(slices: SliceComparison, console: Console) -> None:
    """Print the slices that differ beyond noise, then how many others there are."""
    table = _make_table(SLICE_HEADS, ())
    for found in order_slices(slices.slices):
        if found.difference.verdict in ("better", "worse"):
            verdict = found.difference.verdict
            table.add_row(*map(escape, (*slice_cells(found), verdict)), style=STYLES[verdict])
    if table.row_count:
        console.print()
        console.print(table)
    console.print()
    for sentence in describe_slices(slices):
        console.print(escape(sentence), soft_wrap=True)


def has_interval(found: Difference) -> bool:
    """Return whether anything is known of a speed; of quality the values alone say something."""
    return found.scale == "difference" or found.change.low > 0


def _make_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*heads, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def format_layer(state: LayerState) -> str:
    """Format what became of a layer: "w4 W4A16, group 32; 1.5 KiB; output_error 0.012"."""
    size = "" if state.size_bytes is None else size_text(state.size_bytes)
    error = "" if state.value is None else f"{state.error} {state.value:.4g}"
    return "; ".join(part for part in (state.scheme, size, error) if part)


def write_page(bundles: Sequence[ComparedBundle], file: Path) -> None:
    """Write the comparison as a page. Raises OutputError where that cannot be done."""
    parts = [
        ComparisonPart(
            bundle.measured,
            summarize(bundle.measured),
            bundle.runs,
            [(change.path, change.before, change.after) for change in bundle.recipe],
            [(change.layer, format_layer(change.before), format_layer(change.after)) for change in bundle.layers],
            bundle.notes,
            slices=[] if bundle.slices is None else order_slices(bundle.slices.slices),
            slice_notes=[] if bundle.slices is None else describe_slices(bundle.slices),
        )
        for bundle in bundles
    ]
    write_new(file, render_comparison(parts), replace=True)
