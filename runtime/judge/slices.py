"""Slices of the evaluation set: the samples of each class, of each value of a column, of each named set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Judgement
from runtime.errors import UsageError
from runtime.tasks import find_task

LABEL, SET = "label", "set"
"""The columns that are no file's: a sample's class, and the named set that it is of."""
MOST_SLICES = 2000
"""Of a column: one of more values tells samples apart, and slices none."""
Groups = Mapping[str, Mapping[str, Array]]
"""Column -> value -> bool [N], the samples that have it; in the order of classes, or of the values as texts."""


def find_groups(
    judgement: Judgement,
    slices: Mapping[str, Sequence[str]],
    labels: Any | None,
    task: str,
    class_names: Sequence[str] = (),
) -> dict[str, dict[str, Array]]:
    """Return the slices that a judgement asks for, and those of named sets.

    `slices`: column -> a text for each sample, as the bundle keeps them. UsageError for a column that is not there,
    labels that are no classes, too many values, and a gate on a slice that no sample is in.
    """
    groups = {}
    for column in (*([SET] if SET in slices and SET not in judgement.slices else []), *judgement.slices):
        if column == LABEL:
            groups[column] = _group_by_label(labels, task, class_names)
        elif column in slices:
            values = np.asarray(slices[column])
            groups[column] = {str(value): values == value for value in np.unique(values)}
        else:
            raise UsageError(f"slices: there is no column '{column}'; the samples have {', '.join(slices) or 'none'}")
        if len(groups[column]) > MOST_SLICES:
            raise UsageError(
                f"slices: '{column}' has {len(groups[column])} values, more than {MOST_SLICES}; slice by a column of "
                "few values"
            )
    for gate in judgement.gates:
        column, _, value = (gate.slice or "").partition("=")
        for name in filter(None, (gate.worst, column)):
            if name not in groups:
                raise UsageError(f"gate on '{gate.metric}': there are no slices by '{name}'; {_name_columns(groups)}")
        if column and value not in groups[column]:
            known = ", ".join(list(groups[column])[:20])
            raise UsageError(f"gate on '{gate.metric}': no sample has {column}={value}; there are: {known}")
    return groups


def _name_columns(groups: Groups) -> str:
    return f"there are: {', '.join(groups)}" if groups else "name the column in validate.slices"


def _group_by_label(labels: Any | None, task: str, class_names: Sequence[str]) -> dict[str, Array]:
    groups = None if labels is None else find_task(task).group_by_label(labels, class_names)
    if groups is None:
        why = "there are no labels" if labels is None else f"the labels of {task} are not one class for each sample"
        raise UsageError(f"slices: label: {why}; leave it out, or slice by a column")
    return groups
