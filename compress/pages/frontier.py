"""The trials of a search in one chart: what each costs against what it keeps, and which of them nothing beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from compress.pages.charts import AFTER, INK, MUTED, draw_chart, tip, write_plainly
from compress.pages.page import read_style

Interval = tuple[float, float]
IN_NOTEBOOKS = """
.compress-front {
  color-scheme: light dark; max-width: 1030px; font-size: 13px;
  --ink: var(--jp-content-font-color1, var(--vscode-foreground, light-dark(#1c2126, #e7e9ec)));
  --muted: var(--jp-content-font-color2, var(--vscode-descriptionForeground, light-dark(#5c6670, #9ba5b0)));
  --card: var(--jp-layout-color1, var(--vscode-editor-background, light-dark(#ffffff, #1b1f23)));
  --line: #8b95a166; --after: #2489b5;
}
"""
"""The colours of a notebook's editor, or of the browser where it names none; no rule reaches beyond the drawing."""


@dataclass(frozen=True)
class PlottedTrial:
    """One trial. `x`, `y`: its two numbers; `on_front`: no other is better in both; `chosen`: it is the bundle.

    `holds`: every gate does. `about`: what it tried, in a few words. `details`: lines that a pointer shows beside them.
    `x_interval`, `y_interval`: ends of the two numbers' intervals; None where there is none.
    """

    name: str
    x: float
    y: float
    on_front: bool = False
    chosen: bool = False
    about: str = ""
    holds: bool = True
    details: tuple[str, ...] = ()
    x_interval: Interval | None = None
    y_interval: Interval | None = None

    @property
    def kind(self) -> str:
        """Return what it came to, as the legend says it."""
        if self.chosen:
            return "chosen"
        return "on the front" if self.on_front else "beaten" if self.holds else "a gate falls short"


@dataclass(frozen=True)
class Frontier:
    """A search's trials by two goals; draws itself in a notebook.

    A bundle that comes of a search hands it to `render_report`.
    """

    x_label: str
    y_label: str
    trials: tuple[PlottedTrial, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know: how many trials failed, what the budget was."""

    def _repr_html_(self) -> str:
        style = Markup("<style>{}{}</style>").format(Markup(IN_NOTEBOOKS), read_style("chart.css"))
        return Markup('<div class="compress-front">{}{}</div>').format(style, draw_frontier(self))


STYLES = {
    "chosen": ("o", 9, INK),
    "on the front": ("o", 6.5, AFTER),
    "beaten": ("o", 4.5, MUTED),
    "a gate falls short": ("x", 5.5, MUTED),
}
"""What a trial came to -> marker, its size, its colour; in the order of the legend."""


def draw_frontier(frontier: Frontier) -> Markup:
    """Draw all trials with their intervals, the front as a line through those that nothing beats."""

    def paint(axes: Axes) -> None:
        front = sorted((trial for trial in frontier.trials if trial.on_front), key=lambda trial: trial.x)
        axes.plot([trial.x for trial in front], [trial.y for trial in front], color=AFTER, linewidth=1)
        for trial in sorted(frontier.trials, key=lambda trial: -list(STYLES).index(trial.kind)):  # the chosen on top
            marker, size, color = STYLES[trial.kind]
            (point,) = axes.plot(trial.x, trial.y, marker, markersize=size, color=color)
            point.set_gid(tip(describe_trial(trial, frontier)))
        if _spans_decades([trial.x for trial in frontier.trials]):
            axes.set_xscale("log", subs=[2, 5])
            write_plainly(axes.xaxis)
        if _spans_decades([trial.y for trial in frontier.trials]):
            axes.set_yscale("log", subs=[2, 5])
            write_plainly(axes.yaxis)
        # the axes stay: an interval may be a thousand times as wide as what lies between the trials
        axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
        for trial in frontier.trials:
            bars = []
            if trial.x_interval is not None and all(map(math.isfinite, trial.x_interval)):
                bars.append((trial.x_interval, (trial.y, trial.y)))
            if trial.y_interval is not None and all(map(math.isfinite, trial.y_interval)):
                bars.append(((trial.x, trial.x), trial.y_interval))
            for x, y in bars:
                axes.plot(x, y, color=STYLES[trial.kind][2], linewidth=1, alpha=0.6, zorder=1.5)
        axes.set(xlabel=frontier.x_label, ylabel=frontier.y_label)
        kinds = [kind for kind in STYLES if any(trial.kind == kind for trial in frontier.trials)]
        marks = [STYLES[kind] for kind in kinds]
        handles = [Line2D([], [], linestyle="", marker=m, markersize=s, color=c) for m, s, c in marks]
        axes.legend(handles, kinds, ncols=2, loc="lower left", bbox_to_anchor=(0, 1), handletextpad=0.2)

    return draw_chart(f"{frontier.y_label} against {frontier.x_label}", paint, full=True, height=340)


def _spans_decades(numbers: Sequence[float]) -> bool:
    """Return whether a linear axis would crowd the least of the numbers at its end."""
    return min(numbers) > 0 and max(numbers) > 30 * min(numbers)


def describe_trial(trial: PlottedTrial, frontier: Frontier) -> str:
    """Return the lines that a pointer shows of a trial: what it came to, its numbers, what it tried."""
    numbers = trial.details or (f"{frontier.x_label}: {trial.x:.4g}", f"{frontier.y_label}: {trial.y:.4g}")
    return "\n".join(filter(None, [f"{trial.name}, {trial.kind}", *numbers, trial.about.replace(", ", "\n")]))


def front_rows(trials: Sequence[PlottedTrial]) -> list[list[str]]:
    """Return a row for each trial on the front: name, both numbers, what it tried."""
    front = sorted((trial for trial in trials if trial.on_front), key=lambda trial: trial.x)
    return [[f"{t.name} (this bundle)" if t.chosen else t.name, f"{t.x:.4g}", f"{t.y:.4g}", t.about] for t in front]
