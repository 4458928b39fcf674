"""Say where a verdict rests on a model that answers nothing: by chance, or the same to every sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from runtime.judge.evidence import Evidence
from runtime.metrics import Outputs
from runtime.tasks import find_task
from runtime.tasks.metrics import METRICS


def find_doubts(
    task: str, candidate: Outputs, baseline: Outputs, labels: Any | None, evidence: Mapping[str, Evidence]
) -> list[str]:
    """Return sentences on models that are no better than chance, or give one answer to samples of several labels."""
    classes = None if labels is None else find_task(task).find_classes(labels)
    doubts = []
    for name, known in evidence.items():
        chance, answer = _find_chance(name, classes)
        before = known.baseline
        if chance is not None and before is not None and math.isfinite(before.low) and before.low <= chance:
            doubts.append(
                f"The float model's {name} is {before.value:.3g}, not surely above {chance:.3g}, {answer}: "
                "a change from it says little. Look at its classes' order (model.class_names), preprocess and labels."
            )
    alike = classes is not None and len(np.unique(classes)) == 1
    for which, outputs in (("float model", baseline), ("candidate", candidate)):
        if not alike and gives_one_answer(task, outputs):
            n = len(next(iter(outputs.values())))
            doubts.append(f"The {which} gives the same answer to all {n} samples: no gate on nearness says anything.")
    return doubts


def _find_chance(name: str, classes: np.ndarray | None) -> tuple[float | None, str]:
    """Return the value of a metric that needs no model, and what reaches it; None where that is not known."""
    if name == "top1" and classes is not None:
        return float(np.unique(classes, return_counts=True)[1].max() / len(classes)), "always the commonest class"
    if name == "r2":
        return 0.0, "always the mean"
    if name in METRICS and METRICS[name].unit == "correlation":
        return 0.0, "chance"
    return None, ""


def gives_one_answer(task: str, outputs: Outputs) -> bool:
    """Return whether several samples all get the same class or, where none is chosen, the same outputs."""
    answers = dict(outputs)
    if find_task(task).outputs == "classes" and outputs["logits"].shape[1] > 1:
        answers = {"class": outputs["logits"].argmax(axis=1)}
    return all(len(rows) > 1 and all(np.array_equal(row, rows[0]) for row in rows[1:]) for rows in answers.values())
