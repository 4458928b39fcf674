"""What layers.json says of each layer, ordered for people: errors, sensitivities, what stayed as it was and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from compress.pages.charts import LEGEND, SERIES, clean_text, draw_chart, tip, write_plainly
from runtime.bundle.format import NO_LAYERS

WORST = 12
"""Layers that a table shows unfolded."""
KEPT = "kept"


@dataclass(frozen=True)
class Measure:
    """A number that passes measure of layers. `key`: its name in layers.json."""

    key: str
    label: str
    higher_is_worse: bool
    log: bool = True

    def value(self, row: dict[str, Any]) -> float | None:
        """Return the layer's number; None where it was not measured."""
        value = row.get(self.key)
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    def badness(self, row: dict[str, Any]) -> float:
        """Return the key that sorts the worst layer last; a layer that was not measured comes first."""
        value = self.value(row)
        return -math.inf if value is None else value if self.higher_is_worse else -value


MEASURES = (
    Measure("sensitivity", "sensitivity: how far the model's outputs move with this layer alone rounded", True),
    Measure("sqnr_db", "signal over rounding error at the layer's output, dB", False, log=False),
    Measure("output_error", "error of the layer's output, relative to its energy", True),
    Measure("error_after", "error of the layer's products, relative to their energy", True),
    Measure("weight_error", "error of the layer's weights, relative to their energy", True),
    Measure("fit_after", "error left after compensation, relative to the output's variance", True),
)
"""What charts and the table of the worst layers are about, the first that was measured deciding the order."""


def real_layers(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the rows that are of layers, and not notes or curves."""
    return [row for row in rows if isinstance(row, dict) and row.get("type") not in NO_LAYERS and row.get("layer")]


def list_measures(rows: Sequence[dict[str, Any]]) -> list[Measure]:
    """Return what was measured of at least two layers."""
    return [m for m in MEASURES if sum(m.value(row) is not None for row in rows) > 1]


def draw_measures(rows: Sequence[dict[str, Any]]) -> list[Markup]:
    """Draw each measure over the layers, in the model's order, coloured by what was done to them."""
    return [_draw_measure(measure, rows) for measure in list_measures(rows)]


def _draw_measure(measure: Measure, rows: Sequence[dict[str, Any]]) -> Markup:
    known = [(n, row, value) for n, row in enumerate(rows, 1) if (value := measure.value(row)) is not None]
    actions = list(dict.fromkeys(str(row.get("action", "")) for _, row, _ in known))
    # of more layers only the worst say their names under the pointer
    named = {n for n, _, _ in sorted(known, key=lambda point: measure.badness(point[1]))[-400:]}
    values = [value for _, _, value in known]

    def paint(axes: Axes) -> None:
        handles = []
        for number, action in enumerate(actions):
            color = SERIES[number % len(SERIES)]
            for n, row, value in known:
                if str(row.get("action", "")) == action:
                    (point,) = axes.plot(n, value, "o", markersize=5.5, color=color)
                    if n in named:
                        point.set_gid(tip(f"{row['layer']}: {value:.4g} ({action})"))
            handles.append(point)
        if measure.log and min(values) > 0 and max(values) / min(values) > 20:
            axes.set_yscale("log", subs=[2, 5])
            write_plainly(axes.yaxis)
        axes.set(xlabel="layer, in the model's order", xlim=(0.4, len(rows) + 0.6))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(actions) > 1:
            names, columns = [clean_text(action, LEGEND) for action in actions], min(4, len(actions))
            axes.legend(handles, names, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)

    return draw_chart(measure.label, paint, full=True, height=230)


def worst_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the measured layers, the worst by the first measure at the top."""
    measures = list_measures(rows)
    if not measures:
        return [], []
    known = [row for row in rows if any(measure.value(row) is not None for measure in measures)]
    ranked = sorted(known, key=measures[0].badness, reverse=True)
    heads = ["layer", "type", "done", *(measure.label.partition(":")[0].partition(",")[0] for measure in measures)]
    return heads, [list(_cells(row, measures)) for row in ranked]


def _cells(row: dict[str, Any], measures: Sequence[Measure]) -> Iterator[str]:
    yield str(row["layer"])
    yield str(row.get("type", ""))
    yield str(row.get("action", ""))
    for measure in measures:
        value = measure.value(row)
        yield "" if value is None else f"{value:.4g}"


@dataclass(frozen=True)
class KeptLayers:
    """Layers that stayed as they were for one reason."""

    reason: str
    layers: tuple[str, ...]


def group_kept(rows: Sequence[dict[str, Any]]) -> list[KeptLayers]:
    """Group the layers that no pass changed by the reason, the most layers first."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.get("action") == KEPT:
            groups.setdefault(str(row.get("reason") or "no pass was about it"), []).append(str(row["layer"]))
    return [KeptLayers(why, tuple(names)) for why, names in sorted(groups.items(), key=lambda item: -len(item[1]))]


def count_actions(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Count the layers by what was done to them, the most first."""
    counts: dict[str, int] = {}
    for row in rows:
        action = str(row.get("action", ""))
        counts[action] = counts.get(action, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])
