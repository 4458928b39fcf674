"""What a pass is given at its stage: what it learns from, what it measures with, what holds it to the gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from torch import nn

from compress.context import Feeds, PassContext, TrainSet
from compress.facts import FLOAT_BYTES
from compress.formats.schemes import Scheme
from compress.models.load import TorchModel
from compress.passes.distill_student import Student
from compress.pruning.latency import keep_form
from compress.rounding.latency import StateTimer
from compress.rounding.state import GraphState
from compress.timing.clock import Clock

Form = Callable[[ir.Model], ir.Model]
TIMING_BUDGET_S = 10.0
"""Seconds for the calls of graphs that are timed against each other."""


@dataclass(frozen=True)
class Timing:
    """How a pass over the whole module measures speed on the target: `export` gives the graph of a module.

    `feeds`: the calls that are timed. `in_int8`: the form of graphs whose layers are in eight bits, as the target gets
    them.
    """

    clock: Clock
    export: Callable[[nn.Module], ir.Model]
    feeds: Sequence[Feeds]
    in_int8: Form = keep_form

    def time(self, graphs: Sequence[ir.Model]) -> list[float]:
        """Return the milliseconds of a call of each graph."""
        return self.clock.time(graphs, self.feeds, TIMING_BUDGET_S)


LayerSchemes = Mapping[str, Scheme]
"""Layer -> how its weight is stored."""


@dataclass(frozen=True)
class WeightTrials:
    """How a pass over blocks tries what schemes of weights come to on the target.

    `count_bytes`: choices of schemes -> bytes of the float file, and of that of each choice; None where neither an ONNX
    nor a GGUF file is written. `time`: likewise milliseconds of a call (of a decoder: of a further token), timed in
    turn. `time_layers`: layer -> schemes to milliseconds of each layer alone, of those that could be timed. Both None
    where the target does not run here. `float_bytes`: of a number in the source's files.
    """

    count_bytes: Callable[[Sequence[LayerSchemes]], Sequence[int]] | None = None
    time: Callable[[Sequence[LayerSchemes]], Sequence[float]] | None = None
    time_layers: Callable[[Mapping[str, Sequence[Scheme]]], Mapping[str, Sequence[float]]] | None = None
    float_bytes: int = FLOAT_BYTES


@dataclass(frozen=True)
class BlockContext(PassContext):
    """What a pass over blocks is given. `trials`: how it tries what schemes come to.

    `writes_text`: the model predicts each next token of the texts that it reads. `nats_allowed`: that a token may lose
    by the recipe's gates; None: no gate is on nats. `importance`: layer -> mean square of each of its inputs [in], by
    the file that the pass names.
    """

    trials: WeightTrials = WeightTrials()
    writes_text: bool = False
    nats_allowed: float | None = None
    importance: Mapping[str, np.ndarray] = field(default_factory=dict)


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
    timing: Timing | None = None


@dataclass(frozen=True)
class GraphContext(TrainingContext):
    """What a pass over the ONNX graph is given.

    `shortfalls`: given a graph, the quality gates of the recipe that it does not hold, each with its sentence; None
    when the recipe has no quality gate to hold. `score`: given a graph, the task's main metric over the evaluation
    set, turned so that more is better; None where there is none. `write`: gives the file of a state, as the target gets
    it. `timing`: how speed is measured; None where nothing is timed.
    """

    shortfalls: Callable[[ir.Model], dict[str, str]] | None = None
    score: Callable[[ir.Model], float] | None = None
    write: Callable[[GraphState], ir.Model] | None = None
    timing: StateTimer | None = None
