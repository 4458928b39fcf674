"""Differences between two judgements as cells and sentences, for every table that shows them."""

from __future__ import annotations

from runtime.judge.findings import Comparison, Difference, SliceComparison, SliceDifference
from runtime.judge.gates import GateResult, Verdict
from runtime.words import SMALL, figure_text, interval_brackets, size_text

DIFFERENCE_HEADS = ("", "before", "after", "change", "verdict")
SLICE_HEADS = ("slice", "samples", "before", "after", "change", "verdict")


def difference_cells(found: Difference) -> tuple[str, str, str, str, str]:
    """Return a row: metric, both values, the change with its interval, the verdict."""
    return (
        label_of(found),
        format_value(found, found.before),
        format_value(found, found.after),
        format_change(found),
        found.verdict,
    )


def label_of(found: Difference) -> str:
    """Return the metric's name, and of speed what the values are."""
    return f"{found.metric}, speed-up" if found.scale == "ratio" else found.metric


def format_value(found: Difference, value: float) -> str:
    """Format a candidate's value: bytes as sizes, speed as how many times as fast as its baseline it is."""
    if found.unit == "bytes":
        return size_text(value)
    if found.scale == "ratio":
        return f"{value:.2f}x"
    return f"{value:.4f}" if max(abs(found.before), abs(found.after)) >= SMALL else f"{value:.3g}"


def format_change(found: Difference) -> str:
    """Format the change and its interval, which holds for all of a comparison at once."""
    change, ends = found.change, (found.change.low, found.change.high)
    if found.unit == "bytes":
        return f"{change.value / found.before:+.1%}" if found.before else size_text(change.value)
    if found.scale == "ratio":
        return f"{change.value:.2f}x {interval_brackets(ends, '.2f')}".rstrip()
    return figure_text(change.value, ends, "+z")


def slice_cells(found: SliceDifference) -> tuple[str, str, str, str, str]:
    """Return a row: slice and metric, samples, both values, the change with its interval."""
    difference = found.difference
    before, after = (format_value(difference, value) for value in (difference.before, difference.after))
    return f"{found.column}={found.value}, {difference.metric}", str(found.n), before, after, format_change(difference)


def describe_slices(slices: SliceComparison) -> list[str]:
    """Say how many slices differ beyond noise, at which level, and what could not be compared."""
    said = []
    if n := len(slices.slices):
        real = [f"{len(found)} {verdict}" for verdict in ("worse", "better") if (found := slices.find(verdict))]
        counts = ", ".join(real) if real else "none differs beyond noise"
        few = len(slices.find("not known"))
        level = f"their intervals hold at once at {100 * slices.confidence:g} %, apart from those of all samples"
        said.append(f"Of {n} slices {counts}{f', {few} not known' if few else ''}; {level}.")
    reasons = (slices.not_compared or {}).items()
    return said + [f"Not compared: {name}: {why}." for name, why in reasons]


def regression_lines(since: Comparison) -> list[str]:
    """Return a sentence for each regression: the metric, both values and the interval."""
    return [f"{found.metric} became worse: {describe_change(found)}" for found in since.find("worse")]


def describe_change(found: Difference) -> str:
    """Describe a change in words, with how its interval was made."""
    values = f"{format_value(found, found.before)} before, {format_value(found, found.after)} after"
    change = f"change {format_change(found)}"
    remark = f"; {found.remark}" if found.remark else ""
    return f"{values}, {change} ({found.change.method}){remark}"


def difference_results(since: Comparison) -> list[GateResult]:
    """Return each difference as the result of a gate: a regression fails, what cannot be told is undecided."""
    verdicts: dict[str, Verdict] = {"worse": "fail", "not known": "undecided"}
    return [
        GateResult(
            found.metric,
            f"no worse than {since.before}",
            found.change.value,
            (found.change.low, found.change.high),
            verdicts.get(found.verdict, "pass"),
            found.verdict != "worse",
            f"{found.verdict}: {describe_change(found)}",
        )
        for found in since.differences
    ]


def since_line(since: Comparison) -> str:
    """Return how many regressions there are since an earlier report, and of what."""
    worse = [found.metric for found in since.find("worse")]
    if not worse:
        return f"no regression beyond noise since {since.before}"
    return f"{len(worse)} regression{'s' * (len(worse) > 1)} beyond noise since {since.before}: {', '.join(worse)}"


def comparison_notes(compared: Comparison) -> list[str]:
    """Return what a reader of the table must know: the level, what else was found, and what is not compared."""
    notes = [describe_level(compared), *compared.notes]
    remarks: dict[str, list[str]] = {}
    for found in compared.differences:
        if found.remark:
            remarks.setdefault(found.remark, []).append(found.metric)
    notes += [f"{', '.join(metrics)}: {remark}." for remark, metrics in remarks.items()]
    reasons: dict[str, list[str]] = {}
    for metric, why in compared.not_compared.items():
        reasons.setdefault(why, []).append(metric)
    return notes + [f"Not compared: {', '.join(metrics)}: {why}." for why, metrics in reasons.items()]


def describe_level(compared: Comparison) -> str:
    """Say what the intervals promise."""
    if not compared.n_intervals:
        return "Nothing here has an interval: sizes are exact."
    level = f"{100 * compared.confidence:g} %"
    if compared.n_intervals == 1:
        return f"The interval holds at {level}."
    return (
        f"All {compared.n_intervals} intervals hold at once at {level}: of bundles that do not differ, one comparison "
        f"in {round(1 / (1 - compared.confidence))} at most calls anything real."
    )
