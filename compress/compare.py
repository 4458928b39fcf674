"""Reports of several bundles side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.inspect import read_json, size_text
from runtime.bundle import read_manifest
from runtime.errors import BundleError, UsageError

Report = dict[str, Any]


def read_reports(paths: Sequence[Path]) -> dict[str, Report]:
    """Bundle's folder -> its report.json. UsageError with all the folders that have none or not one of this bundle."""
    problems: list[str] = []
    reports: dict[str, Report] = {}
    for path in paths:
        try:
            reports[str(path)] = _read_report(path)
        except (BundleError, UsageError) as error:
            problems += error.problems
    if problems:
        raise UsageError(problems)
    return reports


def _read_report(path: Path) -> Report:
    manifest, report = read_manifest(path), read_json(path / "report.json")
    if not isinstance(report, dict):
        raise UsageError(f"{path}: no report.json; `compress validate {path}` writes it")
    if report.get("manifest_digest", manifest.digest) not in ("", manifest.digest):
        raise UsageError(f"{path}: report.json is of another bundle; `compress validate {path}` writes it anew")
    return report


def compare_bundles(paths: Sequence[Path], console: Console) -> None:
    """Print a column for each bundle's candidate, and what makes the columns hard to compare. UsageError."""
    reports = read_reports(paths)
    table = Table("", *(escape(name) for name in reports))
    for label, cells in _rows(list(reports.values())):
        table.add_row(label, *cells)
    console.print(table)
    for warning in _warnings(reports):
        console.print(f"[yellow]note:[/] {escape(warning)}")


def _rows(reports: list[Report]) -> Iterator[tuple[str, list[str]]]:
    yield "verdict", [str(report.get("verdict")) for report in reports]
    for name in _names(reports, "metrics"):
        yield name, [_number(r["candidate"].get("metrics", {}).get(name), "{:.4f}") for r in reports]
    for name in _names(reports, "latency_ms"):
        yield (
            f"latency {name}, ms",
            [_number(r["candidate"].get("latency_ms", {}).get(name), "{:.3f}") for r in reports],
        )
    for key, label, show in _MEASURED:
        if any(r["candidate"].get(key) is not None for r in reports):
            yield label, [_shown(r["candidate"].get(key), show) for r in reports]
    for name in dict.fromkeys(name for r in reports for name in r.get("ratios", {})):
        yield f"{name}, x better", [_number(r.get("ratios", {}).get(name), "{:.2f}") for r in reports]


def _names(reports: list[Report], part: str) -> list[str]:
    return list(dict.fromkeys(name for r in reports for name in r["candidate"].get(part) or ()))


_MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("throughput_per_s", "throughput, 1/s", "{:.1f}".format),
    ("size_bytes", "size", size_text),
    ("load_ms", "load, ms", "{:.1f}".format),
    ("peak_memory_bytes", "peak memory", size_text),
)


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _number(value: float | None, form: str) -> str:
    return _shown(value, form.format)


def _warnings(reports: dict[str, Report]) -> Iterator[str]:
    """Differences that make speeds or qualities hard to compare."""
    for key, what in (("task", "tasks"), ("n_samples", "numbers of samples"), ("backend", "backends")):
        found = {str(r[key]) for r in reports.values() if key in r}
        if len(found) > 1:
            yield f"different {what}: {', '.join(sorted(found))}"
    machines = {str(r.get("environment", {}).get("cpu")) for r in reports.values()}
    if len(machines) > 1:
        yield f"measured on different machines: {', '.join(sorted(machines))}; the speeds do not compare"
