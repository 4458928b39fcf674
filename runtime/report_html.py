"""A report as HTML for a notebook: the verdict, what the gates are about, advice; everything else folded away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from runtime.curves import Curve, curves_svg, find_curves
from runtime.findings import Report
from runtime.gates import GateResult
from runtime.metrics import MEASURED, METRICS
from runtime.report import Row, table_rows, verdict_line
from runtime.report_steps import step_cells, step_heads, step_notes
from runtime.steps import StepTable

COLORS = {"pass": "#2f855a", "fail": "#c53030", "undecided": "#b7791f", "unjudged": "#718096"}
"""Of a verdict: readable as text on white and on black, and under white text."""
SHOWN = ("size", "latency p50", "time to first token", "time per token")
"""Rows that are always open, beside those that a gate is about."""


def report_html(report: Report) -> str:
    """A fragment without scripts and style sheets, so that it shows wherever a notebook is read; all text escaped."""
    rows = table_rows(report)
    names = _shown(report)
    first, rest = [r for r in rows if r.name in names], [r for r in rows if r.name not in names]
    parts = [_headline(report), _measured(first), _gates(report.gates), _steps(report.steps), _curves(report.layers)]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in report.advice]
    if rest:
        parts.append(f"<details><summary>{len(rest)} more measurements</summary>{_measured(rest)}</details>")
    return "<div>" + "".join(parts) + "</div>"


def _shown(report: Report) -> set[str]:
    """Names of the rows that are open: the usual ones, and those of the gates; without gates the first metric's."""
    gated = {gate.metric for gate in report.gates}
    named = {name for name in METRICS if name in report.candidate.metrics}
    chosen = (named & gated) or set([name for name in METRICS if name in named][:1])
    return {*SHOWN, *chosen, *(name.replace("_", " ") for name in gated & MEASURED.keys())}


def _headline(report: Report) -> str:
    verdict, _, said = verdict_line(report).partition(": ")
    if report.verdict == "unjudged":
        verdict, said = "MEASURED", verdict_line(report)
    style = f"background:{COLORS[report.verdict]};color:white;padding:1px 8px;border-radius:4px"
    return f'<p><b style="{style}">{escape(verdict)}</b> {escape(said)}</p>'


def _measured(rows: Sequence[Row]) -> str:
    return _table(("", "before", "after", "change"), ((r.name, r.before, r.after, r.change) for r in rows))


def _gates(gates: Sequence[GateResult]) -> str:
    """One line each: the verdict in its colour, the rule, and why."""
    lines = []
    for gate in gates:
        word = "holds" if gate.verdict == "pass" else gate.verdict
        mark = f'<b style="color:{COLORS[gate.verdict]}">{word}</b>'
        rule = escape(f"{gate.metric} {gate.rule}")
        lines.append(f"<tr><td>{mark}</td><td>{rule}</td><td>{escape(gate.why)}</td></tr>")
    return f"<table>{_head(('gate', 'rule', 'why'))}{''.join(lines)}</table>" if lines else ""


def _steps(table: StepTable | None) -> str:
    """What each step cost and gave."""
    if table is None:
        return ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in step_notes(table))
    return _table(step_heads(table), step_cells(table)) + notes


def _curves(layers: Sequence[object]) -> str:
    """A picture for each pass that trained."""
    found: dict[str, list[Curve]] = {}
    for curve in find_curves(layers):
        found.setdefault(curve.of, []).append(curve)
    return "".join(f"<div>{curves_svg(curves)}</div>" for curves in found.values())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{_head(heads)}{lines}</table>"


def _head(heads: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"
