"""The work of `qat` for W8A8: where int8 would begin, the graph that computes so in torch, training, what was learned.

It works on the exported graph, as `int8` does. What is trained is that graph with its rounding, so what ends in the
file is what was trained. Batch norms lie in the convolutions before them there, with the statistics that the model came
with; those that stand alone keep theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.forward import name_outputs
from compress.context import Feeds, PassResult
from compress.distill.train import TrainOptions, train
from compress.distill.training_log import TrainLog
from compress.errors import PassError
from compress.facts import LayerDecision, Note
from compress.graph.torch_graph import TorchGraph, check_operators
from compress.models.load import TorchModel
from compress.passes.qat import Qat
from compress.rounding.measure import layer_sqnr_db, list_answers, outputs_of, relative_difference
from compress.rounding.qdq import write_state
from compress.rounding.simulated import SimulatedGraph
from compress.rounding.state import GraphState
from compress.work.contexts import GraphContext
from compress.work.eight_bit import MEASURE_BATCHES, apply_eight_bit
from compress.work.settle_changes import settle_changes
from compress.work.settle_schedule import settle_schedule
from compress.work.training import (
    describe_kept_steps,
    describe_training,
    gather_numbers,
    make_dataset,
    objective,
    training_set,
    zero_keeper,
)

NAME = "qat"
PART = 0.2
"""By which `learning_rate`, as it suits a float model, is too fast for one that is nearly right already (measured on
ResNet-20: at the full rate 200 steps hardly win back what the first ones cost)."""
TOLERANCE = 1e-4
"""Of the largest output: by how much the float graph may differ in torch, as for the export."""


class GraphStudent(nn.Module):
    """A simulated graph that takes and gives tensors by the names of the torch module that it was exported from.

    `parameters`: the graph's input -> what it is called here. `names`: of the module's outputs, which are the graph's
    first ones; a decoder's caches come after them.
    """

    def __init__(self, simulated: SimulatedGraph, parameters: Mapping[str, str], names: tuple[str, ...]) -> None:
        super().__init__()
        self.simulated, self.parameters_of, self.names = simulated, dict(parameters), names

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        outputs = self.simulated(**{name: feeds[parameter] for name, parameter in self.parameters_of.items()})
        return dict(zip(self.names, outputs.values(), strict=False))


class GraphTeacher(nn.Module):
    """The torch module, which is fed with more than it takes: a graph has inputs, its caches, of its own."""

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self.wrapped, self.names = module.requires_grad_(False).eval(), frozenset(names)

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        return name_outputs(self.wrapped(**{name: feeds[name] for name in self.names}))


def apply_qat_int8(config: Qat, state: GraphState, context: GraphContext) -> PassResult[GraphState]:
    """Round as `int8` would, train, decide.

    PassError: no training set, no torch model, an operator that cannot be trained through, a loss that breaks.
    """
    if context.teacher is None:
        raise PassError(f"{NAME}: there is no torch model to train: an onnx: source has none; use int8")
    trainset, loaded = training_set(NAME, context), context.teacher()
    feeds, sample = trainset.feeds(np.arange(1)), list(islice(context.batches, MEASURE_BATCHES))
    check_in_torch(state, sample[0] if sample else feeds)
    begun = apply_eight_bit(config.int8(), state, context)
    simulated = SimulatedGraph(begun.model, context.target.variant)
    taken = loaded.parameters
    teacher = GraphTeacher(loaded.module, taken.values())
    loaded = replace(loaded, parameters={name: taken.get(name, name) for name in feeds})
    student = GraphStudent(simulated, loaded.parameters or {}, _output_names(loaded, teacher, feeds))
    config, changes = settle_changes(config, loaded, teacher, trainset, context)
    asked = teacher if config.needs_teacher(loaded.task) else None
    with objective(config, loaded, student, asked, trainset, context) as goal:
        pupil = nn.ModuleDict({"student": student, "projections": goal.projections})
        dataset_of = partial(make_dataset, trainset=trainset, loaded=loaded, loss=goal.loss)
        options = _make_callbacks(pupil, simulated, context)
        config, dataset, settled = settle_schedule(config, changes, pupil, dataset_of, options, context)
        log = train(pupil, dataset, config.make_schedule(trainset.n, context.seed), options)
    notes = (*goal.notes, *_note_not_simulated(config))
    return settled.add_to(_make_result(begun, simulated.decide(), log, notes, sample, context))


def check_in_torch(state: GraphState, feeds: Feeds) -> None:
    """Raise PassError unless torch computes the float graph as ONNX Runtime does."""
    try:
        check_operators(state.model)
    except ValueError as error:
        raise PassError(f"{NAME}: {error}; use int8, which needs no training, or train for weights alone") from error
    expected = outputs_of(state.model, [feeds])
    with torch.no_grad():
        module = TorchGraph(state.model, ())
        outputs = module(**{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()})
    got = [np.atleast_1d(outputs[name].numpy()) for name in list_answers(state.model)]
    off = max(relative_difference(one, other) for one, other in zip(expected, got, strict=True))
    if not off <= TOLERANCE:
        raise PassError(
            f"{NAME}: torch computes the exported graph otherwise than ONNX Runtime does (by {off:.1e} of the largest "
            f"output, {TOLERANCE:.0e} is allowed), so training would aim at something else; use int8"
        )


def _output_names(loaded: TorchModel, teacher: GraphTeacher, feeds: Feeds) -> tuple[str, ...]:
    names = loaded.parameters or {}
    with torch.no_grad():
        return tuple(teacher(**{names[name]: torch.from_numpy(array) for name, array in feeds.items()}))


def _note_not_simulated(config: Qat) -> tuple[Note, ...]:
    if config.precision == "float32":
        return ()
    return (Note("info", f"{NAME}: trained with products in {config.precision}; the graph's are those of integers"),)


def _make_callbacks(pupil: nn.Module, simulated: SimulatedGraph, context: GraphContext) -> TrainOptions:
    """Return callbacks by which ranges follow for a part of the run, then stay; zeros stay throughout."""
    keep = zero_keeper(simulated.graph)

    def before(step: int, done: float) -> None:
        # then ranges stay, and weights learn what fits them
        simulated.before_step(frozen=done >= 0.3)

    def after(step: int) -> None:
        simulated.after_step()
        keep(step)

    rates = _compute_rates(pupil, simulated)
    return TrainOptions(NAME, context.log, context.progress, context.work, rates, before, after, context.device)


def _compute_rates(pupil: nn.Module, simulated: SimulatedGraph) -> dict[str, float]:
    """Return each parameter's factor on the rate: a fixed part of its root mean square; of the growth of scales, of 1.

    A step then moves all of them by the same part of what they are. Folding batch norms leaves layers whose weights
    differ by orders of magnitude, and one rate for all would wreck the small ones: nothing normalises after them.
    """
    # the rate of a vector of zeros
    held = {id(p): max(float(p.detach().square().mean().sqrt()), 1e-4) for p in simulated.graph.values}
    return {name: PART * held.get(id(p), 1.0) for name, p in pupil.named_parameters()}


def _make_result(
    begun: PassResult[GraphState],
    state: GraphState,
    log: TrainLog,
    notes: tuple[Note, ...],
    sample: list[Feeds],
    context: GraphContext,
) -> PassResult[GraphState]:
    """Return what the report says: as of `int8`, measured again, and the numbers and curves of training."""
    names = [*state.integer, *state.weight_only]
    noise = layer_sqnr_db(state.model, write_state(state, context.target.variant), names, sample)
    figures = {name: {"sqnr_db": round(value, 3)} for name, value in noise.items()} | gather_numbers(NAME, log)
    decisions = tuple(_add_training(decision, describe_kept_steps(log)) for decision in begun.decisions)
    before = tuple(replace(note, text=note.text.replace("int8:", f"{NAME}:", 1)) for note in begun.notes)
    return PassResult(state, decisions, (*before, *notes, describe_training(NAME, log)), figures)


def _add_training(decision: LayerDecision, steps: str) -> LayerDecision:
    return (
        replace(decision, reason=f"{decision.reason}, trained for {steps}") if decision.action == "int8" else decision
    )
