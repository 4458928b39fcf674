"""What a module gives, as one tensor: for all rooms that run modules without knowing their family. Torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def list_outputs(out: Any) -> list[Tensor]:
    """Return the floating tensors of what a module gives: itself, or of several, in a sequence or by name."""
    if isinstance(out, Tensor):
        return [out]
    values = out.values() if hasattr(out, "values") else out
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def measure_units(outputs: list[Tensor]) -> list[float]:
    """Return what each of several outputs is measured in, so that one in pixels hides none of small numbers.

    Its standard deviation; 1 for an only one.
    """
    if len(outputs) == 1:
        return [1.0]
    return [max(float(out.detach().float().std(correction=0)), 1e-12) for out in outputs]


def square_distance(outputs: list[Tensor], targets: list[Tensor]) -> float:
    """Return the squared error of outputs against a whole model's, of several each in its unit, summed."""
    units = measure_units(targets)
    return sum(
        float((out - target).double().square().sum()) / unit**2
        for out, target, unit in zip(outputs, targets, units, strict=True)
    )


def first_output(out: Any) -> Tensor:
    """Return the first tensor of what a module gives: itself, or of several, in a sequence or by name."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if hasattr(out, "values") else out
    return next(value for value in values if isinstance(value, Tensor))
