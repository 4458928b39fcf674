"""What a model takes and gives: named tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a model."""

    name: str
    dtype: str
    """numpy's name: float32, int64, ..."""
    shape: tuple[int | str, ...]
    """A number where the size is fixed, a name where it is free: ("batch", 3, 32, 32)."""
