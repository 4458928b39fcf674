"""Training curves out of a bundle's layers.json, as a line of text and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Characters of a line of text, at most."""
COLORS = ("#3182ce", "#dd6b20", "#38a169", "#805ad5")
"""Of a picture's curves: readable on white and on black."""
Point = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """What a pass measured while it trained, by step. `name`: "training loss", "loss held out"."""

    of: str
    """The pass."""
    name: str
    points: tuple[Point, ...]


def find_curves(layers: Sequence[Any]) -> list[Curve]:
    """Return the rows "<pass>: <what>" of type "measured" that hold numbers by step and nothing else, in order."""
    curves = []
    for row in layers:
        if not isinstance(row, dict) or row.get("type") != "measured":
            continue
        of, _, name = str(row.get("layer", "")).partition(": ")
        points = {key: value for key, value in row.items() if key not in ("layer", "type", "action", "pass")}
        if name and points and all(key.isdecimal() and _is_finite(value) for key, value in points.items()):
            curves.append(Curve(of, name, tuple(sorted((int(key), float(value)) for key, value in points.items()))))
    return curves


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def curve_line(curve: Curve) -> str:
    """Return a line of bars, and between which values and steps it goes."""
    (start, first), (end, last) = curve.points[0], curve.points[-1]
    lowest = min(value for _, value in curve.points)
    least = "" if lowest in (first, last) else f", least {lowest:.4g}"
    return f"{curve.of}: {curve.name}  {sparkline(curve)}  {first:.4g} to {last:.4g}{least}; steps {start} to {end}"


def sparkline(curve: Curve) -> str:
    """Draw bars at even distances of steps, each as high as the mean of its points; without points, as the last bar."""
    heights = _scale_heights([value for _, value in curve.points])
    start, end = curve.points[0][0], curve.points[-1][0]
    n = min(WIDTH, len(curve.points))
    bins: list[list[float]] = [[] for _ in range(n)]
    for (step, _), height in zip(curve.points, heights, strict=True):
        bins[min(n * (step - start) // max(end - start, 1), n - 1)].append(height)
    text, level = "", bins[0]
    for heights in bins:
        level = heights or level
        text += BARS[min(int(sum(level) / len(level) * len(BARS)), len(BARS) - 1)]
    return text


def _scale_heights(values: Sequence[float]) -> list[float]:
    """Scale to 0 (the least) to 1 (the most); by logarithms where all are positive, as losses fall by factors."""
    if min(values) > 0:
        values = [math.log(value) for value in values]
    low, span = min(values), max(values) - min(values)
    return [(value - low) / span if span > 0 else 0.5 for value in values]


def curves_svg(curves: Sequence[Curve], width: int = 520, height: int = 180) -> str:
    """Draw all curves of one pass in one picture, as an <svg> without scripts and style sheets."""
    left, right, top, bottom = 64, 12, 24, 28
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    low, span = min(steps), max(max(steps) - min(steps), 1)
    heights = iter(_scale_heights(values))
    parts = [f'<path d="M{left} {top}V{height - bottom}H{width - right}" fill="none" stroke="#a0aec0"></path>']
    for number, curve in enumerate(curves):
        color = COLORS[number % len(COLORS)]
        places = [
            f"{left + (width - left - right) * (step - low) / span:.1f},"
            f"{height - bottom - (height - top - bottom) * next(heights):.1f}"
            for step, _ in curve.points
        ]
        parts.append(
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{color}" stroke-width="1.5"></polyline>'
        )
        parts.append(_draw_text(left + 8 + 150 * number, 14, f"{curve.of}: {curve.name}", "start", color))
    parts += [
        _draw_text(left - 6, top + 5, f"{max(values):.3g}", "end"),
        _draw_text(left - 6, height - bottom + 4, f"{min(values):.3g}", "end"),
        _draw_text(left, height - 8, f"step {low}", "start"),
        _draw_text(width - right, height - 8, f"step {max(steps)}", "end"),
    ]
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{"".join(parts)}</svg>'


def _draw_text(x: int, y: int, text: str, anchor: str, color: str = "#718096") -> str:
    return f'<text x="{x}" y="{y}" font-size="11" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
