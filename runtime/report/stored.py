"""Read a report with its values for each sample, to compare it with another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from runtime.bundle.format import MANIFEST, read_manifest
from runtime.errors import UsageError
from runtime.metrics.base import Columns
from runtime.report.reading import read_report
from runtime.report.report import Report
from runtime.report.samples import SAMPLES_FILE, describe_evaluation, read_kept_samples


@dataclass(frozen=True)
class StoredReport:
    """A report and what its quality was computed from; `name` is what the user called it."""

    name: str
    report: Report
    columns: Mapping[str, Columns] = field(default_factory=dict)
    """The candidate's, of each quality metric; empty where they were not kept."""


def read_stored_report(path: Path) -> StoredReport:
    """Read the report of a bundle, of a folder of reports, or the report.json `path`, and the values beside it.

    Raises UsageError where there is none, for one of another bundle than it lies in, of a newer format, or damaged;
    BundleError for a folder that is no bundle's, and holds no report.
    """
    file = path / "report.json" if path.is_dir() or path.suffix != ".json" else path
    is_bundle = (file.parent / MANIFEST).is_file()
    if not file.is_file():
        if file.parent == path and not is_bundle:
            read_manifest(path)  # says what is wrong with the folder
        raise UsageError(f"{path}: no report.json; `compress validate {file.parent}` writes it")
    report = read_report(file)
    if is_bundle:
        manifest = read_manifest(file.parent)
        if report.manifest_digest not in ("", manifest.digest):
            raise UsageError(
                f"{path}: report.json is of another bundle; `compress validate {file.parent}` writes it anew"
            )
        report = replace(report, evaluation=report.evaluation or describe_evaluation(manifest))
    kept = file.parent / SAMPLES_FILE
    columns = read_kept_samples(kept, report.per_sample) if report.per_sample is not None and kept.is_file() else {}
    return StoredReport(str(path), report, columns)
