"""What a quality metric is, and the checks that every metric makes on what it is given.

A metric reduces a model's outputs to a few numbers per sample (`reduce`) and those to one number (`statistic`). The
split is what makes intervals cheap: what each sample adds to the statistic (`influence`) is a formula over the columns.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from runtime.errors import RuntimeFailure, UsageError

Outputs = Mapping[str, np.ndarray]
"""Outputs over N samples: {"logits": [N, C]}, {"embeddings": [N, k, D]} or {output name: [N, ...]}."""
ANSWERS = ("tokens", "maps", "answers", "boxes", "texts")
"""Outputs that are no tensors any more, in the words of `runtime.tasks.Task.outputs`: their numbers lie nowhere."""
Columns = tuple[np.ndarray, ...]
"""Arrays [N] (or [N, ...]) with one row per sample."""
FRACTION: dict[str, Any] = {"higher_is_better": True, "unit": "fraction", "range": (0.0, 1.0)}
"""Of a `Metric` that is a share of what is right."""
LARGEST = float(np.finfo(np.float32).max) ** 2
"""Beyond which no metric is: what a model gives is float32, and some metrics are of squares."""
T = TypeVar("T")


class NonFiniteOutputs(RuntimeFailure):
    """A model gave NaN or infinity, so that no metric of it means anything."""


def remember(compute: Callable[..., T], most: int = 8) -> Callable[..., T]:
    """Return a function of outputs and further arguments with its last `most` results kept, which several metrics ask.

    Arguments are told by identity. A result is kept no longer than the arrays of its outputs are.
    """
    kept: list[tuple[list[weakref.ref[np.ndarray]], tuple[Any, ...], T]] = []

    def find(outputs: Outputs, *others: Any) -> T:
        arrays = [outputs[name] for name in sorted(outputs)]
        for of_arrays, of_others, result in kept:
            known, asked = (*(ref() for ref in of_arrays), *of_others), (*arrays, *others)
            if len(known) == len(asked) and all(map(operator.is_, known, asked)):
                return result
        result = compute(outputs, *others)
        kept.append(([weakref.ref(array, forget) for array in arrays], others, result))
        del kept[:-most]
        return result

    def forget(_: object) -> None:
        kept[:] = [entry for entry in kept if all(ref() is not None for ref in entry[0])]

    return find


def mean_of_first(columns: Columns) -> float:
    """Return the mean of the first column."""
    return float(np.mean(columns[0]))


def first_column(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the mean of the first column, float64 [N]."""
    return columns[0].astype(np.float64)


def keep_column(column: np.ndarray) -> np.ndarray:
    """Return a column as it is, where others are summed up."""
    return column


def ratio_of_sums(*weights: float, sum_up: Callable[[np.ndarray], np.ndarray] = keep_column) -> dict[str, Any]:
    """Return `statistic` and `influence`: the first column's sum over that of the others by weight.

    `sum_up`: makes [N] of a column.
    """

    def whole(columns: Columns) -> np.ndarray:
        total: np.ndarray = np.tensordot(weights, [sum_up(c) for c in columns[1 : len(weights) + 1]], axes=1)
        return total

    def statistic(columns: Columns) -> float:
        return float(columns[0].sum() / max(whole(columns).sum(), 1e-9))

    def influence(columns: Columns) -> np.ndarray:
        below = whole(columns)
        added: np.ndarray = (sum_up(columns[0]) - statistic(columns) * below) * len(below) / max(below.sum(), 1e-9)
        return added

    return {"statistic": statistic, "influence": influence}


@dataclass(frozen=True)
class Link:
    """A scale on which a statistic's interval is closer to symmetric; the ends are taken back from it.

    Where the statistic is steeper against this scale, the same change of the samples moves it farther.
    """

    to: Callable[[float], float]
    back: Callable[[float], float]
    slope: Callable[[float], float]
    """Derivative of `to`."""


@dataclass(frozen=True)
class Flaws:
    """How far a statistic of counts can be off, for evaluation sets on which few samples or none are wrong.

    `of` says which samples keep the metric from `perfect`, bool [N]; `reach` bounds by how much the metric moves if a
    share of the samples turns, over that share.
    """

    of: Callable[[Columns], np.ndarray]
    reach: Callable[[Columns], float]
    perfect: float = 1.0
    widest: float = math.inf
    """From the worst value to the best: no change is larger."""
    changed: Callable[[Columns, Columns], np.ndarray] | None = None
    """Which samples differ between two models in what counts, bool [N]; None: those that differ in any column."""


def share_of_sums(
    sum_up: Callable[[np.ndarray], np.ndarray] = keep_column,
    changed: Callable[[Columns, Columns], np.ndarray] | None = None,
) -> dict[str, Any]:
    """Return `statistic`, `influence`, `weights` and `flaws`: what is right (the first column) of all (the second).

    `sum_up`: makes [N] of a column. `changed`: as of `Flaws`.
    """

    def weigh(columns: Columns) -> np.ndarray:
        return sum_up(columns[1]).astype(np.float64)

    flaws = Flaws(
        of=lambda columns: sum_up(columns[0]) < sum_up(columns[1]),
        reach=lambda columns: float(weigh(columns).max(initial=1) / max(weigh(columns).mean(), 1e-9)),
        changed=changed,
    )
    return {**ratio_of_sums(1.0, sum_up=sum_up), "weights": weigh, "flaws": flaws}


@dataclass(frozen=True)
class Metric:
    """One quality metric.

    `against` says what the reference is: the labels [N], nothing beside the outputs (the texts themselves), or the
    baseline's outputs. `shape` says what it needs to see: "classes" (logits of at least two classes), "score" (one
    number per sample, or two embeddings), "tokens" (sums over each sample's tokens), "answers" (what `postprocess`
    adds), "outputs" (anything floating) or "any". `kind` says how its interval is made: a proportion is a mean of zeros
    and ones, a mean is a mean over samples, a statistic is neither. `influence` gives what each sample adds to the
    statistic, its derivative by the sample's weight up to a constant, float64 [N]. `ideal` is the value of a model
    compared with itself (metrics against the baseline).
    """

    name: str
    against: Literal["labels", "texts", "baseline"]
    higher_is_better: bool
    unit: str
    about: str
    reduce: Callable[[Outputs, Any], Columns]
    range: tuple[float, float] = (-math.inf, math.inf)
    """The least and the largest value that it can have, of all samples and of any one."""
    fits: tuple[str, ...] | None = None
    """What outputs it is for, in the words of `runtime.tasks.Task.outputs`; None: any that are kept as they are."""
    shape: Literal["classes", "score", "tokens", "answers", "outputs", "any"] = "outputs"
    kind: Literal["proportion", "mean", "statistic"] = "mean"
    statistic: Callable[[Columns], float] = mean_of_first
    influence: Callable[[Columns], np.ndarray] = first_column
    weights: Callable[[Columns], np.ndarray] | None = None
    """How much each sample counts, float64 [N], where that differs."""
    counts: Callable[[Columns], np.ndarray] | None = None
    """Which samples it is of, bool [N]; None: all. Those it is not of add nothing to the statistic."""
    cut: Callable[[Columns], tuple[Columns, np.ndarray] | None] | None = None
    """Gives columns of parts of samples [M], for sets of few long samples, and the run of neighbours that each part
    belongs to, int64 [M]; None where the columns hold none."""
    bias: Callable[[Columns], float] | None = None
    """By how much the statistic of finite samples is off on average, estimated; None for one that is not."""
    shortage: Callable[[Columns], str] | None = None
    """What is missing before the statistic says something of its own, "" if nothing; its change may be known sooner."""
    link: Link | None = None
    flaws: Flaws | None = None
    ideal: float | None = None
    misfit: Callable[[Outputs, Any], str | None] | None = None
    """Says why the metric cannot be computed of such outputs and labels; in the place of what `shape` checks."""
    biased_change: bool = False
    """Whether `bias` is of changes, too, so that their intervals are widened by that of either model."""
    turned: Callable[[Columns, Columns], np.ndarray] | None = None
    """Which samples, bool [N], changed by a leap from one model to the other, of 2 at most in `influence`."""
    reach: float | None = None
    """Of a mean whose samples mostly have one value: how far another's is from that at most."""
    needs: tuple[str, ...] = ()
    """Fields of `postprocess`, any of which it is about."""
    counted: str = "samples"
    """What its columns have a row for."""
    sliceable: bool = True
    """Whether its columns have a row for each sample, so that it can be taken of some of them."""
    on_request: bool = False
    """Computed only where a judgement names it: another metric says the same, or few ask for it."""
    fix: Callable[[Outputs, Any], Callable[[Outputs, Any], Columns]] | None = None
    """Gives `reduce` as the baseline's outputs and the labels fix it, as by a threshold; None: they fix nothing."""

    @property
    def needs_baseline(self) -> bool:
        """Return whether its value of a candidate hangs on the baseline's outputs."""
        return self.against == "baseline" or self.fix is not None

    def settle(self, baseline: Outputs, labels: Any) -> Metric:
        """Return the metric with all that it takes of the baseline's outputs and the labels fixed."""
        return self if self.fix is None else replace(self, reduce=self.fix(baseline, labels))

    @property
    def extremes(self) -> tuple[float, float]:
        """Return the least and the largest value that a model can reach: `range`, its open ends at LARGEST."""
        least, most = self.range
        return max(least, -LARGEST), min(most, LARGEST)

    def suits(self, outputs: str) -> bool:
        """Return whether the metric is for such outputs, in the words of `runtime.tasks.Task.outputs`."""
        return outputs not in ANSWERS if self.fits is None else outputs in self.fits

    def columns(self, outputs: Outputs, reference: Any) -> Columns:
        """Return what the statistic is taken of. Raises NonFiniteOutputs, or UsageError for labels that do not fit."""
        check_finite(outputs)
        return self.reduce(outputs, reference)

    def per_sample(self, outputs: Outputs, reference: Any) -> np.ndarray | None:
        """Return float64 [N] whose mean is the metric; None where the metric is not a mean over samples."""
        columns = self.columns(outputs, reference)
        return None if self.kind == "statistic" else columns[0].astype(np.float64)

    def compute(self, outputs: Outputs, reference: Any) -> float:
        """Compute the metric over all samples, in `unit`."""
        return self.statistic(self.columns(outputs, reference))


def check_finite(outputs: Outputs) -> None:
    """Raise NonFiniteOutputs naming the first floating output that holds NaN or infinity, with its first rows."""
    for name, values in float_outputs(outputs).items():
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if bad.any():
            rows = ", ".join(str(row) for row in np.flatnonzero(bad)[:5])
            raise NonFiniteOutputs(
                f"output '{name}' holds NaN or infinity in {bad.sum()} of {len(values)} samples (first rows: {rows})"
            )


def float_outputs(outputs: Outputs) -> dict[str, np.ndarray]:
    """Return the floating outputs, by name, in the order of their names."""
    return {name: outputs[name] for name in sorted(outputs) if np.issubdtype(outputs[name].dtype, np.floating)}


def class_labels(labels: Any, n_classes: int, n_samples: int) -> np.ndarray:
    """Return labels as int64 [N] in 0..n_classes-1; UsageError names the first row that is not."""
    given = np.asarray(labels)
    if given.shape != (n_samples,):
        raise UsageError(
            f"labels: shape {list(given.shape)} for {n_samples} samples; one class id per sample is needed"
        )
    if not np.issubdtype(given.dtype, np.integer):
        raise UsageError(f"labels: dtype {given.dtype} where integer class ids are needed")
    wrong = np.flatnonzero((given < 0) | (given >= n_classes))
    if wrong.size:
        row = int(wrong[0])
        raise UsageError(
            f"labels: row {row} has label {given[row]}, and the model has {n_classes} classes (0 to {n_classes - 1})"
            f"; {wrong.size} of {n_samples} rows are out of range"
        )
    return given.astype(np.int64)


def scores(outputs: Outputs) -> np.ndarray:
    """Return one float64 score per sample [N].

    For embeddings [N, 2, D] the cosine between the two columns; otherwise the only floating output, one value a sample.
    """
    if "embeddings" in outputs:
        pair = outputs["embeddings"].astype(np.float64)  # [N, 2, D]
        return cosine_rows(pair[:, 0], pair[:, 1])
    (only,) = float_outputs(outputs).values()
    return only.reshape(len(only)).astype(np.float64)


def score_labels(labels: Any, n_samples: int) -> np.ndarray:
    """Return labels as float64 [N]; UsageError for a wrong shape and for a label that is not finite."""
    given = np.asarray(labels)
    if given.shape != (n_samples,):
        raise UsageError(f"labels: shape {list(given.shape)} for {n_samples} samples; one score per sample is needed")
    values = given.astype(np.float64)
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise UsageError(f"labels: row {wrong[0]} has label {values[wrong[0]]}, which is not a finite score")
    return values


def cosine_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of a and b, [N, D] -> [N]; 1 where both rows are zero, 0 where only one is."""
    norm_a, norm_b = np.linalg.norm(a, axis=-1), np.linalg.norm(b, axis=-1)
    product = norm_a * norm_b
    cosine = np.sum(a * b, axis=-1) / np.where(product > 0, product, 1.0)
    result: np.ndarray = np.where(product > 0, np.clip(cosine, -1.0, 1.0), (norm_a == norm_b).astype(np.float64))
    return result


def same_shapes(outputs: Outputs, baseline: Outputs) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return pairs (candidate, baseline) of every floating output, float64.

    RuntimeFailure where names or shapes differ.
    """
    ours, theirs = float_outputs(outputs), float_outputs(baseline)
    if ours.keys() != theirs.keys():
        raise RuntimeFailure(f"the candidate gives {sorted(ours)}, the baseline gave {sorted(theirs)}")
    for name in ours:
        if ours[name].shape != theirs[name].shape:
            raise RuntimeFailure(
                f"output '{name}': shape {list(ours[name].shape)}, the baseline's is {list(theirs[name].shape)}"
            )
    check_finite(baseline)
    return [(ours[name].astype(np.float64), theirs[name].astype(np.float64)) for name in ours]
