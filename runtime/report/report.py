"""Return what a judgement found, and show it as HTML in a notebook.

The verdict stands first, then what the gates are about and the advice; everything else is folded away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from runtime.judge.findings import Findings
from runtime.judge.gates import GateResult
from runtime.metrics import MEASURED, METRICS
from runtime.report.curves import Curve, curves_svg, find_curves
from runtime.report.passes import PassTable, pass_cells, pass_heads, pass_notes
from runtime.report.render import Row, table_rows, verdict_line

COLORS = {"pass": "#2f855a", "fail": "#c53030", "undecided": "#b7791f", "unjudged": "#718096"}
"""Of a verdict: readable as text on white and on black, and under white text."""
SHOWN = ("size", "latency p50", "time to first token", "time per token")
"""Rows that are always open, beside those that a gate is about."""


def _report_html(report: Findings) -> str:
    """Return a fragment without scripts and style sheets, which shows wherever a notebook is read; all text escaped."""
    rows = table_rows(report)
    names = _choose_open_rows(report)
    first, rest = [r for r in rows if r.name in names], [r for r in rows if r.name not in names]
    parts = [
        _render_headline(report),
        _render_measurements(first),
        _render_gates(report.gates),
        _render_passes(report.steps),
        _render_curves(report.layers),
    ]
    parts += [f"<p>{escape(sentence)}</p>" for sentence in report.advice]
    if rest:
        parts.append(f"<details><summary>{len(rest)} more measurements</summary>{_render_measurements(rest)}</details>")
    return "<div>" + "".join(parts) + "</div>"


def _choose_open_rows(report: Findings) -> set[str]:
    """Return the names of the rows that are open: the usual ones, and the gates'; without gates the first metric's."""
    gated = {gate.metric for gate in report.gates}
    named = {name for name in METRICS if name in report.candidate.metrics}
    chosen = (named & gated) or set([name for name in METRICS if name in named][:1])
    return {*SHOWN, *chosen, *(name.replace("_", " ") for name in gated & MEASURED.keys())}


def _render_headline(report: Findings) -> str:
    verdict, _, summary = verdict_line(report).partition(": ")
    if report.verdict == "unjudged":
        verdict, summary = "MEASURED", verdict_line(report)
    style = f"background:{COLORS[report.verdict]};color:white;padding:1px 8px;border-radius:4px"
    return f'<p><b style="{style}">{escape(verdict)}</b> {escape(summary)}</p>'


def _render_measurements(rows: Sequence[Row]) -> str:
    return _render_table(("", "before", "after", "change"), ((r.name, r.before, r.after, r.change) for r in rows))


def _render_gates(gates: Sequence[GateResult]) -> str:
    """Render one line for each gate: the verdict in its colour, the rule, and why."""
    lines = []
    for gate in gates:
        word = "holds" if gate.verdict == "pass" else gate.verdict
        mark = f'<b style="color:{COLORS[gate.verdict]}">{word}</b>'
        rule = escape(f"{gate.metric} {gate.rule}")
        lines.append(f"<tr><td>{mark}</td><td>{rule}</td><td>{escape(gate.why)}</td></tr>")
    return f"<table>{_render_head(('gate', 'rule', 'why'))}{''.join(lines)}</table>" if lines else ""


def _render_passes(table: PassTable | None) -> str:
    """Render what each pass cost and gave."""
    if table is None:
        return ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in pass_notes(table))
    return _render_table(pass_heads(table), pass_cells(table)) + notes


def _render_curves(layers: Sequence[object]) -> str:
    """Render a picture for each pass that trained."""
    by_pass: dict[str, list[Curve]] = {}
    for curve in find_curves(layers):
        by_pass.setdefault(curve.of, []).append(curve)
    return "".join(f"<div>{curves_svg(curves)}</div>" for curves in by_pass.values())


def _render_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{_render_head(heads)}{lines}</table>"


def _render_head(heads: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"


@dataclass(frozen=True)
class Report(Findings):
    """One judgement of one bundle on one machine; draws itself in a notebook."""

    def _repr_html_(self) -> str:
        return _report_html(self)
