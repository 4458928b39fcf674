"""Tell on which slices of the samples two judged bundles differ beyond noise, paired sample by sample.

The intervals of all slices hold at once (Bonferroni), apart from those of the whole set: who slices finely pays for it
in the slices' intervals alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from runtime.bundle.columns import Array
from runtime.judge.comparison import Difference, SliceComparison, SliceDifference, Verdict
from runtime.judge.evidence import slices_by
from runtime.judge.pairing import explain_unpaired, find_metric, pair_samples
from runtime.judge.slices import Groups
from runtime.metrics import Metric
from runtime.report.slices import choose_slices
from runtime.report.stored import StoredReport, read_groups


def compare_slices(old: StoredReport, new: StoredReport) -> SliceComparison | None:
    """Compare two reports of the same samples slice by slice, by the metrics that their own tables show.

    None where neither has slices. Raises BundleError for samples that are damaged.
    """
    asked = list_asked(old, new)
    if not asked:
        return None
    groups = {**read_groups(old), **read_groups(new)}
    paired: list[tuple[str, str, Array, Metric]] = []
    not_compared = {}
    for column, name in asked:
        metric = find_metric(name, old, new)
        why = metric if isinstance(metric, str) else _explain_not_sliced(metric, column, groups, old, new)
        if why:
            not_compared[f"{name} by {column}"] = why
        elif not isinstance(metric, str):
            paired += [(column, value, mask, metric) for value, mask in groups[column].items()]
    confidence = old.report.confidence
    level = 1 - (1 - confidence) / max(len(paired), 1)
    found = tuple(
        SliceDifference(column, value, int(mask.sum()), _pair_slice(metric, mask, old, new, level))
        for column, value, mask, metric in paired
    )
    return SliceComparison(confidence, found, not_compared)


def list_asked(old: StoredReport, new: StoredReport) -> list[tuple[str, str]]:
    """Return the (column, metric) that the tables of either report show and both candidates have."""
    shown = [(table.column, table.metric) for stored in (old, new) for table in choose_slices(stored.report)]
    sides = [stored.report.candidate.metrics for stored in (old, new)]
    return [pair for pair in dict.fromkeys(shown) if all(pair[1] in metrics for metrics in sides)]


def _explain_not_sliced(metric: Metric, column: str, groups: Groups, old: StoredReport, new: StoredReport) -> str:
    if column not in groups:
        return "a report alone does not say which samples a slice has; name the bundles' folders"
    if not slices_by(metric, column):
        return "of one class alone the metric says nothing"
    return explain_unpaired(metric, old, new)


def _pair_slice(metric: Metric, mask: Array, old: StoredReport, new: StoredReport, level: float) -> Difference:
    """Return the difference on the samples of one slice. mask: bool [N]."""
    rows = np.flatnonzero(mask)
    before, after = (
        replace(stored, columns={metric.name: tuple(column[rows] for column in stored.columns[metric.name])})
        for stored in (old, new)
    )
    return pair_samples(metric, before, after, level)


def order_slices(slices: Sequence[SliceDifference]) -> list[SliceDifference]:
    """Return the slices: what is worse, what is better, then the others; of each the largest change first."""
    order: tuple[Verdict, ...] = ("worse", "better", "within noise", "not known")
    return sorted(slices, key=lambda s: (order.index(s.difference.verdict), -abs(s.difference.change.value)))
