"""What a pass is given at its stage: what it learns from, what it measures with, what holds it to the gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx_ir as ir
from torch import nn

from compress.context import Feeds, PassContext, TrainSet
from compress.facts import FLOAT_BYTES
from compress.formats.schemes import Scheme
from compress.models.load import TorchModel
from compress.passes.distill_student import Student
from compress.prune.latency import keep_form
from compress.quantize.latency import Stopwatch
from compress.quantize.state import GraphState

Form = Callable[[ir.Model], ir.Model]


class ModuleTimer(Protocol):
    """Times torch modules that take the model's inputs as the target runs them: exported. Raises what that raises."""

    def export(self, module: nn.Module, form: Form) -> Path:
        """Write a module's graph as the form says; the file stays until the timer is closed."""
        ...

    def time(self, graphs: Sequence[Path]) -> Sequence[float]:
        """Time graphs against each other: milliseconds of each (median, one sample)."""
        ...


@dataclass(frozen=True)
class Timing:
    """How a pass measures speed on the target.

    `open_timer`: what times exported modules; None where the target does not run here.
    `in_int8`: the form of graphs whose layers are in eight bits, as the target gets them. `threads`: of what is timed.
    `file_of`: the file, there or not, that keeps what was measured on this machine for a key of JSON values; None:
    nothing is kept.
    """

    open_timer: Callable[[], AbstractContextManager[ModuleTimer]] | None = None
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


LayerSchemes = Mapping[str, Scheme]
"""Layer -> how its weight is stored."""


@dataclass(frozen=True)
class WeightTrials:
    """How a pass over blocks tries what schemes of weights come to on the target.

    `count_bytes`: choices of schemes -> bytes of the float file, and of that of each choice; None where no ONNX file is
    written. `time`: likewise milliseconds of a call (of a decoder: of a further token), timed in turn. `time_layers`:
    layer -> schemes to milliseconds of each layer alone, of those that could be timed. Both None where the target does
    not run here. `float_bytes`: of a number in the source's files.
    """

    count_bytes: Callable[[Sequence[LayerSchemes]], Sequence[int]] | None = None
    time: Callable[[Sequence[LayerSchemes]], Sequence[float]] | None = None
    time_layers: Callable[[Mapping[str, Sequence[Scheme]]], Mapping[str, Sequence[float]]] | None = None
    float_bytes: int = FLOAT_BYTES


@dataclass(frozen=True)
class BlockContext(PassContext):
    """What a pass over blocks is given. `trials`: how it tries what schemes come to.

    `writes_text`: the model predicts each next token of the texts that it reads.
    """

    trials: WeightTrials = WeightTrials()
    writes_text: bool = False


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
    None when the recipe has no quality gate to hold. `score`: given a graph, the task's main metric over the evaluation
    set, turned so that more is better; None where there is none. `write`: gives the file of a state, as the target gets
    it. `timing`: how speed is measured; None where nothing is timed.
    """

    shortfalls: Callable[[ir.Model], list[str]] | None = None
    score: Callable[[ir.Model], float] | None = None
    write: Callable[[GraphState], ir.Model] | None = None
    timing: GraphTiming | None = None
