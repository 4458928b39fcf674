"""report.html: one judgement of one bundle as a page that can be mailed, printed and read on a phone.

The page is made from the report and the bundle alone, so that it can be made anew wherever the bundle was judged.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from compress.errors import OutputError
from compress.pages.charts import (
    AFTER,
    BEFORE,
    TICK,
    Line,
    clean_text,
    draw_chart,
    draw_lines,
    is_narrow,
    write_plainly,
)
from compress.pages.frontier import Frontier, draw_frontier, front_rows
from compress.pages.layers import WORST, count_actions, draw_measures, group_kept, real_layers, worst_table
from compress.pages.page import render_page
from compress.pages.samples import show_samples
from compress.pages.sizes import LayerSize, list_tensors, sum_formats, sum_layers
from compress.pages.why import draw_roofline
from runtime.bundle.format import Artifact, Manifest
from runtime.judge.changes import Confusion
from runtime.judge.findings import Findings, PassTable
from runtime.judge.gates import GateResult
from runtime.judge.passes import choose_metrics
from runtime.judge.why import Explanation
from runtime.metrics import MEASURED
from runtime.metrics.base import Metric
from runtime.report.curves import find_curves
from runtime.report.passes import LATENCY, pass_cells, pass_heads, pass_notes
from runtime.report.report import (
    BACKEND_HEADS,
    PAGE,
    STAGE_HEADS,
    Row,
    backend_cells,
    stage_cells,
    table_rows,
    verdict_line,
)
from runtime.report.slices import SLICE_HEADS, choose_slices, confusion_lines, slice_cells, slice_notes
from runtime.report.why import (
    LAYER_HEADS,
    NO_CAUSE,
    OPERATOR_HEADS,
    headline,
    layer_cells,
    operator_cells,
    remaining_line,
)
from runtime.tasks.manifest import read_manifest
from runtime.tasks.metrics import METRICS
from runtime.words import figure_text, interval_brackets, ms_text, size_text

LARGEST = 12
"""Layers by size, and classes, that a table shows unfolded."""
TIMES = {
    "latency": "One call of the model",
    "end_to_end": "A whole answer, bytes to answer",
    "ttft": "Time to the first token",
    "itl": "Time between two tokens",
}
"""`Findings.distributions`, in the order of the page."""
PERCENTILES = (50, 90, 95, 99)
SHARES = (" %", " points")
"""Units of shares and of their changes."""


def write_report_page(bundle: Path, report: Findings, folder: Path, frontier: Frontier | None = None) -> Path:
    """Write report.html into `folder`, whole or not at all, and return its path. Raises OutputError, BundleError."""
    page = folder / PAGE
    draft = folder / f"{PAGE}.{os.getpid()}.tmp"
    try:
        draft.write_bytes(render_report(bundle, report, frontier).encode("utf-8", "replace"))
        os.replace(draft, page)
    except OSError as error:
        raise OutputError(f"cannot write {page}: {error.strerror}; name another folder with --report DIR") from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return page


def render_report(bundle: Path, report: Findings, frontier: Frontier | None = None) -> str:
    """Return the page of a report. `bundle`: the folder that it judged; `frontier`: of the search that it comes from.

    A part that nothing was measured for is left out. Raises BundleError where the bundle is damaged.
    """
    manifest = read_manifest(bundle)
    layers = real_layers(report.layers)
    _, _, summary = verdict_line(report).partition(": ")
    heads, worst = worst_table(layers)
    return render_page(
        "report.html",
        report=report,
        manifest=manifest,
        summary=summary if report.verdict != "unjudged" else verdict_line(report),
        headlines=make_headlines(report),
        gates=[show_gate(gate) for gate in report.gates],
        measurements=list_measurements(report),
        backends=(BACKEND_HEADS, [backend_cells(row) for row in report.backends]),
        times=[draw_times(name, report) for name in TIMES if report.distributions.get(name)],
        percentiles=list_percentiles(report),
        stages=(STAGE_HEADS, stage_cells(report)),
        why=describe_why(report.explanation) if report.explanation else None,
        sizes=describe_sizes(bundle, manifest, report, layers),
        passes=describe_passes(report.steps),
        actions=count_actions(layers),
        measures=draw_measures(layers),
        worst=(heads, worst[:WORST], worst[WORST:]),
        kept=group_kept(layers),
        curves=draw_curves(report.layers),
        frontier=frontier,
        frontier_chart=draw_frontier(frontier) if frontier else "",
        frontier_rows=front_rows(frontier.trials) if frontier else [],
        slices=[
            (t, SLICE_HEADS, [list(row) for row in slice_cells(t)], slice_notes(t, report.confidence))
            for t in choose_slices(report)
        ],
        classes=worst_classes(report.confusion) if report.confusion else [],
        confusions=confusion_lines(report.confusion, 8) if report.confusion else [],
        samples=show_samples(bundle, manifest, report.changes) if report.changes else [],
        machine=[(name, _show_fact(value)) for name, value in report.environment.items() if value not in (None, "")],
        settings=[
            (name.replace("_", " "), _show_fact(value))
            for name, value in report.benchmark.items()
            if value is not None and not isinstance(value, dict)
        ],
        lock=_read_text(bundle, "lock.json"),
        recipe=_read_text(bundle, "recipe.yaml"),
    )


def describe_why(explanation: Explanation) -> dict[str, Any]:
    """Return what the page says of a model's time: sentences, causes, (heads, rows) of two tables, the roofline."""
    return {
        "headline": headline(explanation),
        "causes": explanation.causes,
        "no_cause": NO_CAUSE,
        "operators": (OPERATOR_HEADS, operator_cells(explanation)),
        "layers": (LAYER_HEADS, layer_cells(explanation)),
        "remaining": remaining_line(explanation),
        "roofline": draw_roofline(explanation),
    }


@dataclass(frozen=True)
class Headline:
    """A number that stands at the top: "3.58x smaller", and from what to what."""

    value: str
    label: str
    detail: str
    interval: str = ""


def make_headlines(report: Findings) -> list[Headline]:
    """Return size, speed, and the quality metrics that gates are about, two at most."""
    before, after = report.baseline, report.candidate
    found = []
    if (ratio := report.ratios.get("size")) is not None:
        sizes = f"{size_text(before.size_bytes)} to {size_text(after.size_bytes)}"
        found.append(_ratio_headline(ratio, "smaller", "larger", sizes, report, "size"))
    speed = "tpot" if after.generation else "latency_p50"
    if (ratio := report.ratios.get(speed)) is not None:
        ends = [of.generation.get("tpot") if after.generation else of.latency_ms.get("p50") for of in (before, after)]
        times = f"{ms_text(ends[0])} to {ms_text(ends[1])}, {LATENCY[speed]}"
        found.append(_ratio_headline(ratio, "faster", "slower", times, report, speed))
    return found + [_quality_headline(report, name) for name in choose_metrics(report)[:2]]


def _ratio_headline(ratio: float, more: str, less: str, detail: str, report: Findings, name: str) -> Headline:
    interval = report.ratio_intervals.get(name)
    if ratio >= 1 or ratio <= 0:
        return Headline(f"{ratio:.2f}x", more, detail, interval_brackets(interval, ".2f"))
    turned = None if interval is None else (_invert(interval[1]), _invert(interval[0]))
    return Headline(f"{1 / ratio:.2f}x", less, detail, interval_brackets(turned, ".2f"))


def _invert(number: float) -> float:
    return 1 / number if number > 0 else math.inf


def _quality_headline(report: Findings, name: str) -> Headline:
    after, change = report.candidate.metrics[name], report.differences.get(name)
    share = is_share(METRICS.get(name))
    if change is None or name not in report.baseline.metrics:
        of_after = report.candidate.intervals.get(name)
        text = share_text(after, of_after) if share else figure_text(after, of_after)
        figure, bracket, ends = text.partition(" [")
        return Headline(figure, name, "", bracket.strip() + ends)
    ends = change["interval"]
    if not share:
        figure, _, ends = figure_text(change["value"], ends, "+z").partition(" ")
        return Headline(figure, name, f"{figure_text(report.baseline.metrics[name])} to {figure_text(after)}", ends)
    was = f"was {share_text(report.baseline.metrics[name])}"
    return Headline(share_text(after), name, was, share_text(change["value"], ends, " points"))


def is_share(metric: Metric | None) -> bool:
    """Return whether a metric is a share of something, from 0 to 1, which people read as a percentage."""
    return metric is not None and metric.range == (0.0, 1.0)


def share_text(value: float, ends: tuple[float, float] | None = None, unit: str = " %") -> str:
    """Format a share, or a change of one in points, with its interval: "99.37 % [98.54, 99.80]"."""
    sign = "" if unit == " %" else "+z"
    shown = None if ends is None else (100 * ends[0], 100 * ends[1])
    return f"{100 * value:{sign}.2f}{unit} {interval_brackets(shown, f'{sign}.2f')}".rstrip()


Cells = list[str | Markup]


def list_measurements(report: Findings) -> tuple[list[Cells], list[Cells]]:
    """Return the rows before, after and change: those that gates are about first; the other quality metrics apart."""
    gated = {gate.metric.removesuffix("_ratio") for gate in report.gates}
    named = gated | set(choose_metrics(report))
    rows = sorted(table_rows(report), key=lambda row: row.metric not in named)
    apart = [row for row in rows if row.metric in METRICS and row.metric not in named]
    shown = [row for row in rows if row not in apart]
    return [_show_row(report, row) for row in shown], [_show_row(report, row) for row in apart]


def _show_row(report: Findings, row: Row) -> Cells:
    before, after, change = row.before, row.after, row.change
    if is_share(METRICS.get(row.metric)):
        sides = (report.baseline, report.candidate)
        before, after = (
            share_text(side.metrics[row.metric], side.intervals.get(row.metric)) if row.metric in side.metrics else "-"
            for side in sides
        )
        if found := report.differences.get(row.metric):
            change = share_text(found["value"], found["interval"], " points")
    cells = [_dim_interval(before), _dim_interval(after), _dim_interval(change)]
    if (word := _find_direction(report, row.metric)) and cells[-1]:
        cells[-1] = Markup('<span class="{}">{}</span>').format(word, cells[-1])
    return [row.name, *cells]


def _find_direction(report: Findings, name: str) -> str:
    """Return "better" or "worse" where the change is certain, by its whole interval; else "".

    Nearness to the float model only ever falls: that is no news, and has no colour.
    """
    metric, change = METRICS.get(name), report.differences.get(name)
    if metric is not None:
        if change is None or metric.against == "baseline":
            return ""
        low, high = sorted(end if metric.higher_is_better else -end for end in change["interval"])
        return "better" if low > 0 else "worse" if high < 0 else ""
    ratio = report.ratios.get(name)
    low, high = report.ratio_intervals.get(name) or ((ratio, ratio) if name == "size" and ratio else (0.0, math.inf))
    return "better" if low > 1 else "worse" if high < 1 else ""


@dataclass(frozen=True)
class ShownGate:
    """A gate as the page shows it."""

    result: GateResult
    word: str
    value: str
    interval: str
    picture: Markup


def show_gate(gate: GateResult) -> ShownGate:
    """Return a gate with its numbers in their unit, and a picture of where the value lies beside the bound."""
    word = {"pass": "holds", "fail": "fails", "undecided": "unsure"}[gate.verdict]
    unit = _gate_unit(gate.metric, gate.kind)
    value = "not measured" if gate.value is None or math.isnan(gate.value) else _format_number(gate.value, unit)
    known = gate.interval is not None and gate.interval[0] != gate.interval[1]
    ends = [_format_end(end, unit) for end in gate.interval or ()]
    if unit in SHARES:  # the unit stands behind the value
        ends = [end.removesuffix(unit) for end in ends]
    interval = f"[{', '.join(ends)}]" if known else ""
    return ShownGate(gate, word, value, interval, draw_gate(gate))


def _gate_unit(metric: str, rule: str) -> str:
    """Return the unit of what a rule bounds: "x" for ratios, "%" and points for shares, "B", "ms", or nothing."""
    if is_share(METRICS.get(metric)):
        return {"min": " %", "max": " %", "max_drop": " points"}.get(rule, "")
    if rule in ("min_speedup",) or metric == "size_ratio":
        return "x"
    known = MEASURED.get(metric)
    if known is None or rule == "min_retained":
        return ""
    return {"bytes": "B", "ms": " ms", "1/s": "/s"}.get(known.unit, "")


def _format_number(number: float, unit: str) -> str:
    if unit in SHARES:
        return f"{100 * number:.4g}{unit}"
    return size_text(number) if unit == "B" else f"{number:.4g}{unit}"


def _format_end(end: float, unit: str) -> str:
    return _format_number(end, unit) if math.isfinite(end) else "unknown"


def draw_gate(gate: GateResult) -> Markup:
    """Draw the value, its interval and the bound on one line, the side on which the gate holds shaded."""
    bound = gate.limit
    if bound is None or gate.value is None or not math.isfinite(gate.value):
        return Markup("")
    low, high = (end if math.isfinite(end) else gate.value for end in (gate.interval or (gate.value, gate.value)))
    least, most = min(low, bound, gate.value), max(high, bound, gate.value)
    margin = 0.18 * (most - least) or abs(bound) or 1.0
    least, most = least - margin, most + margin

    def place(number: float) -> float:
        return 140 * (number - least) / (most - least)

    at = place(bound)
    shaded = (at, 140 - at) if gate.has_floor else (0.0, at)
    return Markup(
        '<svg class="gate" viewBox="0 0 140 20" width="140" height="20" aria-hidden="true">'
        '<rect x="{:.1f}" y="2" width="{:.1f}" height="16" class="allowed"></rect>'
        '<path d="M{:.1f} 1V19" class="bound"></path>'
        '<path d="M{:.1f} 10H{:.1f}" class="range"></path>'
        '<circle cx="{:.1f}" cy="10" r="3.5" class="{}"></circle></svg>'
    ).format(*shaded, at, place(low), place(high), place(gate.value), gate.verdict)


def _dim_interval(text: str) -> str | Markup:
    """Return a table's cell with the interval behind its value set apart."""
    value, bracket, rest = text.partition(" [")
    if not bracket:
        return "" if text == "-" else text
    return Markup('<span class="figure">{}</span> <span class="interval">[{}</span>').format(value, rest)


def draw_times(name: str, report: Findings) -> Markup:
    """Draw which share of the calls took at most how long, of both models."""
    sides = report.distributions[name]
    colors = {"baseline": (BEFORE, "before"), "candidate": (AFTER, "after")}
    known = {which: times for which, times in sides.items() if which in colors and len(times) == 101}
    spread = [times[1] for times in known.values()], [times[99] for times in known.values()]
    fixed = {"batch_size": report.benchmark.get("batch_size")} if name in ("latency", "end_to_end") else {}
    batch = "".join(f", {size} sample{'s' * (size != 1)} each" for size in fixed.values() if isinstance(size, int))

    def paint(axes: Axes) -> None:
        handles: list[Line2D] = []
        words: list[str] = []
        for which, times in known.items():
            color, word = colors[which]
            handles += axes.plot(times[:100], range(100), color=color)
            words.append(f"{word}: median {times[50]:.3g} ms")
            axes.plot(times[50], 50, "o", color=color, markersize=5)
        if spread[0] and min(spread[0]) > 0 and max(spread[1]) / min(spread[0]) > 15:
            axes.set_xscale("log", subs=[2, 5])
            write_plainly(axes.xaxis)
        axes.set(xlabel="ms", ylabel="% of calls that took at most so long", ylim=(0, 100))
        above = (0, 1)  # a line may lie anywhere
        columns = 1 if is_narrow(axes) else 2
        axes.legend(
            handles, words, ncols=columns, loc="lower left", bbox_to_anchor=above, columnspacing=1.2, handlelength=1.4
        )

    return draw_chart(TIMES[name] + batch, paint)


def list_percentiles(report: Findings) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: for each kind of time and each model its percentiles and the slowest."""
    heads = ["", *(f"p{p}" for p in PERCENTILES), "slowest"]
    rows = []
    for name in TIMES:
        for which, times in report.distributions.get(name, {}).items():
            if len(times) == 101:
                word = {"baseline": "before", "candidate": "after"}.get(which, which)
                rows.append(
                    [f"{TIMES[name].partition(',')[0]}, {word}", *(ms_text(times[p]) for p in (*PERCENTILES, 100))]
                )
    return heads, rows


@dataclass(frozen=True)
class Sizes:
    """What the model files hold: `formats` rows (format, before, after bytes), `layers` the largest first."""

    formats: list[tuple[str, int, int]]
    layers: list[LayerSize]
    whole: tuple[int, int]

    @property
    def has_before(self) -> bool:
        """Return whether the float model's file is there, too."""
        return self.whole[0] > 0


def describe_sizes(
    bundle: Path, manifest: Manifest, report: Findings, layers: Sequence[Mapping[str, Any]]
) -> Sizes | None:
    """Return the sizes by number format and by layer; None where the candidate's file names no tensors."""
    artifacts = {artifact.name: artifact for artifact in manifest.artifacts}
    candidate = _readable(manifest, report.backend)
    after = list_tensors(bundle, candidate)
    before = list_tensors(bundle, artifacts["baseline"]) if "baseline" in artifacts else []
    if not after:
        return None
    sums = sum_formats(before), sum_formats(after)
    names = sorted({**sums[0], **sums[1]}, key=lambda name: -max(sums[0].get(name, 0), sums[1].get(name, 0)))
    formats = [(name, sums[0].get(name, 0), sums[1].get(name, 0)) for name in names]
    weights = {str(row["layer"]): str(row.get("weight", "")) for row in layers}
    by_layer = sorted(sum_layers(weights, before, after), key=lambda size: -max(size.before, size.after))
    return Sizes(formats, by_layer, (sum(sums[0].values()), sum(sums[1].values())))


def _readable(manifest: Manifest, backend: str) -> Artifact:
    """Return the candidate that was judged, or the ONNX file that it was made of."""
    name = backend if backend != "torch" else manifest.target
    chosen = manifest.candidate_for(name)
    return chosen if chosen.kind in ("onnx", "checkpoint") else manifest.graph_for(name)


@dataclass(frozen=True)
class Passes:
    """The table of passes and its charts."""

    heads: list[str]
    rows: list[list[str | Markup]]
    notes: list[str]
    charts: list[Markup]


def describe_passes(table: PassTable | None) -> Passes | None:
    """Return what each pass cost and gave, with charts from two passes on."""
    if table is None:
        return None
    cells = [list(row) for row in pass_cells(table)]
    heads = list(pass_heads(table))
    filled = [place for place in range(len(heads)) if any(row[place] not in ("", "-") for row in cells)]
    rows = [[_dim_interval(row[place]) for place in filled] for row in cells]
    names = [row.name for row in table.rows]
    charts = []
    if len(names) > 2:
        sizes = [None if row.size_bytes is None else row.size_bytes / 2**20 for row in table.rows]
        charts = [
            _draw_bars(label, names, values)
            for label, values in (
                ("Size after each pass, MiB", sizes),
                (
                    f"{LATENCY[table.latency][0].upper()}{LATENCY[table.latency][1:]} after each pass, ms",
                    [row.latency_ms for row in table.rows],
                ),
            )
            if sum(value is not None for value in values) > 1
        ]
    return Passes([heads[place] for place in filled], rows, pass_notes(table), charts)


def _draw_bars(label: str, names: Sequence[str], values: Sequence[float | None]) -> Markup:
    """Draw a bar for each name, from the top down; none where there is no value."""

    def paint(axes: Axes) -> None:
        places = range(len(names))
        numbers = [0.0 if value is None else value for value in values]
        colors = [BEFORE] + [AFTER] * (len(names) - 1)
        bars = axes.barh(places, numbers, color=colors, height=0.62)
        axes.bar_label(bars, ["not measured" if v is None else f"{v:.3g}" for v in values], padding=4)
        axes.set_yticks(places, [clean_text(name, TICK) for name in names])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.16)

    return draw_chart(label, paint, height=48 + 30 * len(names))


def draw_curves(layers: Sequence[Any]) -> list[Markup]:
    """Draw the curves of each pass that trained, in one chart a pass."""
    by_pass: dict[str, list[Line]] = {}
    for curve in find_curves(layers):
        steps, values = zip(*curve.points, strict=True)
        by_pass.setdefault(curve.of, []).append(Line(curve.name, steps, values))
    return [
        draw_lines(name, lines, "optimizer step", "loss", _falls_far(lines), full=len(by_pass) == 1)
        for name, lines in by_pass.items()
    ]


def _falls_far(lines: Sequence[Line]) -> bool:
    """Return whether losses fall by so much that only a logarithmic axis shows it."""
    values = [value for line in lines for value in line.y]
    return min(values) > 0 and max(values) / min(values) > 10


@dataclass(frozen=True)
class ClassRow:
    """How many samples of a class each model finds."""

    name: str
    n: int
    before: float
    after: float


def worst_classes(confusion: Confusion) -> list[ClassRow]:
    """Return the share of each class's samples that get their class, the candidate's worst first."""
    totals: dict[str, int] = {}
    right: dict[str, tuple[int, int]] = {}
    for pair in confusion.pairs:
        totals[pair.label] = totals.get(pair.label, 0) + pair.candidate
        if pair.label == pair.taken_for:
            right[pair.label] = (pair.baseline, pair.candidate)
    rows = []
    for name, n in totals.items():
        before, after = right.get(name, (0, 0))
        if n:
            rows.append(ClassRow(name, n, before / n, after / n))
    return sorted(rows, key=lambda row: (row.after, row.after - row.before))


def _show_fact(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_text(bundle: Path, name: str) -> str:
    """Return a file of the bundle as text, JSON indented; "" where it has none."""
    file = bundle / name
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix == ".json":
        with suppress(ValueError):
            text = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    return text
