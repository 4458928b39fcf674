"""What a pass is given at its stage: what it learns from, what it measures with, what holds it to the gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from torch import nn

from compress.context import Feeds, PassContext, TrainSet
from compress.models.load import TorchModel
from compress.passes.distill_student import Student
from compress.prune.latency import keep_form
from compress.quantize.latency import Stopwatch

Form = Callable[[ir.Model], ir.Model]
TimeModules = Callable[[Sequence[nn.Module], Form], Sequence[float]]


@dataclass(frozen=True)
class Timing:
    """How a pass measures speed on the target.

    `time_modules`: exports torch modules that take the model's inputs, writes their graphs as a form says, and times
    them against each other: milliseconds of each (median, one sample); None where the target does not run here.
    `in_int8`: the form of graphs whose layers are in eight bits, as the target gets them. `threads`: of what is timed.
    `file_of`: the file, there or not, that keeps what was measured on this machine for a key of JSON values; None:
    nothing is kept.
    """

    time_modules: TimeModules | None = None
    in_int8: Form = keep_form
    threads: int = 1
    file_of: Callable[[Sequence[object]], Path] | None = None


@dataclass(frozen=True)
class GraphTiming:
    """How a pass over the graph measures speed on the target.

    `stopwatch`: times graphs there. `feeds`: the batches that the result will be timed on. `machine`: the processor.
    `file_of`: the file, there or not, that keeps what was measured or chosen for a key of JSON values. `call`: what a
    choice depends on beside the graph, as JSON values: threads, batch size, length of a text.
    """

    stopwatch: Stopwatch
    feeds: Sequence[Feeds]
    machine: str
    file_of: Callable[[Sequence[object]], Path]
    call: Sequence[object]


@dataclass(frozen=True)
class TrainingContext(PassContext):
    """What a pass that may learn is given.

    `train`: the training set; None when the recipe has none. `teacher`: loads the model as it came, before all passes;
    None where there is no torch model.
    """

    train: TrainSet | None = None
    teacher: Callable[[], TorchModel] | None = None


@dataclass(frozen=True)
class ModelContext(TrainingContext):
    """What a pass over the whole torch module is given.

    `student`: makes what a pass puts in the given model's place, of its `Student` record and a seed; None where there
    is no torch model.
    """

    student: Callable[[Student, int], TorchModel] | None = None
    timing: Timing = Timing()


@dataclass(frozen=True)
class GraphContext(TrainingContext):
    """What a pass over the ONNX graph is given.

    `shortfalls`: given a graph, the quality gates of the recipe that it does not hold, as sentences (empty: all hold);
    None when the recipe has no quality gate to hold. `timing`: how speed is measured; None where nothing is timed.
    """

    shortfalls: Callable[[ir.Model], list[str]] | None = None
    timing: GraphTiming | None = None
