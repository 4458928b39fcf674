"""Metrics of a recipe's own: run at the build on both models' outputs, so that bundles hold values and no code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compress.errors import PlanError
from compress.models.factory import USER_ERRORS, load_factory
from compress.planning.own_metrics import OwnMetric
from runtime.bundle.columns import Array, stack_rows
from runtime.bundle.format import Judgement, RecordedMetric
from runtime.judge.recorded import as_metric, value_columns
from runtime.metrics import Metric, NonFiniteOutputs, Outputs, check_finite

Function = Callable[[Mapping[str, np.ndarray], Any], Any]


@dataclass(frozen=True)
class LoadedMetric:
    """An own metric's function, what the bundle records of it, and its values for the baseline."""

    own: OwnMetric
    function: Function
    record: RecordedMetric
    baseline: Array

    def compute(self, outputs: Outputs, labels: Any | None) -> Array:
        """Return the values of a model, as `RecordedMetric` says. PlanError where they are none, or of another kind."""
        values, per_sample = compute_values(self.own.name, self.function, outputs, labels)
        if per_sample != self.record.per_sample:
            raise PlanError(f"{self.own.name}: gives now one number and now one for each sample; give always the same")
        return values

    def compute_or_mark(self, outputs: Outputs, labels: Any | None) -> Array:
        """Return what `compute` does; NaN where the outputs are broken, which the verdict will say."""
        try:
            check_finite(outputs)
        except NonFiniteOutputs:
            return np.full_like(self.baseline, np.nan)
        return self.compute(outputs, labels)

    def as_live(self) -> Metric:
        """Return the metric for gates that are decided while passes run."""

        def reduce(outputs: Outputs, labels: Any) -> tuple[np.ndarray, ...]:
            return value_columns(self.compute(outputs, labels), self.record.per_sample)

        return replace(as_metric(self.record), name=self.own.name, reduce=reduce)


def load_own_metrics(metrics: Sequence[OwnMetric], baseline: Outputs, labels: Any | None) -> list[LoadedMetric]:
    """Import the metrics' functions and compute them of the baseline.

    SourceError for a file that cannot be imported, PlanError for a function that fails or gives no numbers.
    """
    loaded = []
    for own in metrics:
        function = load_factory((str(own.path), own.function), own.path.parent)
        values, per_sample = compute_values(own.name, function, baseline, labels)
        higher, unit = getattr(function, "higher_is_better", True), getattr(function, "unit", "")
        if not isinstance(higher, bool) or not isinstance(unit, str):
            raise PlanError(f"{own.name}: higher_is_better must be True or False, and unit a text")
        record = RecordedMetric(own.short_name, own.sha256, higher, unit, per_sample)
        loaded.append(LoadedMetric(own, function, record, values))
    return loaded


def check_sliced(metrics: Sequence[LoadedMetric], judgement: Judgement) -> None:
    """Raise PlanError for a gate on slices of a metric that is one number of all samples."""
    whole = {metric.record.name for metric in metrics if not metric.record.per_sample}
    problems = [
        f"validate.gates.{index}: {gate.metric} gives one number for all samples, and none for a slice; give a number "
        "for each sample"
        for index, gate in enumerate(judgement.gates)
        if gate.metric in whole and (gate.worst or gate.slice)
    ]
    if problems:
        raise PlanError(problems)


def compute_values(name: str, function: Function, outputs: Outputs, labels: Any | None) -> tuple[Array, bool]:
    """Return a function's values, float64, and whether there is one for each sample.

    [N] with a value for each sample; else [1 + groups]: the number, and what it is without each group of samples.
    PlanError where the function fails, or gives NaN or another shape.
    """
    n = len(next(iter(outputs.values())))
    labels = None if labels is None else _make_array(labels)
    values = _call(name, function, outputs, labels, n)
    if values.ndim:
        return values, True
    if n < 2:
        raise PlanError(f"{name}: one number of one sample has no interval; give more evaluation samples")
    # groups of samples that are left out in turn, for the interval of a single number
    groups = np.random.default_rng(0).permutation(n) % min(n, 100)
    without = [
        _call(name, function, *_take_rows(outputs, labels, groups != group), int(np.count_nonzero(groups != group)))
        for group in range(groups.max() + 1)
    ]
    if any(value.ndim for value in without):
        raise PlanError(f"{name}: gives now one number and now one for each sample; give always the same")
    return np.array([values, *without], np.float64), False


def _make_array(labels: Any) -> Array:
    """Return labels as an array [N, ...]; those of several shapes, as masks of images are, as one of objects [N]."""
    return stack_rows(labels) if isinstance(labels[0], np.ndarray) else np.asarray(labels)


def _take_rows(outputs: Outputs, labels: Array | None, mask: Array) -> tuple[dict[str, np.ndarray], Array | None]:
    rows = {output: values[mask] for output, values in outputs.items()}
    return rows, None if labels is None else labels[mask]


def _call(name: str, function: Function, outputs: Outputs, labels: Array | None, n: int) -> Array:
    """Return float64 [] or [n]."""
    try:
        given = function(
            {output: _protect(values) for output, values in outputs.items()},
            None if labels is None else _protect(labels),
        )
        values = np.asarray(given, np.float64)
    except (*USER_ERRORS, ArithmeticError, AssertionError) as error:
        raise PlanError(f"{name}: failed: {type(error).__name__}: {error}") from error
    if values.shape not in ((), (n,)):
        raise PlanError(
            f"{name}: gave an array of shape {list(values.shape)} for {n} samples; give one number, or one for each"
        )
    if not np.isfinite(values).all():
        rows = f" in {np.count_nonzero(~np.isfinite(values))} of {n} samples" if values.ndim else ""
        raise PlanError(f"{name}: gave NaN or infinity{rows}; give finite numbers")
    return values


def _protect(values: Array) -> Array:
    """Return an array that cannot be written to."""
    view = values.view()
    view.flags.writeable = False
    return view
