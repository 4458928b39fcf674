"""What a pass is given while it works, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from compress.facts import LayerDecision, Note
from compress.targets import Target

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class PassContext:
    """The surroundings of one step.

    `batches`: the calibration data, encoded, in a fixed order (empty when the recipe has none); may be iterated again.
    `shortfalls`: given an ONNX graph, the quality gates of the recipe that it does not hold, as sentences (empty: all
    hold); None when the recipe has no quality gate to hold. `progress`: wraps an iterable in a progress bar. `log`: one
    line for the log. `work`: a folder that outlives a killed run, for what a pass over blocks has finished; None: a
    temporary one. `memory_mib`: what the process may hold between two blocks; None: anything.
    """

    batches: Sequence[Feeds]
    target: Target
    seed: int
    log: Callable[[str], None]
    progress: Callable[[Sequence[Any], str], Iterable[Any]]
    shortfalls: Callable[[Any], list[str]] | None = None
    work: Path | None = None
    memory_mib: float | None = None


@dataclass(frozen=True)
class PassResult:
    """The model to go on with, what was decided for each layer, and what the report should say.

    `measured`: layer -> named numbers (sqnr_db, sensitivity, ...) for the report's layer table.
    """

    model: Any
    decisions: tuple[LayerDecision, ...] = ()
    notes: tuple[Note, ...] = ()
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
