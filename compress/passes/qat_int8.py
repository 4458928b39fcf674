"""The steps of `qat` for W8A8: where int8 would begin, the graph that computes so in torch, training, what was learned.

It works on the exported graph, as `int8` does. What is trained is that graph with its rounding, so what ends in the
file is what was trained. Batch norms lie in the convolutions before them there, with the statistics that the model came
with; those that stand alone keep theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.sharing import summed
from compress.blocks.trace import named_outputs
from compress.context import Feeds, PassContext, PassResult
from compress.distill.train import Around, Lessons, train
from compress.distill.training_log import TrainLog
from compress.errors import PassError
from compress.facts import LayerDecision, Note
from compress.graph.torch_graph import TorchGraph, check_operators
from compress.passes.eight_bit_steps import MEASURE_BATCHES, apply_eight_bit
from compress.passes.loss_steps import batches_of, objective, training_set
from compress.passes.qat import Qat
from compress.passes.training_steps import kept_steps, measured, no_keeper, told, zero_keeper
from compress.quantize.measure import layer_sqnr_db, outputs_of
from compress.quantize.qdq import write_state
from compress.quantize.simulated import SimulatedGraph
from compress.quantize.state import GraphState

if TYPE_CHECKING:
    from compress.models.load import LoadedModel

NAME = "qat"
PART = 0.2
"""By which `learning_rate`, as it suits a float model, is too fast for one that is nearly right already (measured on
ResNet-20: at the full rate 200 steps hardly win back what the first ones cost)."""
LEAST_RATE = 1e-4
"""Of a vector of zeros."""
TOLERANCE = 1e-4
"""Of the largest output: by how much the float graph may differ in torch, as for the export."""


class Student(nn.Module):
    """A simulated graph that takes and gives tensors by the names of the torch module that it was exported from.

    `parameters`: the graph's input -> what it is called here. `names`: of the module's outputs, which are the graph's
    first ones; a decoder's caches come after them.
    """

    def __init__(self, simulated: SimulatedGraph, parameters: Mapping[str, str], names: tuple[str, ...]) -> None:
        super().__init__()
        self.simulated, self.parameters_of, self.names = simulated, dict(parameters), names

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        found = self.simulated(**{name: feeds[parameter] for name, parameter in self.parameters_of.items()})
        return dict(zip(self.names, found.values(), strict=False))


class Teacher(nn.Module):
    """The torch module, which is fed with more than it takes: a graph has inputs, its caches, of its own."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self.wrapped, self.names = module.requires_grad_(False).eval(), frozenset(names)

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        return named_outputs(self.wrapped(**{name: feeds[name] for name in self.names}))


def apply_qat_int8(knobs: Qat, state: GraphState, context: PassContext) -> PassResult:
    """Round as `int8` would, train, decide. PassError: no training set, no torch model, an operator that cannot be
    trained through, a loss that breaks."""
    trainset, loaded = training_set(NAME, context), _as_it_came(context)
    feeds, sample = trainset.feeds(np.arange(1)), list(islice(context.batches, MEASURE_BATCHES))
    check_in_torch(state, sample[0] if sample else feeds)
    begun = apply_eight_bit(knobs.int8(), state, context)
    simulated = SimulatedGraph(begun.model, context.target.flavour, knobs.learn_scales)
    loaded, teacher = _fed_as_the_graph(loaded, feeds)
    student = Student(simulated, loaded.parameters or {}, _output_names(loaded, teacher, feeds))
    course = knobs.course(trainset.n, context.seed)
    with objective(knobs, loaded, student, teacher if knobs.teacher else None, trainset, context) as goal:
        pupil = nn.ModuleDict({"student": student, "projections": goal.projections})
        lessons = Lessons(trainset.n, batches_of(knobs, trainset, loaded), goal.loss)
        log = train(pupil, lessons, course, _around(knobs, pupil, simulated, context))
    return _result(begun, simulated.decided(), log, (*goal.notes, *_not_simulated(knobs)), sample, context)


def check_in_torch(state: GraphState, feeds: Feeds) -> None:
    """PassError unless torch computes the float graph as ONNX Runtime does."""
    try:
        check_operators(state.model)
    except ValueError as error:
        raise PassError(f"{NAME}: {error}; use int8, which needs no training, or train for weights alone") from error
    (expected,) = outputs_of(state.model, [feeds])
    with torch.no_grad():
        module = TorchGraph(state.model, ())
        found = module(**{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()})
    got = next(iter(found.values())).numpy()
    off = float(np.abs(got - expected).max(initial=0.0)) / max(float(np.abs(expected).max(initial=0.0)), 1e-12)
    if not off <= TOLERANCE:
        raise PassError(
            f"{NAME}: torch computes the exported graph otherwise than ONNX Runtime does (by {off:.1e} of the largest "
            f"output, {TOLERANCE:.0e} is allowed), so training would aim at something else; use int8"
        )


def _as_it_came(context: PassContext) -> LoadedModel:
    """The torch model before all passes: who teaches, and whose inputs the samples are made for."""
    if context.teacher is None:
        raise PassError(f"{NAME}: there is no torch model to train: an onnx: source has none; use int8")
    loaded: LoadedModel = context.teacher()
    return loaded


def _fed_as_the_graph(loaded: LoadedModel, feeds: Feeds) -> tuple[LoadedModel, Teacher]:
    """The model with all of the graph's inputs, each under the name of forward's parameter where it has one."""
    assert loaded.module is not None and loaded.parameters is not None
    taken = loaded.parameters
    return replace(loaded, parameters={name: taken.get(name, name) for name in feeds}), Teacher(
        loaded.module, taken.values()
    )


def _output_names(loaded: LoadedModel, teacher: Teacher, feeds: Feeds) -> tuple[str, ...]:
    names = loaded.parameters or {}
    with torch.no_grad():
        return tuple(teacher(**{names[name]: torch.from_numpy(array) for name, array in feeds.items()}))


def _not_simulated(knobs: Qat) -> tuple[Note, ...]:
    if knobs.precision == "float32":
        return ()
    return (Note("info", f"{NAME}: trained with products in {knobs.precision}; the graph's are those of integers"),)


def _around(knobs: Qat, pupil: nn.Module, simulated: SimulatedGraph, context: PassContext) -> Around:
    """Ranges follow for a part of the run, then stay; zeros stay throughout."""
    keep = zero_keeper(simulated.graph) if knobs.keep_zeros else no_keeper

    def before(step: int, done: float) -> None:
        simulated.before_step(frozen=done >= knobs.freeze_observers)

    def after(step: int) -> None:
        simulated.after_step(summed)
        keep(step)

    return Around(NAME, context.log, context.progress, context.work, _rates(pupil, simulated), before, after)


def _rates(pupil: nn.Module, simulated: SimulatedGraph) -> dict[str, float]:
    """Each parameter's factor on the rate: a fixed part of its root mean square; of the growth of scales, of 1.

    A step then moves all of them by the same part of what they are. Folding batch norms leaves layers whose weights
    differ by orders of magnitude, and one rate for all would wreck the small ones: nothing normalises after them.
    """
    held = {id(p): max(float(p.detach().square().mean().sqrt()), LEAST_RATE) for p in simulated.graph.values}
    return {name: PART * held.get(id(p), 1.0) for name, p in pupil.named_parameters()}


def _result(
    begun: PassResult,
    state: GraphState,
    log: TrainLog,
    notes: tuple[Note, ...],
    sample: list[Feeds],
    context: PassContext,
) -> PassResult:
    """What the report says: as of `int8`, measured again, and the numbers and curves of training."""
    names = [*state.integer, *state.weight_only]
    noise = layer_sqnr_db(state.model, write_state(state, context.target.flavour), names, sample)
    found = {name: {"sqnr_db": round(value, 3)} for name, value in noise.items()} | measured(NAME, log)
    decisions = tuple(_trained(decision, kept_steps(log)) for decision in begun.decisions)
    before = tuple(replace(note, text=note.text.replace("int8:", f"{NAME}:", 1)) for note in begun.notes)
    return PassResult(state, decisions, (*before, *notes, told(NAME, log)), found)


def _trained(decision: LayerDecision, steps: str) -> LayerDecision:
    return (
        replace(decision, reason=f"{decision.reason}, trained for {steps}") if decision.action == "int8" else decision
    )
