"""The work of `qat` for weights alone: where rounding begins, training through it, the integers that come of it.

A rounded weight is trained in units of its scales (`ScaledWeight`): one rate in levels then fits all layers and bits.
In 2 bits, on a small decoder, 200 steps so came to 3.564 nats per token, and with `LearnedWeight` to 3.570.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.layers import is_hf_conv1d, is_layer
from compress.blocks.rounded import Rounded
from compress.blocks.tables import layer_facts
from compress.context import PassResult
from compress.distill.train import TrainOptions, train
from compress.distill.training_log import TrainLog
from compress.distill.watch import module_names
from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, Note
from compress.formats.schemes import Scheme
from compress.models.load import TorchModel
from compress.passes.qat import Qat
from compress.rounding.fake import ScaledWeight
from compress.work.block_layers import nearest
from compress.work.contexts import ModelContext
from compress.work.training import (
    describe_kept_steps,
    describe_training,
    gather_numbers,
    make_dataset,
    objective,
    teacher_module,
    training_set,
    zero_keeper,
)

NAME = "qat"
ROUNDING_RATE = 0.012
"""How far one step moves a weight at most, in levels; a scale half as far, as a part of it. tinystories656k in 2 bits
has 3.596, 3.556, 3.536 and 3.562 nats per token after 200 steps of 0.003, 0.006, 0.012 and 0.024; after 1,200 of 0.006
and 0.012 it has 3.498 and 3.496."""


@dataclass(frozen=True)
class Trained:
    """Layers that are trained rounded, by name."""

    layers: Mapping[str, nn.Module]
    facts: Mapping[str, LayerFacts]
    schemes: Mapping[str, Scheme]
    weights: Mapping[str, ScaledWeight]


def apply_qat_weights(config: Qat, loaded: TorchModel, context: ModelContext) -> PassResult[TorchModel]:
    """Train `loaded.module` in place; it is left with what its integers stand for.

    PassError: no training set, no teacher, other outputs than its, a weight that cannot be rounded, a loss that breaks.
    """
    trainset, student = training_set(NAME, context), loaded.module
    teacher = teacher_module(NAME, context, loaded) if config.needs_teacher(loaded.task) else None
    trained, kept = _round_layers(config, student, context)
    with objective(config, loaded, student, teacher, trainset, context) as goal, rounding(student, trained):
        pupil = nn.ModuleDict(
            {
                "student": student,
                "weights": nn.ModuleDict({_key(name): weight for name, weight in trained.weights.items()}),
                "projections": goal.projections,
            }
        )
        # all learn but the float weights of the rounded layers, in whose place others do
        student.requires_grad_(True)
        for name, layer in trained.layers.items():
            _weight_of(layer).requires_grad_(False)
            trained.weights[name].growth.requires_grad_(True)
            zeros = _matrix(layer) == 0  # all of them: few of a pass that spared this layer, too
            zeros = zeros.reshape(trained.weights[name].quantized.shape)
            trained.weights[name].zero_mask = zeros if bool(zeros.any()) else None
        dataset = make_dataset(config, trainset, loaded, goal.loss)
        # the gradient of a weight that is counted in levels is as much smaller as its scale is
        schedule = replace(config.make_schedule(trainset.n, context.seed), epsilon=1e-12)
        log = train(pupil, dataset, schedule, _make_callbacks(config, student, trained, context))
    student.requires_grad_(False)
    return _make_result(config, loaded, trained, kept, log, goal.notes, context)


def _round_layers(config: Qat, student: nn.Module, context: ModelContext) -> tuple[Trained, list[LayerDecision]]:
    """Round layers to the nearest with scales searched for; return them, and a decision for each of the others."""
    modules = {name: part for name, part in module_names(student).items() if is_layer(part)}
    facts, kept = config.choose_layers([layer_facts(*module) for module in modules.items()], context.target)
    layers = {layer.name: modules[layer.name] for layer in facts}
    schemes = {layer.name: config.setting(layer, context.target) for layer in facts}
    weights = {}
    for name, layer in layers.items():
        matrix = _matrix(layer).detach()
        try:
            weights[name] = ScaledWeight(nearest(matrix, schemes[name], context.target), matrix)
        except ValueError as error:
            raise PassError(f"{NAME}: {name}: {error}") from error
    return Trained(layers, {layer.name: layer for layer in facts}, schemes, weights), kept


def _key(name: str) -> str:
    return name.replace(".", "/")


def _matrix(layer: nn.Module) -> Tensor:
    """Return a layer's weight as [out, in], a view."""
    return _weight_of(layer).t() if is_hf_conv1d(layer) else _weight_of(layer)


def _weight_of(layer: nn.Module) -> nn.Parameter:
    """Return a layer's weight as the layer holds it."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


@contextmanager
def rounding(module: nn.Module, trained: Trained) -> Iterator[None]:
    """Make `module` compute with rounded weights, through which gradients flow, while the context is open."""
    held: dict[str, nn.Parameter | None] = {}

    def round_all(part: nn.Module, args: Any, kwargs: Any) -> None:
        for name, layer in trained.layers.items():
            rounded = trained.weights[name]()
            held[name] = layer._parameters["weight"]
            layer._parameters["weight"] = rounded.t() if is_hf_conv1d(layer) else rounded

    def put_back(part: nn.Module, args: Any, output: Any) -> None:
        for name, weight in held.items():
            trained.layers[name]._parameters["weight"] = weight
        held.clear()

    before = module.register_forward_pre_hook(round_all, with_kwargs=True)
    after = module.register_forward_hook(put_back, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _make_callbacks(config: Qat, student: nn.Module, trained: Trained, context: ModelContext) -> TrainOptions:
    """Return callbacks that keep positions and scales in bounds and zeros zero; rates of what is no plain parameter."""
    keep = zero_keeper(student)
    rates = {}
    for name in map(_key, trained.layers):
        rates[f"weights.{name}.position"] = ROUNDING_RATE / config.nominal_rate
        rates[f"weights.{name}.growth"] = ROUNDING_RATE / 2 / config.nominal_rate

    def after(step: int) -> None:
        keep(step)
        for weight in trained.weights.values():
            weight.confine()

    return TrainOptions(
        NAME, context.log, context.progress, context.work, rates, after_step=after, device=context.device
    )


@torch.no_grad()
def _make_result(
    config: Qat,
    loaded: TorchModel,
    trained: Trained,
    kept: list[LayerDecision],
    log: TrainLog,
    notes: tuple[Note, ...],
    context: ModelContext,
) -> PassResult[TorchModel]:
    """Return the module with what the integers stand for, the integers beside it, and what the report says."""
    rounded: dict[str, Rounded] = {}
    changed, decisions = {}, []
    for name, layer in trained.layers.items():
        weight = trained.weights[name].freeze()
        _matrix(layer).copy_(torch.from_numpy(weight.dequantize()))
        rounded[name] = Rounded(weight, trained.schemes[name])
        changed[name] = {"changed": float((weight.values != trained.weights[name].start.values).mean())}
        decision = config.decision(trained.facts[name], context.target)
        decisions.append(replace(decision, reason=f"{decision.reason}, trained for {describe_kept_steps(log)}"))
    after = replace(loaded, rounded=rounded)
    return PassResult(
        after, (*decisions, *kept), (*notes, describe_training(NAME, log)), changed | gather_numbers(NAME, log)
    )
