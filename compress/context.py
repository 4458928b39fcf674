"""What a pass is given while it works, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from compress.facts import LayerDecision, Note
from compress.formats.targets import Target
from runtime.progress import Progress

Feeds = dict[str, np.ndarray]
Redraw = Callable[[np.ndarray, int], tuple[Feeds, np.ndarray | None]]
"""Rows int64 [n], a seed -> the model's inputs for these rows, drawn anew, and their labels."""
Form_co = TypeVar("Form_co", covariant=True)
"""A model in one of its three forms: `TorchModel`, `StreamedModel`, `GraphState`."""


class TrainSet(Protocol):
    """Samples to learn from, encoded when they are asked for."""

    @property
    def n(self) -> int:
        """Return the number of samples."""
        ...

    @property
    def labels(self) -> np.ndarray | None:
        """Return int64 [n] classes or float64 [n] scores; None where the set has none."""
        ...

    @property
    def redraw(self) -> Redraw | None:
        """Return what draws samples anew, of a set that a program holds and that draws at random; None for others."""
        ...

    def feeds(self, rows: np.ndarray) -> Feeds:
        """Encode the model's inputs for these rows (int64), each [len(rows), ...]; texts are padded to the longest."""
        ...

    def loss_masks(self, rows: np.ndarray) -> np.ndarray | None:
        """Return which of these rows' tokens are learned, int64 [len(rows), longest]; None: all of every row."""
        ...


@dataclass(frozen=True)
class PassContext:
    """What every pass is given beside its model; `compress.work.contexts` has what some stages are given more.

    `batches`: the calibration data, encoded, in a fixed order (empty when the recipe has none); may be iterated again.
    `log`: one line for the log. `progress`: wraps an iterable in a progress bar. `work`: a folder that outlives a
    killed run, for what a pass over blocks or one that trains has finished; None: a temporary one. `memory_mib`: what
    the process may hold between two blocks; None: anything. `device`: "cpu" or "cuda:n", where a pass over blocks
    computes (see `compress.blocks.device`). `rows`: tokens that go through a block at once, after a device's memory was
    full; None: as many as usual. `loss_masks`: which tokens of each sample of `batches` count, bool [t] each (of a chat
    the assistant's); None: all.
    """

    batches: Sequence[Feeds]
    target: Target
    seed: int
    log: Callable[[str], None]
    progress: Progress
    work: Path | None = None
    memory_mib: float | None = None
    device: str = "cpu"
    rows: int | None = None
    loss_masks: Sequence[np.ndarray] | None = None


@dataclass(frozen=True)
class PassResult(Generic[Form_co]):
    """The model to go on with, what was decided for each layer, and what the report should say.

    `measured`: layer -> named numbers (sqnr_db, sensitivity, ...) for the report's layer table. `seconds`: what the
    pass took when it was done, `peak_memory_bytes` the most that the process held meanwhile, None where the system does
    not say; whoever runs it fills them in. `choice`: what a measurement of time decided, as JSON values that the lock
    keeps, with the name of the cache's file that holds it (`key`); {}: none did. `settled`: the pass's fields that the
    recipe left to it (`auto`), with what it took, as JSON values.
    """

    model: Form_co
    decisions: tuple[LayerDecision, ...] = ()
    notes: tuple[Note, ...] = ()
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    choice: dict[str, Any] = field(default_factory=dict)
    settled: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
