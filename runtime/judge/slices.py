"""Slices of the evaluation set: the samples of each class, of each value of a column, of each named set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Judgement
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.tasks.base import name_classes

T = TypeVar("T", int, str)
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
    groups: dict[str, dict[str, Array]] = {}
    for column in (*([SET] if SET in slices and SET not in judgement.slices else []), *judgement.slices):
        if column == LABEL:
            classes = _find_classes(labels, task)
            different = _list_few(column, classes)
            groups[column] = _make_masks(classes, name_classes(different, class_names))
        elif column in slices:
            groups[column] = _make_masks(slices[column], {value: value for value in _list_few(column, slices[column])})
        else:
            raise UsageError(f"slices: there is no column '{column}'; the samples have {', '.join(slices) or 'none'}")
    for gate in judgement.gates:
        column, _, value = (gate.slice or "").partition("=")
        for name in filter(None, (gate.worst, column)):
            if name not in groups:
                raise UsageError(f"gate on '{gate.metric}': there are no slices by '{name}'; {_name_columns(groups)}")
        if column and value not in groups[column]:
            known = ", ".join(list(groups[column])[:20])
            raise UsageError(f"gate on '{gate.metric}': no sample has {column}={value}; there are: {known}")
    return groups


def _list_few(column: str, values: Sequence[T]) -> list[T]:
    """Return the different values in order. UsageError where they are too many to slice by."""
    different = set(values)
    if len(different) > MOST_SLICES:  # before a mask is made of each: of 100,000 samples those would take 10 GB
        raise UsageError(
            f"slices: '{column}' has {len(different)} values, more than {MOST_SLICES}; slice by a column of few values"
        )
    return sorted(different)


def _make_masks(values: Sequence[T], names: Mapping[T, str]) -> dict[str, Array]:
    """Return name -> bool [N], the samples of each value, in the order of `names`."""
    places = {value: place for place, value in enumerate(names)}
    which = np.array([places[value] for value in values])  # [N]; an array of long texts would take gigabytes
    return {name: which == places[value] for value, name in names.items()}


def _name_columns(groups: Groups) -> str:
    return f"there are: {', '.join(groups)}" if groups else "name the column in validate.slices"


def _find_classes(labels: Any | None, task: str) -> list[int]:
    """Return the class of each sample. UsageError where there are none."""
    classes = None if labels is None else find_task(task).find_classes(labels)
    if classes is None:
        why = "there are no labels" if labels is None else f"the labels of {task} are not one class for each sample"
        raise UsageError(f"slices: label: {why}; leave it out, or slice by a column")
    return list(map(int, classes))
