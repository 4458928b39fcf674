"""Read a report that a judgement wrote, with its values for each sample, to compare it with another.

Anybody may have written report.json: it is in no manifest. Its types are checked, and what it lacks is told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from runtime.bundle.format import MANIFEST, Manifest, read_manifest
from runtime.bundle.records import from_json
from runtime.errors import UsageError
from runtime.metrics.base import Columns
from runtime.report.samples import SAMPLES_FILE, EvaluatedOn, KeptSamples, read_kept_samples

FORMAT_VERSION = 1
"""Of report.json."""
Numbers = dict[str, float | None]
Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class StoredSide:
    """What a comparison reads of one side of a report; None for what could not be measured."""

    metrics: Numbers = field(default_factory=dict)
    intervals: dict[str, Interval | None] = field(default_factory=dict)
    latency_ms: Numbers = field(default_factory=dict)
    throughput_per_s: float | None = None
    throughput_under_latency_per_s: float | None = None
    generation: Numbers = field(default_factory=dict)
    further: Numbers = field(default_factory=dict)
    size_bytes: float | None = None
    load_ms: float | None = None
    peak_memory_bytes: float | None = None


@dataclass(frozen=True)
class StoredFindings:
    """What a comparison reads of a report."""

    candidate: StoredSide
    verdict: str = ""
    bundle: str = ""
    backend: str = ""
    target: str = ""
    task: str = ""
    manifest_digest: str = ""
    n_samples: int = 0
    confidence: float = 0.95
    ratios: Numbers = field(default_factory=dict)
    ratio_intervals: dict[str, Interval | None] = field(default_factory=dict)
    layers: tuple[Any, ...] = ()
    environment: dict[str, object] = field(default_factory=dict)
    benchmark: dict[str, object] = field(default_factory=dict)
    evaluation: EvaluatedOn | None = None
    per_sample: KeptSamples | None = None


@dataclass(frozen=True)
class StoredReport:
    """A report and what quality was computed from; `name` is what the user called it."""

    name: str
    findings: StoredFindings
    columns: Mapping[str, Columns] = field(default_factory=dict)
    """The candidate's, of each quality metric; empty where they were not kept."""
    folder: Path | None = None
    """Where it lies; None of one that has just been made."""


def read_report(path: Path) -> StoredReport:
    """Read the report of a bundle, or of a folder of reports, or the report.json `path`, and the values beside it.

    Raises UsageError where there is none, for one that is of another bundle than it lies in, of a newer format, or no
    report.
    """
    file = path / "report.json" if path.is_dir() else path
    is_bundle = (file.parent / MANIFEST).is_file()
    again = f"`compress validate {path if path.is_dir() else path.parent}` writes it"
    if not file.is_file():
        if path.is_dir() or not path.name.endswith(".json"):
            read_manifest(path)  # says what is wrong with the folder, where it is no bundle's
        raise UsageError(f"{path}: no report.json; {again}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        findings = parse_findings(data, str(file))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: no report of a judgement: {error}; {again} anew") from error
    if is_bundle:
        manifest = read_manifest(file.parent)
        if findings.manifest_digest not in ("", manifest.digest):
            raise UsageError(f"{path}: report.json is of another bundle; {again} anew")
        findings = replace(findings, evaluation=findings.evaluation or describe_evaluation(manifest))
    kept = file.parent / SAMPLES_FILE
    columns = read_kept_samples(kept, findings.per_sample) if findings.per_sample and kept.is_file() else {}
    return StoredReport(str(path), findings, columns, file.parent)


def parse_findings(data: Any, where: str) -> StoredFindings:
    """Parse a report's JSON. Raises UsageError for a newer format, ValueError for what is no report."""
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    version = data.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise UsageError(
            f"{where}: format_version is {version!r}, and this version of compress reads reports up to "
            f"{FORMAT_VERSION}; update it, or judge that bundle with this version"
        )
    side = _keep_known_keys(StoredSide, data.get("candidate"))
    return from_json(StoredFindings, {**_keep_known_keys(StoredFindings, data), "candidate": side}, "report.json")


def _keep_known_keys(record: type[StoredSide | StoredFindings], data: Any) -> Any:
    """Keep the keys of a JSON object that the record has; return anything else as it is."""
    names = {known.name for known in fields(record)}
    return {key: value for key, value in data.items() if key in names} if isinstance(data, dict) else data


def describe_evaluation(manifest: Manifest) -> EvaluatedOn | None:
    """Return what a bundle's quality is measured on, and against; None of one without an evaluation set."""
    if manifest.evaluation is None:
        return None
    outputs = manifest.files.get(manifest.evaluation.baseline_outputs)
    digests = [] if outputs is None else [outputs.sha256]
    for artifact in manifest.artifacts:
        if artifact.name == "baseline":
            folder = artifact.path.rpartition("/")[0]
            files = sorted((name, record.sha256) for name, record in manifest.files.items() if name.startswith(folder))
            digests.append(hashlib.sha256(json.dumps(files).encode()).hexdigest())
    return EvaluatedOn(manifest.evaluation.digest, tuple(digests), manifest.recorded)
