"""Reports of several bundles side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.commands.inspect import read_json
from runtime.bundle.format import read_manifest
from runtime.bundle.records import from_json
from runtime.errors import BundleError, UsageError
from runtime.report.units import size_text

Report = dict[str, Any]
Numbers = dict[str, float | None]


@dataclass(frozen=True)
class ComparedSide:
    """What is shown of one side of a report, and its types."""

    metrics: Numbers = field(default_factory=dict)
    latency_ms: Numbers = field(default_factory=dict)
    throughput_per_s: float | None = None
    size_bytes: float | None = None
    load_ms: float | None = None
    peak_memory_bytes: float | None = None


@dataclass(frozen=True)
class ComparedReport:
    """What is shown of a report, and its types: report.json is in no manifest, anybody may have written it."""

    candidate: ComparedSide
    ratios: Numbers = field(default_factory=dict)
    environment: dict[str, object] = field(default_factory=dict)


def read_reports(paths: Sequence[Path]) -> dict[str, Report]:
    """Return each bundle's report.json by the bundle's folder.

    Raises UsageError with all the folders that have none, or not one of this bundle.
    """
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
    try:
        side = _keep_known_keys(ComparedSide, report.get("candidate"))
        from_json(ComparedReport, {**_keep_known_keys(ComparedReport, report), "candidate": side}, "report.json")
    except ValueError as error:
        raise UsageError(f"{path}: {error}; `compress validate {path}` writes it anew") from error
    return report


def _keep_known_keys(record: type[ComparedSide | ComparedReport], data: Any) -> Any:
    """Keep the keys of a JSON object that the record has; return anything else as it is."""
    names = {one.name for one in fields(record)}
    return {key: value for key, value in data.items() if key in names} if isinstance(data, dict) else data


def compare_bundles(paths: Sequence[Path], console: Console) -> None:
    """Print a column for each bundle's candidate, and what makes the columns hard to compare. Raises UsageError."""
    reports = read_reports(paths)
    table = Table("", *(escape(name) for name in reports))
    for label, cells in _build_rows(list(reports.values())):
        table.add_row(*map(escape, (label, *cells)))
    console.print(table)
    for warning in _find_differences(reports):
        console.print(f"[yellow]note:[/] {escape(warning)}")


def _build_rows(reports: list[Report]) -> Iterator[tuple[str, list[str]]]:
    yield "verdict", [str(report.get("verdict")) for report in reports]
    for name in _collect_names(reports, "metrics"):
        yield name, [_format_number(r["candidate"].get("metrics", {}).get(name), "{:.4f}") for r in reports]
    for name in _collect_names(reports, "latency_ms"):
        yield (
            f"latency {name}, ms",
            [_format_number(r["candidate"].get("latency_ms", {}).get(name), "{:.3f}") for r in reports],
        )
    for key, label, show in _MEASURED:
        if any(r["candidate"].get(key) is not None for r in reports):
            yield label, [_format_value(r["candidate"].get(key), show) for r in reports]
    for name in dict.fromkeys(name for r in reports for name in r.get("ratios", {})):
        yield f"{name}, x better", [_format_number(r.get("ratios", {}).get(name), "{:.2f}") for r in reports]


def _collect_names(reports: list[Report], part: str) -> list[str]:
    return list(dict.fromkeys(name for r in reports for name in r["candidate"].get(part) or ()))


_MEASURED: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("throughput_per_s", "throughput, 1/s", "{:.1f}".format),
    ("size_bytes", "size", size_text),
    ("load_ms", "load, ms", "{:.1f}".format),
    ("peak_memory_bytes", "peak memory", size_text),
)


def _format_value(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def _format_number(value: float | None, form: str) -> str:
    return _format_value(value, form.format)


def _find_differences(reports: dict[str, Report]) -> Iterator[str]:
    """Yield a sentence for each difference that makes speeds or qualities hard to compare."""
    for key, what in (("task", "tasks"), ("n_samples", "numbers of samples"), ("backend", "backends")):
        found = {str(r[key]) for r in reports.values() if key in r}
        if len(found) > 1:
            yield f"different {what}: {', '.join(sorted(found))}"
    machines = {str(r.get("environment", {}).get("cpu")) for r in reports.values()}
    if len(machines) > 1:
        yield f"measured on different machines: {', '.join(sorted(machines))}; the speeds do not compare"
