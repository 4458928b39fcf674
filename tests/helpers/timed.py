"""Times of calls as fresh processes would have taken them."""

from __future__ import annotations

import numpy as np

from runtime.bundle.columns import Array


def as_processes(seconds: Array, n: int = 9) -> Array:
    """Return times [models, rounds] as those of n processes that all saw them, [n, models, rounds, 1]."""
    return np.repeat(np.asarray(seconds, dtype=float)[None, :, :, None], n, axis=0)
