"""Slices and confused classes as a report's tables and sentences: the worst first, all of them in report.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from runtime.judge.changes import ConfusedPair, Confusion
from runtime.judge.findings import Findings, MetricSlices, SliceValue, order_metrics, order_worst_first
from runtime.words import figure_text

MOST_ROWS, MOST_PAIRS, MOST_CLASSES, MOST_NAMED = 10, 8, 10, 5
"""Slices and confused pairs in a table; classes of a model whose whole matrix is shown; names in a sentence."""
SLICE_HEADS = ("slice", "samples", "before", "after", "change", "")
PAIR_HEADS = ("class", "taken for", "before", "after", "change")


def choose_slices(report: Findings) -> list[MetricSlices]:
    """Return what tables show: for each column the metrics that gates name; where none is, the first one."""
    gated = {gate.metric for gate in report.gates}
    shown: list[MetricSlices] = []
    for column in dict.fromkeys(table.column for table in report.slices):
        tables = {table.metric: table for table in report.slices if table.column == column}
        names = [name for name in order_metrics(tables) if name in gated] or order_metrics(tables)[:1]
        shown += [tables[name] for name in names]
    return shown


def slice_cells(table: MetricSlices) -> list[tuple[str, ...]]:
    """Return a row for each slice, the worst first, `MOST_ROWS` at most."""
    sign = 1.0 if table.higher_is_better else -1.0
    ranked = sorted(table.values.items(), key=lambda item: order_worst_first(sign * item[1].candidate))
    return [(name, *_format_value(value)) for name, value in ranked[:MOST_ROWS]]


def _format_value(value: SliceValue) -> Iterator[str]:
    yield str(value.n)
    yield "-" if value.baseline is None else f"{value.baseline:.4f}"
    yield figure_text(value.candidate, value.interval)
    change = ""
    if value.difference is not None and value.baseline is not None:
        change = figure_text(value.difference, value.difference_interval, "+z")
    yield change
    yield "too few to tell" if value.too_few else ""


def slice_notes(table: MetricSlices, confidence: float) -> list[str]:
    """Return what a reader of the table must know, as sentences: which slice is the worst, and how sure that is."""
    n, worst = len(table.values), table.values[table.worst]
    chance = (
        " Its interval holds the value of all samples: it may be the worst by chance." if table.may_be_chance else ""
    )
    notes = [
        f"Worst {table.column} by {table.metric}: {table.worst}, "
        f"{figure_text(worst.candidate, worst.interval)} of {worst.n} samples.{chance}"
    ]
    if table.lost_most:
        lost = table.values[table.lost_most]
        sure = (
            lost.difference_interval is not None and not lost.difference_interval[0] <= 0 <= lost.difference_interval[1]
        )
        seems = "" if sure else "; that anything changed is not sure"
        notes.append(
            f"Changed for the worse most: {table.lost_most}, "
            f"{figure_text(lost.difference or 0.0, lost.difference_interval, '+z')}{seems}."
        )
    few = [name for name, value in table.values.items() if value.too_few]
    if few:
        rest = f" and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else ""
        notes.append(f"Too few samples to tell anything: {', '.join(few[:MOST_NAMED])}{rest}.")
    left = f" {n - MOST_ROWS} more are in report.json." if n > MOST_ROWS else ""
    notes.append(f"The {100 * confidence:g}% intervals hold for all {n} at once (Bonferroni).{left}")
    return notes


def confusion_table(confusion: Confusion) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return heads and rows: of few classes the whole matrix, of more the pairs that are confused most, or changed."""
    if confusion.n_classes <= MOST_CLASSES:
        names = confusion.classes
        cells = {(pair.label, pair.taken_for): pair for pair in confusion.pairs}
        rows: list[tuple[str, ...]] = [
            (label, *(_format_cell(cells.get((label, taken))) for taken in names))
            for label in names
            if any(pair.label == label for pair in confusion.pairs)
        ]
        return ("class \\ taken for", *names), rows
    wrong = [pair for pair in confusion.pairs if pair.label != pair.taken_for]
    common = sorted(wrong, key=lambda pair: -pair.candidate)[:MOST_PAIRS]
    changed = sorted(wrong, key=lambda pair: -abs(pair.candidate - pair.baseline))[:MOST_PAIRS]
    rows = [
        (pair.label, pair.taken_for, str(pair.baseline), str(pair.candidate), _format_change(pair))
        for pair in dict.fromkeys((*common, *(pair for pair in changed if pair.candidate != pair.baseline)))
    ]
    return PAIR_HEADS, rows


def _format_cell(pair: ConfusedPair | None) -> str:
    if pair is None:
        return ""
    change = _format_change(pair)
    return f"{pair.candidate} ({change})" if change else str(pair.candidate)


def _format_change(pair: ConfusedPair) -> str:
    change = pair.candidate - pair.baseline
    return f"{change:+d}" if change else ""


def confusion_notes(confusion: Confusion) -> list[str]:
    """Return what a reader of the table must know, as sentences."""
    shown = "In brackets: more or fewer than the baseline. " if confusion.n_classes <= MOST_CLASSES else ""
    return [f"{shown}{confusion.turned} samples get another class than the baseline gave them."]


def confusion_lines(confusion: Confusion, most: int = MOST_NAMED) -> Sequence[str]:
    """Return the confusions that changed most as lines of text, those that stayed left out."""
    changed = [p for p in confusion.pairs if p.label != p.taken_for and p.candidate != p.baseline]
    ranked = sorted(changed, key=lambda pair: -abs(pair.candidate - pair.baseline))[:most]
    return [f"{p.label} taken for {p.taken_for}: {p.baseline} to {p.candidate} samples" for p in ranked]
