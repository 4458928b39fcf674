"""The page of a comparison: differences as intervals around no change, then what was asked for and done otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes

from compress.pages.charts import MUTED, SERIES, clean_text, draw_chart, tip
from compress.pages.page import render_page
from runtime.judge.findings import Comparison, Difference, SliceDifference
from runtime.report.differences import (
    SLICE_HEADS,
    describe_change,
    difference_cells,
    format_value,
    label_of,
    slice_cells,
)

BETTER, WORSE = SERIES[2], SERIES[1]
COLORS = {"better": BETTER, "worse": WORSE, "within noise": MUTED}
FARTHEST = 30.0
"""Half-widths of its interval by which a difference is drawn at most."""


@dataclass(frozen=True)
class ComparisonPart:
    """What the page says of one bundle against the first: rows of cells, all of them text."""

    measured: Comparison
    summary: str
    runs: Sequence[Sequence[str]]
    recipe: Sequence[Sequence[str]]
    layers: Sequence[Sequence[str]]
    notes: Sequence[str]
    slices: Sequence[SliceDifference] = ()
    """In the order of the page."""
    slice_notes: Sequence[str] = ()

    @property
    def slice_rows(self) -> list[tuple[str | Markup, ...]]:
        """Return a row of the table for each slice."""
        return [(*slice_cells(found), _mark(found.difference, found.difference.verdict)) for found in self.slices]

    @property
    def verdict(self) -> str:
        """Return the class of the badge: fail where something is worse, pass where something is better."""
        return "fail" if self.measured.find("worse") else "pass" if self.measured.find("better") else "unjudged"

    @property
    def rows(self) -> list[tuple[str | Markup, ...]]:
        """Return a row of the table for each difference, those beyond noise first."""
        return [
            (*difference_cells(found)[:4], _mark(found, found.verdict)) for found in sort_differences(self.measured)
        ]

    @property
    def chart(self) -> Markup | None:
        """Return the chart of the differences that have an interval; None where none has."""
        drawn = [found for found in sort_differences(self.measured) if is_drawn(found)]
        return draw_differences(drawn) if drawn else None


def render_comparison(parts: Sequence[ComparisonPart]) -> str:
    """Return the page, UTF-8 text."""
    return render_page(
        "comparison.html",
        parts=parts,
        against=parts[0].measured.before,
        glance=lay_side_by_side([part.measured for part in parts]),
        slice_heads=SLICE_HEADS,
    )


def lay_side_by_side(compared: Sequence[Comparison]) -> list[list[str | Markup]]:
    """Return a row for each metric with a column for each bundle, the first being what all are compared with."""
    labels = {label_of(found): None for measured in compared for found in measured.differences}
    rows: list[list[str | Markup]] = []
    for label in labels:
        found = [next((d for d in each.differences if label_of(d) == label), None) for each in compared]
        first = next(difference for difference in found if difference is not None)
        marked = ["-" if d is None else _mark(d, format_value(d, d.after)) for d in found]
        rows.append([label, format_value(first, first.before), *marked])
    return rows


def sort_differences(measured: Comparison) -> list[Difference]:
    """Return the differences: what is worse, what is better, then the others, each in the order of the tables."""
    order = ("worse", "better", "within noise", "not known")
    return sorted(measured.differences, key=lambda found: order.index(found.verdict))


def _mark(found: Difference, text: str) -> Markup:
    """Return the text in the colour of the verdict."""
    kind = found.verdict if found.verdict in ("better", "worse") else "muted" if text == found.verdict else ""
    return Markup('<span class="{}">{}</span>').format(kind, text)


def is_drawn(found: Difference) -> bool:
    """Return whether a difference has an interval whose both ends are known."""
    low, high = _find_goodness(found)[1:]
    return math.isfinite(low) and math.isfinite(high) and high > low


def draw_differences(drawn: Sequence[Difference]) -> Markup:
    """Draw each difference with its interval, better to the right; each row on a scale of its own.

    A row's unit is half of its interval's width, so that rows of every unit of measurement stand beside each other:
    what keeps away from the line in the middle is beyond noise.
    """

    def paint(axes: Axes) -> None:
        axes.axvline(0, color=MUTED, linewidth=1)
        for place, found in enumerate(drawn):
            value, low, high = _scale_row(found)
            color = COLORS.get(found.verdict, MUTED)
            (line,) = axes.plot([low, high], [place, place], color=color, linewidth=2.4, solid_capstyle="butt")
            (point,) = axes.plot([value], [place], "o", color=color, markersize=6)
            for artist in (line, point):
                artist.set_gid(tip(f"{found.metric}: {describe_change(found)}"))
        axes.set_xscale("symlog", linthresh=3)
        axes.set(yticks=range(len(drawn)), xlabel="worse \u2190 no change \u2192 better", ylim=(len(drawn) - 0.4, -0.6))
        axes.set_yticklabels([clean_text(found.metric) for found in drawn])
        axes.set_xticks([0], labels=[""])
        axes.minorticks_off()
        widest = 1.1 * max(abs(end) for found in drawn for end in _scale_row(found))
        axes.set_xlim(-widest, widest)

    label = (
        "Each difference with its interval, on a scale of its own: one that does not reach the middle is beyond noise"
    )
    return draw_chart(label, paint, full=True, height=70 + 24 * len(drawn))


def _scale_row(found: Difference) -> tuple[float, float, float]:
    """Return value and ends in half-widths of the interval, cut at `FARTHEST`."""
    value, low, high = _find_goodness(found)
    half = (high - low) / 2
    return tuple(max(-FARTHEST, min(FARTHEST, number / half)) for number in (value, low, high))  # type: ignore[return-value]


def _find_goodness(found: Difference) -> tuple[float, float, float]:
    """Return value and ends so that no change is 0 and more is better; of ratios their logarithms."""
    change = found.change
    numbers = change.value, change.low, change.high
    if found.scale == "ratio":
        numbers = tuple(math.log(number) if number > 0 else -math.inf for number in numbers)  # type: ignore[assignment]
    elif not found.higher_is_better:
        numbers = -change.value, -change.high, -change.low
    return numbers
