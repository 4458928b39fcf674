"""Hold what a bundle says of its float model against the labels and against that model, run again.

A verdict is relative to the frozen outputs: if they are not the baseline's, or the labels not those of the build, it
says nothing. So each row of every output is compared, and the metrics that the build recorded are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Manifest
from runtime.errors import BundleError
from runtime.metrics import Metric, Outputs
from runtime.tasks import find_task
from runtime.tasks.metrics import METRICS, why_not

SPREAD, ROUNDING = 0.02, 1e-3
"""How far a row may be from its frozen one: shares of the usual distance of two rows, and of its own length.

An SSD detector in OpenVINO's float32 is 1.2e-5 and 9e-8 from ONNX Runtime; TensorRT's TF32 keeps 10 bits, 1e-3."""
ALIKE = 0.99
"""Least share of a row's classes, of the rows of classes and texts, and of objects that are the frozen ones: rounding
decides ties, and they are rare."""
SAME_METRIC = 1e-6
"""By which a metric of the same numbers differs between versions of numpy, relatively."""


def note_unrecorded(manifest: Manifest) -> str | None:
    """Return a note where the build recorded no metrics of the float model, so that the labels are not checked."""
    if manifest.evaluation is None or manifest.evaluation.baseline_metrics is not None:
        return None
    return f"The build ({manifest.created_by}) recorded no metrics of the float model: the labels are not checked."


def check_metrics(root: Path, manifest: Manifest, frozen: Outputs, labels: Any | None) -> None:
    """Raise BundleError where frozen outputs and labels give other metrics than the build recorded."""
    recorded = manifest.evaluation.baseline_metrics if manifest.evaluation else None
    for name, then in (recorded or {}).items():
        metric = METRICS.get(name)
        if metric is None:  # of a plug-in that is not installed here
            continue
        if (reason := why_not(metric, manifest.task, frozen, labels)) is not None:
            raise BundleError(f"{root}: the build measured {name} of the float model, and here it {reason}")
        here = metric.compute(frozen, labels)
        if not math.isclose(here, then, rel_tol=SAME_METRIC, abs_tol=SAME_METRIC):
            raise BundleError(
                f"{root}: {name} of the float model's frozen outputs is {here:.6g} here and was {then:.6g} at the "
                "build: labels or outputs are not those of the build; build the bundle again"
            )


def record_metrics(metrics: Sequence[Metric], frozen: Outputs, labels: Any | None) -> dict[str, float]:
    """Return what `check_metrics` holds a bundle against: the float model's metrics, but those against itself."""
    values = {metric.name: metric.compute(frozen, labels) for metric in metrics if metric.against != "baseline"}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def check_outputs(root: Path, task: str, outputs: Outputs, frozen: Outputs) -> None:
    """Raise BundleError that names a row where the baseline, run again, gives other outputs than the frozen ones.

    `outputs`: of the baseline, over all samples; those that are not frozen are not compared.
    """
    known = find_task(task)
    for name in sorted(frozen):
        if name in known.leaping or name not in outputs:
            continue
        ours, theirs = outputs[name], frozen[name]
        if theirs.dtype.kind == "f":
            if ours.shape != theirs.shape:
                raise BundleError(
                    f"{root}: output '{name}' of the baseline has shape {list(ours.shape)} here, frozen is "
                    f"{list(theirs.shape)}: {_EITHER}"
                )
            differs, most = find_far_rows(ours, theirs), 0
        else:
            differs = np.array([not _are_alike(*pair) for pair in zip(ours, theirs, strict=True)], bool)
            most = max(1, int((1 - ALIKE) * len(theirs)))
        if differs.sum() > most:
            raise BundleError(
                f"{root}: the baseline gives other outputs here than the frozen ones: '{name}' differs in "
                f"{differs.sum()} of {len(differs)} rows, the first is row {differs.argmax()}: {_EITHER}"
            )
    matched = [metric for metric in METRICS.values() if metric.suits(known.outputs) and metric.ideal == 1.0]
    for metric in matched if known.leaping else ():
        if not (mean := metric.compute(outputs, frozen)) >= ALIKE:
            alone = [metric.compute(_take_row(outputs, row), _take_row(frozen, row)) for row in range(len(differs))]
            raise BundleError(
                f"{root}: {metric.name} of the baseline here with its frozen outputs is {mean:.4f}, least in row "
                f"{np.argmin(alone)}: {_EITHER}"
            )


def _take_row(outputs: Outputs, row: int) -> dict[str, Array]:
    return {name: values[row : row + 1] for name, values in outputs.items()}


_EITHER = "model or preprocessing are not those of the build, or this machine computes otherwise"


def find_far_rows(ours: Array, theirs: Array) -> Array:
    """Return which rows of floats [N, ...] differ by more than another engine rounds, bool [N]; NaN is far."""
    ours, theirs = (rows.reshape(len(rows), -1).astype(np.float64) for rows in (ours, theirs))  # [N, values]
    spread = np.median(np.linalg.norm(theirs - np.roll(theirs, 1, axis=0), axis=1))
    allowed = SPREAD * spread + ROUNDING * np.linalg.norm(theirs, axis=1)  # [N]
    far: Array = ~(np.linalg.norm(ours - theirs, axis=1) <= allowed)
    return far


def _are_alike(ours: Array, theirs: Array) -> bool:
    """Return whether two rows of whole numbers are alike: fewer than one in a hundred differs, at ends that fill up."""
    if ours.ndim == theirs.ndim == 1:  # texts, filled up to the longest
        width = max(len(ours), len(theirs))
        ours, theirs = (np.pad(row, (0, width - len(row))) for row in (ours, theirs))
    return ours.shape == theirs.shape and bool(np.mean(ours == theirs) >= ALIKE)
