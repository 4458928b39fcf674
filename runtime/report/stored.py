"""Read a report with its values for each sample, to compare it with another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from runtime.bundle.format import MANIFEST, Manifest, read_samples, read_slices
from runtime.errors import UsageError
from runtime.judge.slices import LABEL, Groups, find_groups
from runtime.metrics.base import Columns
from runtime.report.reading import read_report
from runtime.report.report import Report
from runtime.report.samples import SAMPLES_FILE, describe_evaluation, read_kept_samples
from runtime.tasks.manifest import read_manifest


@dataclass(frozen=True)
class StoredReport:
    """A report and what its quality was computed from; `name` is what the user called it."""

    name: str
    report: Report
    columns: Mapping[str, Columns] = field(default_factory=dict)
    """The candidate's, of each quality metric; empty where they were not kept."""
    folder: Path | None = None
    """The bundle's; None of a report that lies elsewhere."""


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
        check_bundle(report, manifest, file, file.parent)
        report = replace(report, evaluation=report.evaluation or describe_evaluation(manifest))
    kept = file.parent / SAMPLES_FILE
    columns = read_kept_samples(kept, report.per_sample) if report.per_sample is not None and kept.is_file() else {}
    return StoredReport(str(path), report, columns, file.parent if is_bundle else None)


def check_bundle(report: Report, manifest: Manifest, file: Path, bundle: Path) -> None:
    """Raise UsageError where the report of `file` is not of this bundle."""
    if report.manifest_digest not in ("", manifest.digest):
        raise UsageError(f"{file}: is of another bundle; `compress validate {bundle}` writes it anew")


def read_groups(stored: StoredReport) -> Groups:
    """Return which samples each slice of a bundle has; {} of a report without its bundle. Raises BundleError."""
    if stored.folder is None:
        return {}
    manifest = read_manifest(stored.folder)
    labels = read_samples(stored.folder, manifest).get("label") if LABEL in manifest.judgement.slices else None
    slices = read_slices(stored.folder, manifest)
    return find_groups(manifest.judgement, slices, labels, manifest.task, manifest.class_names)
