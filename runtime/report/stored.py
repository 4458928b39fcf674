"""Read report.json back into the record that it was written from, and the values for each sample beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.bundle.format import MANIFEST, Manifest, read_samples, read_slices
from runtime.bundle.records import from_json
from runtime.errors import UsageError
from runtime.judge.findings import FORMAT_VERSION
from runtime.judge.samples import SAMPLES_FILE, describe_evaluation, read_kept_samples
from runtime.judge.slices import LABEL, Groups, find_groups
from runtime.metrics.base import Columns
from runtime.report.report import Report
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


def read_report(file: Path) -> Report:
    """Read a report.json, an older one too: what it lacks is as the record's defaults have it.

    Numbers that could not be measured are NaN. Raises UsageError where there is none, it is damaged (it is in no
    manifest: anybody may have written it), or of a newer format.
    """
    again = "`compress validate DIR` writes it anew"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        version = data.get("format_version", 1) if isinstance(data, dict) else 1
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise UsageError(
                f"{file}: is of format {version}, and this version of compress reads up to {FORMAT_VERSION}; update it"
            )
        report = from_json(Report, data, "report.json", measured=True)
        differences: dict[str, dict[str, Any]] = {}
        for name, change in report.differences.items():
            ends = change.get("interval")
            if not isinstance(ends, (list, tuple)) or len(ends) != 2:
                raise ValueError(f"differences[{name!r}].interval: expected a list of 2 numbers")
            numbers = [float("nan") if number is None else float(number) for number in (change.get("value"), *ends)]
            differences[name] = {**change, "value": numbers[0], "interval": (numbers[1], numbers[2])}
        return replace(report, differences=differences)
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}; `compress validate DIR` writes it") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: no report of a judgement: {error}; {again}") from error
