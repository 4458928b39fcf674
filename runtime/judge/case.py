"""What is judged: a bundle, read and found fit, and how to judge it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bundle.manifest import Manifest
from runtime.metrics import Metric, Outputs


@dataclass(frozen=True)
class Case:
    """A bundle that has been read and found fit to be judged, and how to judge it."""

    root: Path
    manifest: Manifest
    columns: Mapping[str, Any]
    baseline: Outputs
    metrics: Sequence[Metric]
    backend: str
    others: Sequence[str]
    threads: int | None
    notes: Sequence[str]
    elsewhere: str = ""
    """Why speed and memory are not judged here; "": they are."""

    @property
    def labels(self) -> Any | None:
        """Return the labels, int64 [N] or float [N]; None without labels."""
        return self.columns.get("label")

    @property
    def is_checkpoint(self) -> bool:
        """Return whether the candidate is a checkpoint, which is not run here."""
        return self.manifest.candidate_for(self.backend).kind == "checkpoint"
