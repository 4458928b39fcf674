"""Charts as inline SVG: drawn by matplotlib, coloured by the page's style sheet, so that they follow light and dark."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree
from zlib import crc32

import matplotlib
from cycler import cycler
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

INK, MUTED, GRID, BEFORE, AFTER = "#010101", "#010102", "#010103", "#010104", "#010105"
"""Colours to draw with: each stands for a variable of the style sheet, which the SVG names in its place."""
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
"""Colours of several lines; the first six differ."""
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    BEFORE: "var(--before)",
    AFTER: "var(--after)",
    **{color: f"var(--series-{number})" for number, color in enumerate(SERIES, 1)},
}
HALF, FULL, NARROW = 500, 1030, 350
"""Widths in pixels: two charts beside each other, one across the page, one on a phone."""
TIP = "tip: "
"""`artist.set_gid(tip(text))`: the text shows where the pointer rests on the artist."""
NEW_LINE = "\u2028"
"""Stands for a line's end in a gid: XML makes a space of it there."""
MOST_SPOTS = 60
"""Points of a chart with a text that shows at once, on a touch or with the keyboard, too; with more it is the browser's
own, which needs a pointer and a second."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of layers and classes may hold a $
    "svg.hashsalt": "compress",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=SERIES),
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.6,
}
LEGEND, TICK = 40, 20
"""Characters of a name in a legend, and beside an axis."""
Paint = Callable[[Axes], None]


@dataclass(frozen=True)
class Line:
    """A line through points; `color`: one of this module's, by default the next of `SERIES`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str | None = None


def draw_chart(label: str, paint: Paint, full: bool = False, height: int = 250) -> Markup:
    """Return a <figure> with a caption and the chart in two widths, of which the style sheet shows the one that fits.

    `label`: the caption, which also names the chart to those who cannot see it. `paint`: draws on the axes that it is
    given, with this module's colours. `height`: pixels.
    """
    with matplotlib.rc_context(STYLE):
        wide = _draw_svg(paint, FULL if full else HALF, height)
        narrow = _draw_svg(paint, NARROW, min(height, 280) if not full else height)
    parts = [_make_plot(text, label, kind) for text, kind in ((wide, "wide"), (narrow, "narrow"))]
    caption = Markup("<figcaption>{}</figcaption>").format(label)
    return Markup('<figure class="chart">{}{}</figure>').format(caption, Markup("").join(parts))


def draw_lines(
    label: str, lines: Sequence[Line], x_label: str, y_label: str, log_y: bool = False, full: bool = False
) -> Markup:
    """Return a chart of lines, with a legend where there are several."""

    def paint(axes: Axes) -> None:
        drawn = [
            axes.plot(line.x, line.y, color=line.color or SERIES[number % len(SERIES)])[0]
            for number, line in enumerate(lines)
        ]
        if log_y:
            axes.set_yscale("log", subs=[2, 5])
            write_plainly(axes.yaxis)
        axes.set(xlabel=x_label, ylabel=y_label)
        if len(lines) > 1:
            axes.legend(drawn, [clean_text(line.name, LEGEND) for line in lines])

    return draw_chart(label, paint, full)


def is_narrow(axes: Axes) -> bool:
    """Return whether the axes are those of a phone's width."""
    return round(axes.get_figure(root=True).get_figwidth() * 72) <= NARROW  # type: ignore[union-attr]


def write_plainly(axis: Axis) -> None:
    """Write the numbers of a logarithmic axis as they are, 1, 2, 5, 10; it was set with `subs=[2, 5]`."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    few = math.log10(max(axis.get_view_interval()) / min(axis.get_view_interval())) < 2.5
    axis.set_minor_formatter(lambda value, _: f"{value:g}" if few else "")


def tip(text: str) -> str:
    """Return the gid that gives an artist a text for the pointer, of one line or several."""
    return TIP + NEW_LINE.join(clean_text(line) for line in text.splitlines())


def clean_text(text: str, most: int = 300) -> str:
    """Return the text without what XML cannot hold, control characters and halves of pairs, cut in its middle.

    `most`: characters; names beside an axis take their room from the chart.
    """
    text = re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) :]}"


def _draw_svg(paint: Paint, width: int, height: int) -> str:
    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")  # a unit of the SVG is 1/72 inch
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    paint(axes)
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # only measured with: the browser's is shown
        figure.savefig(file, format="svg")
    return file.getvalue()


def _make_plot(text: str, label: str, kind: str) -> Markup:
    """Return the drawing and, over its points, the spots that show their texts. `kind`: wide or narrow."""
    root = _clean_svg(text, label, kind)
    spots = _take_spots(root)
    drawing = Markup(ElementTree.tostring(root, encoding="unicode"))
    return Markup('<div class="plot {}">{}{}</div>').format(kind, drawing, Markup("").join(spots))


def _take_spots(root: ElementTree.Element) -> list[Markup]:
    """Return a spot for each point with a text, which moves there from the drawing; none where they are too many.

    A text opens towards the middle of the chart, so that it never leaves the page.
    """
    points = [
        (group, title, marks[0])
        for group in root.iter("g")
        if (title := group.find("title")) is not None and len(marks := list(group.iter("use"))) == 1
    ]
    if len(points) > MOST_SPOTS:
        return []
    spots = []
    for group, title, mark in points:
        x, y = (
            100 * float(mark.attrib[of]) / float(root.attrib[side]) for of, side in (("x", "width"), ("y", "height"))
        )
        opens = f"{'right' if x < 50 else 'left'} {'down' if y < 50 else 'up'}"
        spots.append(
            Markup(
                '<span class="spot {}" style="left:{:.2f}%;top:{:.2f}%" tabindex="0" role="img" aria-label="{}"></span>'
            ).format(opens, x, y, title.text)
        )
        group.remove(title)
    return spots


def _clean_svg(text: str, label: str, kind: str) -> ElementTree.Element:
    """Return the <svg> alone: without addresses, with names that no other chart has, colours as variables."""
    label = clean_text(label)
    root = ElementTree.fromstring(text)
    prefix = f"c{crc32((label + kind + text).encode()):x}-"
    used = set(re.findall(r"#([\w-]+)", " ".join(_references(root))))
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # the style would be the whole page's
                parent.remove(child)
    for element in list(root.iter()):
        element.tail = None
        element.text = element.text if element.tag.endswith("}text") else None
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        _clean_attributes(element, used, prefix)
    size = dict(zip(("width", "height"), root.attrib["viewBox"].split()[2:], strict=True))
    root.attrib = {"viewBox": root.attrib["viewBox"], **size, "role": "img", "aria-label": label}
    return root


def _references(root: ElementTree.Element) -> list[str]:
    return [v for e in root.iter() for name, v in e.attrib.items() if name.endswith("href") or v.startswith("url(#")]


def _clean_attributes(element: ElementTree.Element, used: set[str], prefix: str) -> None:
    name = element.attrib.pop("id", "")
    if name in used:
        element.set("id", prefix + name)
    elif name.startswith(TIP):
        title = ElementTree.Element("title")
        title.text = name.removeprefix(TIP).replace(NEW_LINE, "\n")
        element.insert(0, title)
    for key, value in element.attrib.items():
        if key == "href" or value.startswith("url(#"):
            value = value.replace("#", f"#{prefix}", 1)
        if key in ("d", "x", "y", "transform"):
            value = re.sub(r"(\.\d\d)\d+", r"\1", value)
        if key == "style":
            value = re.sub(r"font-family:[^;]*(;|$)", "", value)
            value = re.sub(r"#0101[01][0-9]", lambda match: VARIABLES.get(match[0], match[0]), value)
        element.set(key, value)
