"""What each step of a build cost and gave: the rows of a report's table, and the file that keeps them.

`report.steps.json` is written by the validation that ends a build, while the models between the steps are still there.
Later validations show it as it is. Like the reports it is in no manifest, because times differ from run to run.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from runtime.bundle.columns import Array
from runtime.bundle.files import put_in_place
from runtime.bundle.format import canonical_json
from runtime.bundle.manifest import KvCache, Manifest
from runtime.bundle.records import from_json
from runtime.errors import BundleError

STEPS = "report.steps.json"


@dataclass(frozen=True)
class StepModel:
    """What a build hands to the judge of one step: a model that is measured beside the bundle's own and not kept.

    The last step's model is the candidate, so that it has no `path`. Neither has one that could not be made: `error`
    says why. `outputs`: over the frozen samples, as `runtime.tasks.predict.run_samples` gives them (beside the
    baseline).
    """

    name: str
    seconds: float
    path: Path | None = None
    size_bytes: int | None = None
    cache: KvCache | None = None
    outputs: dict[str, Array] | None = None
    error: str = ""


@dataclass(frozen=True)
class Change:
    """A metric's value minus that of the step before, paired by sample where its interval is known."""

    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class StepRow:
    """What was measured after one step; None and nothing for what was not."""

    name: str
    """"float" for the model as it came, then each step's."""
    seconds: float | None = None
    """What the step took when it was done: of a run that was broken off, its last part."""
    size_bytes: int | None = None
    smaller: float | None = None
    """How many times smaller than the float model."""
    metrics: dict[str, float | None] = field(default_factory=dict)
    """None where a value is infinite."""
    changes: dict[str, Change] = field(default_factory=dict)
    """Metric -> change since the last row before that was measured."""
    latency_ms: float | None = None
    faster: float | None = None
    """How many times faster than the float model: the median of the rounds' own ratios."""
    error: str = ""
    """Why nothing, or not all, was measured."""


@dataclass(frozen=True)
class StepTable:
    """The float model, and what each step made of it; the last row is the candidate."""

    rows: tuple[StepRow, ...]
    latency: str
    """The metric that `latency_ms` is: latency_p50, or of a decoder tpot."""
    shown: tuple[str, ...]
    """The metrics that the gates are about, or the first: what a narrow table has room for."""
    cpu: str
    """Where it was measured."""
    manifest_digest: str
    recorded: bool = False
    """True where it is not of this validation, but of the one that ended the build."""


def write_steps(table: StepTable, root: Path) -> None:
    """Write `report.steps.json` into the bundle in `root`, whole or not at all."""
    draft = root / f"{STEPS}.{os.getpid()}.tmp"
    try:
        draft.write_bytes(canonical_json(table))
        put_in_place(draft, root / STEPS)
    finally:
        draft.unlink(missing_ok=True)


def read_steps(root: Path, manifest: Manifest) -> StepTable | None:
    """Read what the build recorded, or None; BundleError where the file is damaged or of another bundle."""
    file = root / STEPS
    if not file.is_file():
        return None
    try:
        table = from_json(StepTable, json.loads(file.read_bytes()), "steps")
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file}: {error}; remove it, and the bundle is judged without it") from error
    if table.manifest_digest != manifest.digest:
        raise BundleError(f"{file}: is of another bundle; remove it, and this one is judged without it")
    return replace(table, recorded=True)
