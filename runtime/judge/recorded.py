"""Metrics of the recipe's own: what their code gave at the build, read from the bundle; none of that code is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Manifest, RecordedMetric
from runtime.errors import BundleError
from runtime.judge.copies import Draws
from runtime.judge.evidence import Evidence, column_evidence
from runtime.judge.slices import Groups
from runtime.metrics import Metric, NonFiniteOutputs
from runtime.metrics.base import Columns
from runtime.tasks.metrics import is_own


def recorded_evidence(
    manifest: Manifest, recorded: Sequence[tuple[Array, Array]], groups: Groups, draws: Draws | None = None
) -> dict[str, Evidence]:
    """Return evidence of each of `manifest.recorded`, by name; `recorded`: its values, (baseline, candidate).

    BundleError for a metric that gates name and nothing was recorded of; NonFiniteOutputs where the candidate's values
    are not finite.
    """
    known = {record.name for record in manifest.recorded}
    named = (*manifest.judgement.metrics, *(gate.metric for gate in manifest.judgement.gates))
    if missing := [name for name in named if is_own(name) and name not in known]:
        raise BundleError(f"metric '{missing[0]}' is the recipe's own, and nothing was recorded of it; build it again")
    evidence = {}
    for record, sides in zip(manifest.recorded, recorded, strict=True):
        if not all(np.isfinite(values).all() for values in sides):
            raise NonFiniteOutputs(f"metric '{record.name}' gave NaN or infinity at the build")
        theirs, ours = (value_columns(values, record.per_sample) for values in sides)
        metric = describe_own_metric(record, ours, theirs)
        found = column_evidence(metric, ours, theirs, manifest.judgement, groups, draws if record.per_sample else None)
        slices = {
            column: tuple(
                replace(part, alone=replace(part.alone, recorded=True), at_once=replace(part.at_once, recorded=True))
                for part in parts
            )
            for column, parts in found.slices.items()
        }
        evidence[record.name] = replace(found, recorded=True, slices=slices)
    return evidence


def describe_own_metric(record: RecordedMetric, ours: Columns, theirs: Columns) -> Metric:
    """Return the metric that two models' values are compared by: of zeros and ones alone it is a proportion."""
    metric = as_metric(record)
    if not record.per_sample:
        return metric
    if np.isin((ours[0], theirs[0]), (0, 1)).all():
        return replace(metric, kind="proportion")
    return replace(metric, reach=float(np.ptp((ours[0], theirs[0]))))


def as_metric(record: RecordedMetric) -> Metric:
    """Return a metric whose columns are `value_columns`; it reduces no outputs."""
    shared = Metric(
        name=record.name,
        against="labels",
        higher_is_better=record.higher_is_better,
        unit=record.unit,
        about="a metric of the recipe's own",
        reduce=_refuse,
    )
    if record.per_sample:
        return shared
    # Left-out groups are the jackknife's: each pseudo-value is what its group adds to the number.
    return replace(
        shared,
        kind="statistic",
        statistic=lambda columns: float(columns[1][0]),
        counted="groups of samples, left out in turn",
        sliceable=False,
    )


def value_columns(values: Array, per_sample: bool) -> Columns:
    """Return the columns of recorded values: a value for each sample; or (pseudo-values, the number), [groups] each.

    `values`: float64 [N], or [1 + groups]: the number, then what it is without each group (Quenouille's jackknife).
    """
    if per_sample:
        return (values,)
    whole, without = values[0], values[1:]
    return len(without) * whole - (len(without) - 1) * without, np.full(len(without), whole)


def _refuse(outputs: object, reference: object) -> Columns:
    raise TypeError("what is recorded is not computed here")
