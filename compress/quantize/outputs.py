"""What a module gives, as one tensor: for all rooms that run modules without knowing their family. Torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def first_output(out: Any) -> Tensor:
    """Return the first tensor of what a module gives: itself, or of several, in a sequence or by name."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if hasattr(out, "values") else out
    return next(value for value in values if isinstance(value, Tensor))
