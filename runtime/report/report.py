"""The report that a judgement gives back: what was found, and how a notebook shows it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.judge.findings import Findings
from runtime.report.html import report_html


@dataclass(frozen=True)
class Report(Findings):
    """One judgement of one bundle on one machine; draws itself in a notebook."""

    def _repr_html_(self) -> str:
        return report_html(self)
