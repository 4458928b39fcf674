"""How far predicted numbers are from the labels: MAE, RMSE and R², averaged over several numbers.

Predictions and labels are [N] or [N, K]. In scikit-learn: mean_absolute_error, root_mean_squared_error and r2_score,
each with multioutput="uniform_average".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from runtime.errors import UsageError
from runtime.metrics.base import LARGEST, Columns, Link, Metric, Outputs, float_outputs

FITS = ("classes", "tensors", "numbers")


def number_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return (predictions, labels), float64 [N, K] each. UsageError for labels of another shape, or not finite."""
    (predictions,) = float_outputs(outputs).values()
    found = predictions.reshape(len(predictions), -1).astype(np.float64)
    given = np.asarray(labels)
    if given.dtype.kind not in "biuf" or given.shape not in (found.shape, found.shape[: 1 + (found.shape[1] > 1)]):
        raise UsageError(f"labels: {given.dtype} {list(given.shape)} for predictions {list(found.shape)}: give as many")
    wanted = given.reshape(found.shape).astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(wanted).all(axis=1))
    if bad.size:
        raise UsageError(f"labels: row {bad[0]} has label {wanted[bad[0]].tolist()}, which is not finite")
    return found, wanted


def find_number_misfit(outputs: Outputs, labels: Any) -> str | None:
    """Return why predictions cannot be compared with these labels; None where they can."""
    floats = float_outputs(outputs)
    if len(floats) != 1:
        return f"needs one output of numbers, and the outputs are {sorted(outputs)}"
    found, given = next(iter(floats.values())).shape, np.asarray(labels)
    width = math.prod(found[1:])
    if given.dtype.kind not in "biuf" or width == 0 or given.shape not in ((found[0],), (found[0], width)):
        return f"needs as many labels as numbers, and a label is {list(given.shape[1:])}, an output {list(found[1:])}"
    if given.ndim == 1 and width != 1:
        return f"needs {width} numbers a label, and there is one"
    return None


def _find_constant(outputs: Outputs, labels: Any) -> str | None:
    misfit = find_number_misfit(outputs, labels)
    constant = misfit is None and bool(
        (np.ptp(np.asarray(labels, np.float64).reshape(len(labels), -1), axis=0) == 0).any()
    )
    return "needs labels that differ, and these are all the same" if constant else misfit


def _absolute_errors(outputs: Outputs, labels: Any) -> Columns:
    found, wanted = number_columns(outputs, labels)
    return (np.abs(found - wanted).mean(axis=1),)


def root_mean_square(columns: Columns) -> float:
    """Return the mean over the numbers of the root of their mean squared error."""
    found, wanted = columns
    return float(np.sqrt(((found - wanted) ** 2).mean(axis=0)).mean())


def root_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the RMSE, float64 [N]."""
    squares = (columns[0] - columns[1]) ** 2
    means = squares.mean(axis=0)
    influence: np.ndarray = ((squares - means) / np.where(means > 0, 2 * np.sqrt(means), np.inf)).mean(axis=1)
    return influence


def explain_variance(columns: Columns) -> float:
    """Return R²: 1 - squared error / variance of the labels, mean over the numbers; 0 for guessing their mean."""
    found, wanted = columns
    errors, spread = ((found - wanted) ** 2).mean(axis=0), wanted.var(axis=0)
    return float((1 - errors / np.where(spread > 0, spread, np.nan)).mean())


def variance_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to R², float64 [N]: by its error, and by how far its label is from the mean."""
    found, wanted = columns
    errors, apart = (found - wanted) ** 2, (wanted - wanted.mean(axis=0)) ** 2
    error, spread = errors.mean(axis=0), apart.mean(axis=0)
    spread = np.where(spread > 0, spread, np.nan)  # of labels that are all the same there is no R²
    influence: np.ndarray = ((apart - spread) * error / spread**2 - (errors - error) / spread).mean(axis=1)
    return influence


LOG = Link(to=lambda value: math.log(value) if value > 0 else -math.inf, back=math.exp, slope=lambda value: 1 / value)
LOG_UNEXPLAINED = Link(
    to=lambda value: -math.log(1 - value) if value < 1 else math.inf,
    back=lambda z: 1 - math.exp(-z),
    slope=lambda value: 1 / (1 - value),
)
"""R² on the scale of the logarithm of what it leaves unexplained, a ratio of variances."""

MAE = Metric(
    name="mae",
    against="labels",
    higher_is_better=False,
    fits=FITS,
    unit="label",
    about="mean absolute difference between the predicted numbers and the labels",
    reduce=_absolute_errors,
    misfit=find_number_misfit,
)
RMSE = Metric(
    name="rmse",
    against="labels",
    higher_is_better=False,
    fits=FITS,
    unit="label",
    about="root of the mean squared difference between the predicted numbers and the labels",
    reduce=number_columns,
    misfit=find_number_misfit,
    kind="statistic",
    statistic=root_mean_square,
    influence=root_influence,
    link=LOG,
)
R2 = Metric(
    name="r2",
    against="labels",
    higher_is_better=True,
    fits=FITS,
    unit="fraction",
    range=(-LARGEST, 1.0),
    about="share of the labels' variance that the predictions explain",
    reduce=number_columns,
    misfit=_find_constant,
    kind="statistic",
    statistic=explain_variance,
    influence=variance_influence,
    link=LOG_UNEXPLAINED,
)
