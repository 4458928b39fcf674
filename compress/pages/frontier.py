"""The trials of a search in one chart: what each costs against what it keeps, and which of them nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from matplotlib.axes import Axes

from compress.pages.charts import AFTER, INK, MUTED, draw_chart, tip


@dataclass(frozen=True)
class Trial:
    """One trial. `x`, `y`: its two numbers; `on_front`: no other is better in both; `chosen`: it is the bundle."""

    name: str
    x: float
    y: float
    on_front: bool = False
    chosen: bool = False
    about: str = ""
    """What it tried, in a few words."""


@dataclass(frozen=True)
class Frontier:
    """A search's trials by two goals. A bundle that comes of a search hands it to `render_report`."""

    x_label: str
    y_label: str
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know: how many trials failed, what the budget was."""


def draw_frontier(frontier: Frontier) -> Markup:
    """Draw all trials, the front as a line through those that nothing beats."""

    def paint(axes: Axes) -> None:
        front = sorted((trial for trial in frontier.trials if trial.on_front), key=lambda trial: trial.x)
        axes.plot([trial.x for trial in front], [trial.y for trial in front], color=AFTER, linewidth=1)
        for trial in frontier.trials:
            style = ("o", 9, INK) if trial.chosen else ("o", 6, AFTER) if trial.on_front else ("o", 4, MUTED)
            marker, size, color = style
            (point,) = axes.plot(trial.x, trial.y, marker, markersize=size, color=color)
            point.set_gid(tip(f"{trial.name}: {trial.x:.4g}, {trial.y:.4g}. {trial.about}"))
        axes.set(xlabel=frontier.x_label, ylabel=frontier.y_label)

    return draw_chart(f"{frontier.y_label} against {frontier.x_label}", paint, full=True, height=320)


def front_rows(trials: Sequence[Trial]) -> list[list[str]]:
    """Return a row for each trial on the front: name, both numbers, what it tried."""
    front = sorted((trial for trial in trials if trial.on_front), key=lambda trial: trial.x)
    return [[f"{t.name} (this bundle)" if t.chosen else t.name, f"{t.x:.4g}", f"{t.y:.4g}", t.about] for t in front]
