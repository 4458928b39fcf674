"""Where two ways to run one graph part: the first tensor that differs, found by asking for a few at a time.

Every question costs a model that gives these tensors as outputs, too, which for an engine is a build: the window is cut
into parts, not walked through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.bundle.columns import Array

AT_ONCE = 8
"""Tensors that one question asks for."""
Compare = Callable[[Sequence[str]], Mapping[str, float]]
"""Names of tensors -> by how much each differs (`relative_error`)."""


@dataclass(frozen=True)
class Divergence:
    """`tensor` is the first that differs by more than is allowed; `before` the last one asked for that does not, "" if
    none. `errors`: of all that were asked for. `questions`: how often the models were built for it."""

    tensor: str
    before: str
    errors: dict[str, float]
    questions: int


def first_divergence(tensors: Sequence[str], compare: Compare, allowed: float) -> Divergence | None:
    """Find the first of `tensors` that differs; None where no tensor that was asked for differs.

    `tensors`: in the order in which the graph computes them. Errors are taken to stay once they are there. ValueError
    without tensors.
    """
    if not tensors:
        raise ValueError("there is no tensor to compare")
    low, questions = -1, 1
    last = tensors[-AT_ONCE:]  # of several branches the last tensor is the end of one
    errors = dict(compare(last))
    different = [place for place, name in enumerate(tensors) if errors.get(name, 0.0) > allowed]
    if not different:
        return None
    high = different[0]
    while high - low > 1:
        inner = high - low - 1
        count = min(AT_ONCE, inner)
        places = sorted({low + 1 + (inner * i) // count for i in range(count)})
        errors |= compare([tensors[place] for place in places])
        questions += 1
        wrong = [place for place in places if errors[tensors[place]] > allowed]
        high = min([*wrong, high])
        low = max([place for place in places if place < high], default=low)
    return Divergence(tensors[high], tensors[low] if low >= 0 else "", errors, questions)


def relative_error(found: Array, expected: Array) -> float:
    """Return the root mean square of the difference, over that of `expected`.

    Counted where they are not the same infinity (masks hold it); infinite where only one of them is finite, or `found`
    is NaN.
    """
    return relative(*squares(found, expected))


def squares(found: Array, expected: Array) -> tuple[float, float]:
    """Return the sums of the squared difference and of `expected` squared; `relative` takes those of several arrays."""
    a, b = (array.astype(np.float64).reshape(-1) for array in (found, expected))
    apart = a != b
    if not (np.isfinite(a) & np.isfinite(b))[apart].all():
        return float("inf"), 0.0
    return float(np.square(a[apart] - b[apart]).sum()), float(np.square(b[np.isfinite(b)]).sum())


def relative(difference: float, size: float) -> float:
    """Return the `relative_error` of what `squares` gave, or of their sums."""
    return float(np.sqrt(difference / size)) if size else (0.0 if difference == 0 else float("inf"))
