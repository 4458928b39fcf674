"""Which class is taken for which: by the baseline, by the candidate, and where that changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.metrics import Outputs
from runtime.tasks.base import name_classes
from runtime.tasks.metrics import METRICS, why_not

MOST_PAIRS = 5000
"""Pairs of classes that a report lists; the rarest are left out."""


@dataclass(frozen=True)
class ConfusedPair:
    """How many samples of the class `label` each model takes for the class `taken_for`."""

    label: str
    taken_for: str
    baseline: int
    candidate: int


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix without its zeros, `pairs` with the commonest first, those of no confusion included."""

    n_classes: int
    classes: tuple[str, ...]
    """Those that `pairs` name, in the order of the model's outputs."""
    pairs: tuple[ConfusedPair, ...]
    n_left_out: int = 0
    turned: int = 0
    """Samples to which the two models give different classes."""


def count_confusions(
    task: str, candidate: Outputs, baseline: Outputs, labels: Any | None, class_names: Sequence[str]
) -> Confusion | None:
    """Count which class is taken for which; None where the model chooses no single class, or there are no labels."""
    if why_not(METRICS["top1"], task, baseline, labels) is not None:
        return None
    chosen = [outputs["logits"].argmax(axis=1) for outputs in (baseline, candidate)]
    n_classes = baseline["logits"].shape[1]
    given = np.asarray(labels)
    counts = [_count_cells(given, one, n_classes) for one in chosen]
    cells = sorted(counts[0].keys() | counts[1].keys(), key=lambda cell: (-counts[1].get(cell, 0), cell))
    names = name_classes({c for cell in cells[:MOST_PAIRS] for c in cell}, class_names)
    pairs = [
        ConfusedPair(names[label], names[taken], *(count.get((label, taken), 0) for count in counts))
        for label, taken in cells[:MOST_PAIRS]
    ]
    turned = int(np.count_nonzero(chosen[0] != chosen[1]))
    return Confusion(n_classes, tuple(names.values()), tuple(pairs), len(cells) - len(pairs), turned)


def _count_cells(labels: Array, chosen: Array, n_classes: int) -> dict[tuple[int, int], int]:
    """Count (label, class chosen), zeros left out."""
    cells, counts = np.unique(labels.astype(np.int64) * n_classes + chosen, return_counts=True)
    return {divmod(int(cell), n_classes): int(count) for cell, count in zip(cells, counts, strict=True)}
