"""The steps of `qat` for weights alone: where rounding begins, training through it, the integers that come of it.

A rounded weight is trained in units of its scales (`ScaledWeight`): one rate in levels then fits all layers and bits.
In 2 bits, on a small decoder, 200 steps so came to 3.564 nats per token, and with `LearnedWeight` to 3.570.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compress.blocks.rounded import Rounded
from compress.blocks.trace import is_hf_conv1d, is_layer
from compress.context import PassContext, PassResult
from compress.distill.train import Around, Lessons, train
from compress.distill.training_log import TrainLog
from compress.distill.watch import module_names
from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, Note
from compress.passes.blockwork import layer_facts, nearest
from compress.passes.loss_steps import batches_of, objective, teacher_module, training_set
from compress.passes.qat import Qat
from compress.passes.training_steps import kept_steps, measured, no_keeper, told, zero_keeper
from compress.quantize.fake import ScaledWeight
from compress.schemes import Scheme

if TYPE_CHECKING:
    from compress.models.load import LoadedModel

NAME = "qat"
EPSILON = 1e-12
"""Of Adam: the gradient of a weight that is counted in levels is as much smaller as its scale is."""


@dataclass(frozen=True)
class Trained:
    """Layers that are trained rounded, by name."""

    layers: Mapping[str, nn.Module]
    facts: Mapping[str, LayerFacts]
    schemes: Mapping[str, Scheme]
    weights: Mapping[str, ScaledWeight]


def apply_qat_weights(knobs: Qat, loaded: LoadedModel, context: PassContext) -> PassResult:
    """Train `loaded.module` in place; it is left with what its integers stand for. PassError: no training set, no
    teacher, other outputs than its, a weight that cannot be rounded, a loss that breaks."""
    trainset, student = training_set(NAME, context), loaded.module
    assert student is not None
    teacher = teacher_module(NAME, context, loaded) if knobs.teacher else None
    trained, kept = _begin(knobs, student, context)
    with objective(knobs, loaded, student, teacher, trainset, context) as goal, rounding(student, trained):
        pupil = nn.ModuleDict({"student": student, "weights": _named(trained), "projections": goal.projections})
        _let_learn(knobs, student, trained)
        lessons = Lessons(trainset.n, batches_of(knobs, trainset, loaded), goal.loss)
        course = replace(knobs.course(trainset.n, context.seed), epsilon=EPSILON)
        log = train(pupil, lessons, course, _around(knobs, student, trained, context))
    student.requires_grad_(False)
    return _result(knobs, loaded, trained, kept, log, goal.notes, context)


def _begin(knobs: Qat, student: nn.Module, context: PassContext) -> tuple[Trained, list[LayerDecision]]:
    """The layers that are rounded, to the nearest with scales searched for; a decision for each of the others."""
    modules = {name: part for name, part in module_names(student).items() if is_layer(part)}
    facts, kept = knobs.taken([layer_facts(name, part) for name, part in modules.items()])
    layers = {one.name: modules[one.name] for one in facts}
    schemes = {one.name: knobs.setting(one, context.target) for one in facts}
    weights = {}
    for name, layer in layers.items():
        matrix = _matrix(layer).detach()
        try:
            weights[name] = ScaledWeight(nearest(matrix, schemes[name], context.target), matrix)
        except ValueError as error:
            raise PassError(f"{NAME}: {name}: {error}") from error
    return Trained(layers, {one.name: one for one in facts}, schemes, weights), kept


def _let_learn(knobs: Qat, student: nn.Module, trained: Trained) -> None:
    """Gradients for all but the float weights of the rounded layers, in whose place others are learned."""
    student.requires_grad_(True)
    for name, layer in trained.layers.items():
        _own(layer).requires_grad_(False)
        trained.weights[name].growth.requires_grad_(knobs.learn_scales)
        zeros = _matrix(layer) == 0  # all of them, as the knob says: few of a pass that spared this layer, too
        kept = knobs.keep_zeros and bool(zeros.any())
        trained.weights[name].gone = zeros.reshape(trained.weights[name].levels.shape) if kept else None


def _named(trained: Trained) -> nn.ModuleDict:
    """As a module can hold them."""
    return nn.ModuleDict({_key(name): one for name, one in trained.weights.items()})


def _key(name: str) -> str:
    return name.replace(".", "/")


def _matrix(layer: nn.Module) -> Tensor:
    """Its weight as [out, in], a view."""
    return _own(layer).t() if is_hf_conv1d(layer) else _own(layer)


def _own(layer: nn.Module) -> nn.Parameter:
    """As the layer holds it."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


@contextmanager
def rounding(module: nn.Module, trained: Trained) -> Iterator[None]:
    """Inside, every forward pass of `module` computes with rounded weights, through which gradients flow."""
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


def _around(knobs: Qat, student: nn.Module, trained: Trained, context: PassContext) -> Around:
    """Positions and scales stay in bounds, zeros stay zero; rates of what is no plain parameter."""
    keep: Callable[[int], None] = zero_keeper(student) if knobs.keep_zeros else no_keeper
    rates = {}
    for name in map(_key, trained.layers):
        rates[f"weights.{name}.position"] = knobs.rounding_rate / knobs.learning_rate
        rates[f"weights.{name}.growth"] = knobs.scale_rate / knobs.learning_rate

    def after(step: int) -> None:
        keep(step)
        for one in trained.weights.values():
            one.confine()

    return Around(NAME, context.log, context.progress, context.work, rates, after_step=after)


@torch.no_grad()
def _result(
    knobs: Qat,
    loaded: LoadedModel,
    trained: Trained,
    kept: list[LayerDecision],
    log: TrainLog,
    notes: tuple[Note, ...],
    context: PassContext,
) -> PassResult:
    """The module with what the integers stand for, the integers beside it, and what the report says."""
    rounded: dict[str, Rounded] = {}
    changed, decisions = {}, []
    for name, layer in trained.layers.items():
        weight = trained.weights[name].frozen()
        _matrix(layer).copy_(torch.from_numpy(weight.dequantize()))
        rounded[name] = Rounded(weight, trained.schemes[name])
        changed[name] = {"changed": float((weight.values != trained.weights[name].start.values).mean())}
        decision = knobs.decision(trained.facts[name], context.target)
        decisions.append(replace(decision, reason=f"{decision.reason}, trained for {kept_steps(log)}"))
    after = replace(loaded, rounded=rounded)
    return PassResult(after, (*decisions, *kept), (*notes, told(NAME, log)), changed | measured(NAME, log))
