"""A report, and how it is shown and kept: JSON, Markdown, JUnit, plain text for the terminal, HTML in a notebook.

`report.json` holds the record as it is. Values that could not be measured are null, as are the ends of an interval that
has none; there is never a NaN.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from runtime.errors import RuntimeFailure, UsageError
from runtime.judge.findings import FURTHER, MEASURED_FIELDS, OF_DECODERS, Findings, PassTable, Side, order_metrics
from runtime.judge.gates import GateResult
from runtime.judge.samples import SAMPLES_FILE
from runtime.judge.why import Explanation
from runtime.metrics import MEASURED
from runtime.report.curves import Curve, curve_line, curves_svg, find_curves
from runtime.report.differences import (
    DIFFERENCE_HEADS,
    comparison_notes,
    difference_cells,
    difference_results,
    regression_lines,
    since_line,
)
from runtime.report.passes import pass_cells, pass_heads, pass_notes
from runtime.report.slices import (
    SLICE_HEADS,
    choose_slices,
    confusion_lines,
    confusion_notes,
    confusion_table,
    slice_cells,
    slice_notes,
)
from runtime.report.terminal import align, fold, paint
from runtime.report.why import (
    LAYER_HEADS,
    NO_CAUSE,
    OPERATOR_HEADS,
    headline,
    layer_cells,
    operator_cells,
    remaining_line,
)
from runtime.words import figure_text, interval_brackets, ms_text, size_text

__all__ = [
    "Report",
    "Row",
    "Side",
    "prepare_folder",
    "render_html",
    "render_json",
    "render_junit",
    "render_markdown",
    "render_short",
    "render_text",
    "table_rows",
    "to_dict",
    "verdict_line",
    "write_report",
]

COLORS = {"pass": "#2f855a", "fail": "#c53030", "undecided": "#b7791f", "unjudged": "#718096"}
"""Of a verdict: readable as text on white and on black, and under white text."""
SHOWN = ("size", "latency p50", "time to first token", "time per token")
"""Rows that HTML always leaves open, beside those that a gate is about."""
AT_BUILD = "computed when the bundle was built"
"""Said of a metric whose code is not in the bundle."""


@dataclass(frozen=True)
class Report(Findings):
    """One judgement of one bundle on one machine; draws itself in a notebook."""

    @property
    def metrics(self) -> dict[str, float]:
        """Return the judgement as flat numbers, as MLflow, W&B and TensorBoard log them; only what was measured.

        `top1` is the candidate's, `baseline/top1` the float model's, `times/latency_p50` how many times better the
        candidate is, `holds` 1 where the verdict is "pass".
        """
        flat = {f"times/{name}": value for name, value in self.ratios.items()}
        for prefix, of in (("", self.candidate), ("baseline/", self.baseline)):
            latency = {f"latency_{name}_ms": value for name, value in of.latency_ms.items()}
            fields = {field: getattr(of, field) for field in MEASURED_FIELDS.values()}
            values = {**of.metrics, **latency, **of.generation, **of.further, **fields}
            flat |= {f"{prefix}{name}": value for name, value in values.items() if value is not None}
        flat["holds"] = float(self.verdict == "pass")
        return {name: float(value) for name, value in flat.items() if math.isfinite(value)}

    def __repr__(self) -> str:
        return f"<Report {verdict_line(self)}>"

    def _repr_html_(self) -> str:
        return render_html(self)


def to_dict(report: Findings) -> dict[str, Any]:
    """Return the report as JSON values; NaN and infinity become null."""
    cleaned: dict[str, Any] = finite(asdict(report))
    return cleaned


def finite(value: Any) -> Any:
    """Return JSON values with NaN and infinity replaced by null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def render_json(report: Findings) -> str:
    """Render report.json, keys in the record's order."""
    return json.dumps(to_dict(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Row:
    """One line of the table: before is the baseline, after the candidate; `change` is a ratio or a difference.

    `metric`: the metric or the ratio that the change is of.
    """

    name: str
    before: str
    after: str
    change: str
    metric: str = ""


def table_rows(report: Findings) -> list[Row]:
    """Return what the terminal shows: size, quality with intervals, latency, throughput, memory, load time."""
    before, after = report.baseline, report.candidate
    rows = [_make_ratio_row(report, "size", size_text(before.size_bytes), size_text(after.size_bytes), "size")]
    rows += [_make_metric_row(report, name) for name in order_metrics(after.metrics)]
    rows += [_make_decoder_row(report, name) for name in OF_DECODERS if name in after.generation]
    for p in ("p50", "p95", "p99") if not after.generation else ():  # of a decoder they are the time between tokens
        times = ms_text(before.latency_ms.get(p)), ms_text(after.latency_ms.get(p))
        rows.append(_make_ratio_row(report, f"latency {p}", *times, f"latency_{p}"))
    if on_device := report.benchmark.get("device_p50_ms"):
        first, second = on_device["baseline"], on_device["candidate"]
        rows.append(Row("on the GPU alone", ms_text(first), ms_text(second), f"{first / second:.2f}x"))
    rows += [
        _make_further_row(report, name) for name in FURTHER if name in after.further and not _is_shown(report, name)
    ]
    batch = after.throughput_batch_size
    rows.append(_make_rate_row(report, f"throughput, batch {batch}", "throughput"))
    if after.throughput_under_latency_per_s is not None:
        limit = report.benchmark.get("latency_limit_ms")
        label = f"throughput, {_limit_percentile(report)} within {limit:g} ms"
        rows.append(_make_rate_row(report, label, "throughput_under_latency"))
    memory = size_text(before.peak_memory_bytes), size_text(after.peak_memory_bytes)
    rows.append(_make_ratio_row(report, "peak memory", *memory, "peak_memory"))
    rows.append(_make_ratio_row(report, "load time", ms_text(before.load_ms), ms_text(after.load_ms), "load_time"))
    return [row for row in rows if (row.before, row.after) != ("-", "-")]


def _make_ratio_row(report: Findings, label: str, before: str, after: str, name: str) -> Row:
    return Row(label, before, after, _format_ratio(report, name), name)


def _make_metric_row(report: Findings, name: str) -> Row:
    change = report.differences.get(name)
    text = figure_text(change["value"], change["interval"], "+z") if change else ""
    label = f"{name} ({AT_BUILD})" if name in report.recorded else name
    return Row(label, _format_quality(report.baseline, name), _format_quality(report.candidate, name), text, name)


def _make_decoder_row(report: Findings, name: str) -> Row:
    unit = {"1/s": "/s", "price": ""}.get(MEASURED[name].unit, f" {MEASURED[name].unit}")
    before, after = report.baseline.generation.get(name), report.candidate.generation.get(name)
    cells = ["-" if value is None else f"{value:.4g}{unit}" for value in (before, after)]
    return _make_ratio_row(report, _label_metric(report, name), cells[0], cells[1], name)


def _is_shown(report: Findings, name: str) -> bool:
    """Return whether the metric is one that has a row of its own name."""
    return name == "latency_percentile" and _limit_percentile(report) in ("p50", "p95", "p99")


def _make_further_row(report: Findings, name: str) -> Row:
    before, after = (of.further.get(name) for of in (report.baseline, report.candidate))
    unit = {"price": ""}.get(MEASURED[name].unit, f" {MEASURED[name].unit}")
    cells = ["-" if value is None else f"{value:.4g}{unit}" for value in (before, after)]
    label = f"latency {_limit_percentile(report)}" if name == "latency_percentile" else _LABELS[name]
    return _make_ratio_row(report, label, cells[0], cells[1], name)


def _label_metric(report: Findings, name: str) -> str:
    """Return a metric's name for people."""
    if name != "goodput":
        return _LABELS[name]
    settings = report.benchmark
    limits = [
        f"{kind} {settings[f'{kind}_limit_ms']:g} ms" for kind in ("ttft", "tpot") if settings[f"{kind}_limit_ms"]
    ]
    return f"goodput, {_limit_percentile(report)} within {', '.join(limits)}"


def _limit_percentile(report: Findings) -> str:
    return f"p{report.benchmark.get('latency_percentile', 95):g}"


_LABELS = {
    "ttft": "time to first token",
    "tpot": "time per token",
    **{f"itl_{p}": f"between tokens {p}" for p in ("p50", "p95", "p99")},
    "prefill_rate": "prefill",
    "decode_rate": "decode",
    "cost_per_million": "cost of a million",
    "end_to_end_p50": "end to end p50",
    "end_to_end_p95": "end to end p95",
    "energy": "energy of a thousand",
}


def _format_quality(of: Side, name: str) -> str:
    return figure_text(of.metrics[name], of.intervals.get(name)) if name in of.metrics else "-"


def _make_rate_row(report: Findings, label: str, name: str) -> Row:
    before, after = (getattr(s, MEASURED_FIELDS[name]) for s in (report.baseline, report.candidate))
    return _make_ratio_row(report, label, _format_rate(before), _format_rate(after), name)


def _format_ratio(report: Findings, name: str) -> str:
    """Format a ratio with its own interval: the median of the rounds' own ratios is not the ratio of two medians."""
    if name not in report.ratios:
        return ""
    return f"{report.ratios[name]:.2f}x {interval_brackets(report.ratio_intervals.get(name), '.2f')}".rstrip()


def _format_rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}/s" if value >= 1000 else f"{value:.4g}/s"


def verdict_line(report: Findings, bundle: str = "DIR") -> str:
    """Return one sentence: does it hold, by how much gates are missed, and the command that says why of `bundle`."""
    where = f"on {report.backend}"
    if not report.backend:
        where = f"for {report.target}, which nothing has run"
    elif report.scored_by:
        where = f"for {report.target}, scored by {report.scored_by} at the build"
    since = f"; {since_line(report.since)}" if report.since is not None else ""
    return f"{report.verdict.upper()}: {report.bundle} {where}: {_describe_outcome(report, bundle)}{since}"


def _describe_outcome(report: Findings, bundle: str) -> str:
    n, short = len(report.gates), [gate for gate in report.gates if not gate.holds]
    if short:
        failed = [gate.metric for gate in short if gate.verdict == "fail" and gate.value is not None]
        tool = "why" if any(name in MEASURED and MEASURED[name].speed for name in failed) else "blame"
        return "; ".join([*map(_describe_miss, short), *([f"see why: compress {tool} {bundle}"] if failed else [])])
    if not report.gates:
        broken = report.verdict == "fail" and report.since is None  # a regression, too, makes it fail
        measured = "measured, held to no gates" if report.backend else "held to no gates"
        return "its outputs cannot be judged" if broken else measured
    unclear = [f"{gate.metric} {gate.rule}" for gate in report.gates if gate.verdict == "undecided"]
    held = n - len(unclear)
    counted = f"; undecided, counted as a pass: {', '.join(unclear)}" if unclear else ""
    if held == n:
        return "its gate holds" if n == 1 else f"all {n} gates hold"
    return f"{held} of {n} gates {'holds' if held == 1 else 'hold'}{counted}"


def _describe_miss(gate: GateResult) -> str:
    """Return a gate that does not hold with its figure: "latency_p50 1.02x, 1.2x wanted"."""
    if gate.value is None:
        return f"{gate.metric} {gate.rule} {'not measured' if gate.verdict == 'fail' else 'undecided'}"
    least = "" if gate.kind == "min_speedup" else "at least " if gate.has_floor else "at most "
    what = {"max_drop": "drop ", "min_retained": "retained "}.get(gate.kind, "")
    unclear = " (undecided)" if gate.verdict == "undecided" else ""
    name = f"{gate.metric} of {gate.of}" if gate.of else gate.metric
    return f"{name} {what}{gate.value:.4g}{gate.unit}, {least}{gate.limit or 0:g}{gate.unit} wanted{unclear}"


def render_text(
    report: Findings, width: int | None = None, bundle: Path | None = None, places: Sequence[str] = ()
) -> str:
    """Render tables, advice, gates (those that fell short last), `places` (where things lie) and the verdict.

    `width`: of the terminal, None for whole lines; `bundle`: where it lies, for the command that comes next.
    """
    lines = [line for text in _render_body(report, width) for line in fold(text, width)]
    if report.gates:
        lines += ["", "gates"]
    for gate in sorted(report.gates, key=lambda gate: not gate.holds):
        text = f"  {_format_verdict(gate):<9} {gate.metric} {gate.rule}: {gate.why}"
        lines += paint(fold(text, width), gate.verdict, width)
    lines += ["", *places, *_paint_verdict(report, width, bundle)]
    return "\n".join(lines) + "\n"


def render_short(
    report: Findings, width: int | None = None, bundle: Path | None = None, places: Sequence[str] = ()
) -> str:
    """Render at most five lines: size, speed and the first gated metric, the first of `places`, and the verdict."""
    names = _choose_open_rows(report)
    rows = sorted((row for row in table_rows(report) if row.name in names), key=lambda row: row.name not in SHOWN)
    speed = next((name for name in SHOWN[1:] if any(row.name == name for row in rows)), "")
    chosen = [row for row in rows if row.name in ("size", speed) or row.name not in SHOWN][:3]
    before = [f"{row.before} -> " if row.before != "-" else "" for row in chosen]
    lines = [
        f"{r.name}: {b}{r.after}{f', {r.change}' if r.change else ''}" for r, b in zip(chosen, before, strict=True)
    ]
    return "\n".join([*lines, *places[:1], *_paint_verdict(report, width, bundle)]) + "\n"


def _paint_verdict(report: Findings, width: int | None, bundle: Path | None) -> list[str]:
    text = verdict_line(report, "DIR" if bundle is None else str(bundle))
    return paint(fold(text, width), report.verdict, width)


def _render_body(report: Findings, width: int | None) -> Iterator[str]:
    yield from align(
        [("", "before", "after", "change"), *((r.name, r.before, r.after, r.change) for r in table_rows(report))], width
    )
    if report.since is not None:
        yield ""
        yield f"since {report.since.before}"
        yield from align([DIFFERENCE_HEADS, *map(difference_cells, report.since.differences)], width)
        yield from (f"  {line}" for line in (*regression_lines(report.since), *comparison_notes(report.since)))
    if stages := stage_cells(report):
        yield ""
        yield "where the time of an answer goes"
        yield from align([STAGE_HEADS, *stages], width)
    for table in choose_slices(report):
        yield ""
        yield f"{table.metric} by {table.column}"
        yield from align([SLICE_HEADS, *slice_cells(table)], width)
        yield from (f"  {note}" for note in slice_notes(table, report.confidence))
    if report.confusion is not None and (changed := confusion_lines(report.confusion)):
        yield ""
        yield "which class is taken for which, where it changed most"
        yield from (f"  {line}" for line in changed)
    if report.explanation is not None:
        yield ""
        yield "where the time of a call goes, by operator"
        yield from align([OPERATOR_HEADS, *operator_cells(report.explanation)], width)
    if report.steps is not None:
        yield ""
        yield "what each pass cost and gave"
        yield from align([pass_heads(report.steps), *pass_cells(report.steps)], width)
        yield from (f"  {note}" for note in pass_notes(report.steps))
    if curves := find_curves(report.layers):
        yield ""
        yield from (f"  {curve_line(curve)}" for curve in curves)
    if report.backends:
        yield ""
        yield "other ways to run it"
        yield from align([backend_cells(row) for row in report.backends], width)
    if report.advice:
        yield ""
        yield from (f"- {sentence}" for sentence in report.advice)


STAGES_KEY = "stages_p50_ms"
STAGE_HEADS = ("stage", "before", "after")


def stage_cells(report: Findings) -> list[tuple[str, str, str]]:
    """Return for each stage of a whole answer that takes time its median, and its share of both models' answers."""
    sides = report.benchmark.get(STAGES_KEY)
    if not sides:
        return []
    columns = [sides[which] for which in ("baseline", "candidate")]
    wholes = [sum(column.values()) or 1.0 for column in columns]
    shares = [[column[s] / whole for column, whole in zip(columns, wholes, strict=True)] for s in columns[0]]
    return [
        (stage, *(f"{ms_text(column[stage])} ({share:.0%})" for column, share in zip(columns, of_stage, strict=True)))
        for stage, of_stage in zip(columns[0], shares, strict=True)
        if max(of_stage) >= LEAST_SHARE
    ]


LEAST_SHARE = 0.005
"""Of an answer's time, below which a stage is not shown."""


BACKEND_HEADS = ("backend", "model", "precision", "latency p50", "speed-up", "to the baseline", "")


def backend_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row: backend, model, precision, latency, speed-up, closeness to the baseline, remark."""
    who = row["name"], row["artifact"], row["precision"]
    if row.get("error"):
        return *who, "failed", "", "", row["error"]
    fidelity = row.get("fidelity", {})
    closeness = ", ".join(f"{name} {value:.4f}" for name, value in fidelity.items() if name != "n_samples")
    remark = "fastest" if row["fastest"] else ""
    return *who, ms_text(row["latency_ms"]["p50"]), f"{row['speedup']:.2f}x", closeness, remark


def _format_verdict(gate: GateResult) -> str:
    return gate.verdict if gate.verdict != "pass" else "holds"


def render_markdown(report: Findings) -> str:
    """Render report.md: the same content for a pull request or a model card."""
    lines = [f"# {verdict_line(report)}", ""]
    lines += [f"**{sentence}**" if i == 0 else sentence for i, sentence in enumerate(report.advice)] + [""] * bool(
        report.advice
    )
    lines += _render_markdown_table(
        ("", "before", "after", "change"), [(r.name, r.before, r.after, r.change) for r in table_rows(report)]
    )
    if report.gates:
        lines += ["", "## Gates", ""]
        cells = [(_format_verdict(gate), f"{gate.metric} {gate.rule}", gate.why) for gate in report.gates]
        lines += _render_markdown_table(("verdict", "gate", "why"), cells)
    if report.since is not None:
        lines += ["", f"## Since {report.since.before}", ""]
        lines += _render_markdown_table(DIFFERENCE_HEADS, [difference_cells(one) for one in report.since.differences])
        lines += ["", *(f"- {line}" for line in (*regression_lines(report.since), *comparison_notes(report.since)))]
    if stages := stage_cells(report):
        lines += ["", "## Where the time of an answer goes", "", *_render_markdown_table(STAGE_HEADS, stages)]
    for table in choose_slices(report):
        lines += ["", f"## {table.metric} by {table.column}", ""]
        lines += _render_markdown_table(SLICE_HEADS, slice_cells(table))
        lines += ["", *slice_notes(table, report.confidence)]
    if report.confusion is not None:
        lines += ["", "## Which class is taken for which", ""]
        lines += [*_render_markdown_table(*confusion_table(report.confusion)), "", *confusion_notes(report.confusion)]
    if report.explanation is not None:
        lines += ["", "## Why it is no faster", "", *_render_explanation(report.explanation)]
    if report.steps is not None:
        lines += ["", "## What each pass cost and gave", ""]
        lines += _render_markdown_table(pass_heads(report.steps), pass_cells(report.steps))
        lines += ["", *pass_notes(report.steps)]
    if curves := find_curves(report.layers):
        lines += ["", "```", *map(curve_line, curves), "```"]
    if report.backends:
        lines += ["", "## Other ways to run it", ""]
        lines += _render_markdown_table(BACKEND_HEADS, [backend_cells(row) for row in report.backends])
    lines += ["", "## Where it was measured", ""]
    lines += [f"- quality: by {report.scored_by}, when the bundle was built"] if report.scored_by else []
    lines += [
        f"- {key}: {value}"
        for key, value in {**report.environment, **report.benchmark}.items()
        if value is not None and key != STAGES_KEY
    ]
    lines += [f"- evaluation samples: {report.n_samples}; intervals at {100 * report.confidence:g}%, two-sided"]
    return "\n".join(lines) + "\n"


def _render_markdown_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines]


def render_junit(report: Findings) -> str:
    """Render report.xml: a test case per gate, and per difference from an earlier report.

    What does not hold is a failure, an undecided pass is skipped.
    """
    results = [*report.gates, *([] if report.since is None else difference_results(report.since))]
    short = sum(not gate.holds for gate in results)
    skipped = sum(gate.holds and gate.verdict == "undecided" for gate in results)
    attributes = {
        "name": report.bundle,
        "tests": str(len(results)),
        "failures": str(short),
        "skipped": str(skipped),
    }
    suite = ElementTree.Element("testsuite", {**attributes, "errors": "0"})
    for gate in results:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": report.bundle, "name": f"{gate.metric} {gate.rule}"}
        )
        if not gate.holds:
            ElementTree.SubElement(case, "failure", {"type": gate.verdict, "message": gate.why})
        elif gate.verdict == "undecided":
            ElementTree.SubElement(case, "skipped", {"message": gate.why})
        ElementTree.SubElement(case, "system-out").text = gate.why
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _render_explanation(explanation: Explanation) -> list[str]:
    """Render an explanation as Markdown: what the profile shows, then the causes with their changes."""
    lines = [headline(explanation), "", *_render_markdown_table(OPERATOR_HEADS, operator_cells(explanation)), ""]
    lines += [*_render_markdown_table(LAYER_HEADS, layer_cells(explanation)), "", remaining_line(explanation), ""]
    for cause in explanation.causes:
        gain = f" That saves about {cause.saves_ms:.3g} ms ({cause.speedup:.2f}x)." if cause.saves_ms else ""
        lines += [
            f"- **{cause.kind.replace('_', ' ')}**: {cause.seen}. Why: {cause.why}. Change: {cause.change}.{gain}"
        ]
        lines += ["", *(f"      {line}" for line in cause.recipe.splitlines()), ""] if cause.recipe else []
    return lines if explanation.causes else [*lines, NO_CAUSE]


def render_html(report: Findings) -> str:
    """Render a fragment without scripts and style sheets, which shows wherever a notebook is read; all text escaped.

    The verdict stands first, then what the gates are about and the advice; everything else is folded away.
    """
    rows = table_rows(report)
    names = _choose_open_rows(report)
    first, rest = [r for r in rows if r.name in names], [r for r in rows if r.name not in names]
    verdict, _, summary = verdict_line(report).partition(": ")
    style = f"background:{COLORS[report.verdict]};color:white;padding:1px 8px;border-radius:4px"
    parts = [
        f'<p><b style="{style}">{escape(verdict)}</b> {escape(summary)}</p>',
        _render_measurements(first),
        _render_gates(report.gates),
        _render_slices(report),
        _render_passes(report.steps),
        _render_curves(report.layers),
    ]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in report.advice]
    if report.confusion is not None:
        heads, cells = confusion_table(report.confusion)
        notes = "".join(f"<p>{escape(note)}</p>" for note in confusion_notes(report.confusion))
        matrix = _render_html_table(heads, cells) + notes
        parts.append(f"<details><summary>which class is taken for which</summary>{matrix}</details>")
    if rest:
        parts.append(f"<details><summary>{len(rest)} more measurements</summary>{_render_measurements(rest)}</details>")
    return "<div>" + "".join(parts) + "</div>"


def _choose_open_rows(report: Findings) -> set[str]:
    """Return the names of the rows that are open: the usual ones, and the gates'; without gates the first metric's."""
    gated = {gate.metric for gate in report.gates}
    named = order_metrics(report.candidate.metrics)
    chosen = {name for name in named if name in gated} or set(named[:1])
    chosen |= {f"{name} ({AT_BUILD})" for name in chosen if name in report.recorded}
    return {*SHOWN, *chosen, *(name.replace("_", " ") for name in gated & MEASURED.keys())}


def _render_measurements(rows: Sequence[Row]) -> str:
    return _render_html_table(("", "before", "after", "change"), ((r.name, r.before, r.after, r.change) for r in rows))


def _render_gates(gates: Sequence[GateResult]) -> str:
    """Render one line for each gate: the verdict in its colour, the rule, and why."""
    lines = []
    for gate in gates:
        mark = f'<b style="color:{COLORS[gate.verdict]}">{_format_verdict(gate)}</b>'
        rule = escape(f"{gate.metric} {gate.rule}")
        lines.append(f"<tr><td>{mark}</td><td>{rule}</td><td>{escape(gate.why)}</td></tr>")
    return f"<table>{_render_html_head(('gate', 'rule', 'why'))}{''.join(lines)}</table>" if lines else ""


def _render_slices(report: Findings) -> str:
    """Render a table for each column of slices."""
    parts = []
    for table in choose_slices(report):
        notes = "".join(f"<p>{escape(note)}</p>" for note in slice_notes(table, report.confidence))
        rows = _render_html_table(SLICE_HEADS, slice_cells(table))
        parts.append(f"<p>{escape(table.metric)} by {escape(table.column)}</p>{rows}{notes}")
    return "".join(parts)


def _render_passes(table: PassTable | None) -> str:
    """Render what each pass cost and gave."""
    if table is None:
        return ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in pass_notes(table))
    return _render_html_table(pass_heads(table), pass_cells(table)) + notes


def _render_curves(layers: Sequence[object]) -> str:
    """Render a picture for each pass that trained."""
    by_pass: dict[str, list[Curve]] = {}
    for curve in find_curves(layers):
        by_pass.setdefault(curve.of, []).append(curve)
    return "".join(f"<div>{curves_svg(curves)}</div>" for curves in by_pass.values())


def _render_html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{_render_html_head(heads)}{lines}</table>"


def _render_html_head(heads: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"


PAGE = "report.html"
"""The page that `compress` makes of a report. It is not written here; one of an earlier judgement is renamed."""
EARLIER_PAGE = "report.earlier.html"
FILES = {"report.json": render_json, "report.md": render_markdown, "report.xml": render_junit}


def write_report(report: Findings, folder: Path) -> None:
    """Write report.json, report.md and report.xml, each whole or not at all. RuntimeFailure if that cannot be done."""
    for name, render in FILES.items():
        draft = folder / f"{name}.{os.getpid()}.tmp"
        try:
            draft.write_text(render(report), encoding="utf-8")
            os.replace(draft, folder / name)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise RuntimeFailure(f"cannot write {folder / name}: {error}") from error


def prepare_folder(folder: Path) -> list[str]:
    """Make sure that reports can be written to `folder`, and remove those of an earlier run; return notes.

    So none outlives, under its name, a run that fails: the page, which is not written here, is renamed. UsageError,
    before anything was run, where nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix="report."):
            pass
        for name in (*FILES, SAMPLES_FILE):
            (folder / name).unlink(missing_ok=True)
        if not (folder / PAGE).exists():
            return []
        os.replace(folder / PAGE, folder / EARLIER_PAGE)
    except OSError as error:
        raise UsageError(
            f"{folder}: the report cannot be written there: {error.strerror}; name a folder for it with --report DIR"
        ) from error
    return [f"{PAGE} was of an earlier judgement and is {EARLIER_PAGE} now; `compress report DIR` makes one of this"]
