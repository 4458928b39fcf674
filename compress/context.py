"""What a pass is given while it works, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compress.facts import LayerDecision, Note
from compress.formats.targets import Target

Feeds = dict[str, np.ndarray]


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

    def feeds(self, rows: np.ndarray) -> Feeds:
        """Encode the model's inputs for these rows (int64), each [len(rows), ...]; texts are padded to the longest."""
        ...


@dataclass(frozen=True)
class PassContext:
    """The surroundings of one step.

    `batches`: the calibration data, encoded, in a fixed order (empty when the recipe has none); may be iterated again.
    `shortfalls`: given an ONNX graph, the quality gates of the recipe that it does not hold, as sentences (empty: all
    hold); None when the recipe has no quality gate to hold. `progress`: wraps an iterable in a progress bar. `log`: one
    line for the log. `work`: a folder that outlives a killed run, for what a pass over blocks or one that trains has
    finished; None: a temporary one. `memory_mib`: what the process may hold between two blocks; None: anything.
    `train`: the training set; None when the recipe has none. `teacher`: loads the model as it came, before all passes
    (a `LoadedModel`); None where there is no torch model. `time_modules`: exports torch modules that take the model's
    inputs and times them against each other on the target: milliseconds of each (median, one sample); None where the
    target does not run here. `student`: makes what a pass puts in the given model's place, of its `Student` record and
    a seed (a `LoadedModel`); None where there is no torch model. `threads`: of what is timed. `measurements`: the file,
    there or not, that keeps what was measured on this machine for a key of JSON values; None: nothing is kept.
    """

    batches: Sequence[Feeds]
    target: Target
    seed: int
    log: Callable[[str], None]
    progress: Callable[[Sequence[Any], str], Iterable[Any]]
    shortfalls: Callable[[Any], list[str]] | None = None
    work: Path | None = None
    memory_mib: float | None = None
    train: TrainSet | None = None
    teacher: Callable[[], Any] | None = None
    student: Callable[[Any, int], Any] | None = None
    time_modules: Callable[[Sequence[Any]], Sequence[float]] | None = None
    threads: int = 1
    measurements: Callable[[Any], Path] | None = None


@dataclass(frozen=True)
class PassResult:
    """The model to go on with, what was decided for each layer, and what the report should say.

    `measured`: layer -> named numbers (sqnr_db, sensitivity, ...) for the report's layer table. `seconds`: what the
    pass took when it was done; the step that runs it fills it in.
    """

    model: Any
    decisions: tuple[LayerDecision, ...] = ()
    notes: tuple[Note, ...] = ()
    measured: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
