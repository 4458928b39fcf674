"""Counts of the fuzzed cases, gathered from every process and printed at the end."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from fuzzing import COUNTS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send a test's counts along with its report."""
    report = yield
    if report.when == "call" and COUNTS:
        report.user_properties.append(("fuzzed", {kind: dict(counts) for kind, counts in COUNTS.items()}))
        COUNTS.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each kind: how many cases, and how they ended."""
    total: dict[str, dict[str, int]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, kinds in getattr(report, "user_properties", ()):
                if name != "fuzzed":
                    continue
                for kind, counts in kinds.items():
                    for end, count in counts.items():
                        ends = total.setdefault(kind, {})
                        ends[end] = ends.get(end, 0) + count
    for kind, ends in sorted(total.items()):
        listed = ", ".join(f"{end} {count}" for end, count in sorted(ends.items()))
        terminalreporter.write_line(f"fuzzed {kind}: {sum(ends.values())} cases ({listed})")
