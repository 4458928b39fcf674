"""Several results of one model side by side, from which a person chooses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape

from compress.api.result import Result
from runtime.errors import UsageError
from runtime.judge.findings import order_metrics
from runtime.report.report import Report
from runtime.report.terminal import align
from runtime.words import figure_text, ms_text, size_text

FLOAT = "float"
"""The name of the row of the model as it came."""


@dataclass(frozen=True)
class ChoiceRow:
    """One row: `value` of the table's metric and its 95 % `interval`, `ms` of a call, or of a decoder's further token.

    None: not measured.
    """

    name: str
    value: float | None
    interval: tuple[float, float] | None
    ms: float | None
    size_bytes: int | None
    when: str


@dataclass(frozen=True)
class Choices:
    """The table; draws itself in a notebook. `metric`: of the quality that it shows."""

    metric: str
    rows: tuple[ChoiceRow, ...]

    def __repr__(self) -> str:
        return "\n".join(align([self._heads(), *self._cells()]))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(text)}</th>" for text in self._heads())
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._cells())
        return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"

    def _heads(self) -> tuple[str, ...]:
        return ("recipe", self.metric, "time", "size", "take it when")

    def _cells(self) -> Iterable[tuple[str, ...]]:
        for row in self.rows:
            quality = "-" if row.value is None else figure_text(row.value, row.interval)
            yield row.name, quality, ms_text(row.ms), size_text(row.size_bytes), row.when


def tabulate(
    results: Mapping[str, Result | Report], when: Mapping[str, str] | None = None, metric: str | None = None
) -> Choices:
    """Put results of one model into one table: quality, time and size of each, and when to take it.

        compress.tabulate({"INT8": small, "pruned": pruned}, {"INT8": "there is nothing to train on"})

    The first row is the model as it came, "float", by the first result. Every result was timed in turns with that
    model; its time here is the first one's float time by how many times as fast it was, so that rows are comparable
    although a machine is not as fast at all hours. `when`: name -> a reader's reason. `metric`: default: that of the
    first gate on quality. UsageError where a result lacks it.
    """
    if not results:
        raise UsageError("there is no result to put into a table")
    reports = {name: given if isinstance(given, Report) else given.report for name, given in results.items()}
    first, when = next(iter(reports.values())), when or {}
    metric = metric or _choose_metric(first)
    if lacking := [name for name, report in reports.items() if metric not in report.candidate.metrics]:
        known = ", ".join(reports[lacking[0]].candidate.metrics)
        raise UsageError(f"{lacking[0]}: {metric} was not measured; its report has {known}")
    speed = "tpot" if first.candidate.generation else "latency_p50"
    of_float = first.baseline.generation.get("tpot") if speed == "tpot" else first.baseline.latency_ms.get("p50")
    rows = [
        ChoiceRow(
            FLOAT,
            first.baseline.metrics.get(metric),
            first.baseline.intervals.get(metric),
            of_float,
            first.baseline.size_bytes,
            when.get(FLOAT, ""),
        )
    ]
    for name, report in reports.items():
        after, ratio = report.candidate, report.ratios.get(speed)
        ms = None if of_float is None or not ratio else of_float / ratio
        value, interval = after.metrics[metric], after.intervals.get(metric)
        rows.append(ChoiceRow(name, value, interval, ms, after.size_bytes, when.get(name, "")))
    return Choices(metric, tuple(rows))


def _choose_metric(report: Report) -> str:
    gated = (gate.metric for gate in report.gates if gate.metric in report.baseline.metrics)
    return next(gated, None) or order_metrics(report.candidate.metrics)[0]
