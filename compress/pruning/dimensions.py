"""What can be removed from a model together, and where each of its units lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from compress.facts import Prunable

Axis = tuple[str, int]
"""(a parameter's or buffer's plain name, which of its axes)."""
DimensionKind = Literal["channels", "neurons", "heads", "width"]


@dataclass(frozen=True, eq=False)
class Dimension:
    """Units 0 .. n_units - 1, each removable on its own. Removing unit u removes indices `members[axis][u]` everywhere.

    `members`: axis -> int64 [n_units, k]. `writers`: layers whose outputs the units are; `readers`: layers that read
    them along their input axis, in the order in which they run. `name`: that of the first writer. `kind`: "channels"
    of convolutions, "neurons" of a feed-forward layer, "heads" of attention (of grouped queries: a key-value head with
    its queries), "width" of what several layers write to (a residual stream).
    """

    name: str
    kind: DimensionKind
    members: Mapping[Axis, np.ndarray]
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    @property
    def n_units(self) -> int:
        return len(next(iter(self.members.values())))

    def indices(self, axis: Axis, units: np.ndarray) -> np.ndarray:
        """Return the indices of some units along an axis, int64, rising."""
        return np.sort(self.members[axis][units].reshape(-1))


@dataclass(frozen=True)
class Coupling:
    """What can be removed, in the order in which it is first written (`facts`: the same, for a plan), and what cannot.

    `kept`: layer -> why its outputs, or some of them, stay.
    """

    dimensions: tuple[Dimension, ...]
    facts: tuple[Prunable, ...]
    kept: Mapping[str, str]
