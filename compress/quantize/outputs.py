"""What a module gives, as one tensor: for all rooms that run modules without knowing their family. Torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MASK = "attention_mask"


def first_output(out: Any) -> Tensor:
    """Return the first tensor of what a module gives: itself, or of several, in a sequence or by name."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if hasattr(out, "values") else out
    return next(value for value in values if isinstance(value, Tensor))


def model_output(out: Any, feeds: Mapping[str, Tensor]) -> Tensor:
    """Return the first tensor of what a whole model gives for some feeds, its last dimension of one size for all.

    What has one number for each token, [b, T] as the mask, is put side by side: [b, T, k], as the beginnings and ends
    of answers.
    """
    first, mask = first_output(out), feeds.get(MASK)
    if mask is None or first.shape != mask.shape:
        return first
    values = [out] if isinstance(out, Tensor) else out.values() if hasattr(out, "values") else out
    return torch.stack([value for value in values if isinstance(value, Tensor) and value.shape == mask.shape], -1)
