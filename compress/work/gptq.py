"""Work the `gptq` pass: gather what each group of layers reads, then round it; on an ONNX graph or a torch model.

A torch model's block stops its forward before each input group while what reads it is rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compress.blocks.block import BlockWork
from compress.blocks.sharing import sum_over_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import InputGroup, LayerDecision, LayerFacts, Note
from compress.formats.schemes import Scheme
from compress.formats.targets import Target
from compress.graph.edit import initializer
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import clone
from compress.passes.choosing import list_some
from compress.passes.gptq import Gptq
from compress.rounding.gptq import GptqRules, Hessian, RoundedWeight, factor_hessian
from compress.rounding.gram import Gram, explain_no_gram, gram_matrix, shrink_correlations
from compress.rounding.quantized_weight import ROWS, QuantizedWeight
from compress.rounding.smooth import input_groups
from compress.rounding.state import GraphState
from compress.rounding.weights import gptq_round_weights
from compress.work.block_layers import (
    BlockLayers,
    InputRanges,
    block_layers,
    find_shared,
    leave_unscaled,
    matrix,
    may_be_negative,
    name_errors,
    nearest,
    put_layer,
    remark,
    round_tables,
    weigh_both_uses,
)
from compress.work.mixed_bits import settle_bits
from compress.work.settle_compute import settle_compute

UNREAD = "no calibration data reaches it"


def apply_gptq(
    config: Gptq, model: GraphState | StreamedModel, context: PassContext
) -> PassResult[GraphState | StreamedModel]:
    if isinstance(model, GraphState):
        return _round_graph(config, model, context)
    config, computing = settle_compute(config, model, context)
    make_rounding = partial(_make_rounding, config, context.target)
    config, bits = settle_bits(config, model, context, make_rounding, _round_layers, config.products)
    return computing.then(bits).add_to(_round_layers(config, model, context))


def _round_graph(config: Gptq, state: GraphState, context: PassContext) -> PassResult[GraphState]:
    taken, kept = config.graph_layers(state, context.target)
    facts = {layer.name: layer for layer in taken}
    working = clone(state.model)
    groups = input_groups([layer for layer in find_layers(working) if layer.name in facts])
    weights: dict[str, QuantizedWeight] = {}
    measured: dict[str, dict[str, float]] = {}
    notes: list[Note] = []
    for tensor in context.progress(list(groups), "gptq: rounding"):
        with name_errors("gptq", [layer.name for layer in groups[tensor]]):
            gram, n_rows = gram_matrix(working, tensor, context.batches, torch.device(context.device))
            trouble = explain_no_gram(gram, n_rows)
            gram = shrink_correlations(gram, n_rows)
            hessian = None if trouble else factor_hessian(gram, config.damp_percent, config.actorder)
        notes += _make_notes(config, groups[tensor], hessian, trouble)
        for layer in groups[tensor]:
            rounded = _round(config, layer, facts[layer.name], hessian, context)
            if isinstance(rounded, RoundedWeight):
                measured[layer.name] = {"output_error": rounded.error, "output_error_rtn": rounded.nearest_error}
                rounded = rounded.weight
            weights[layer.name] = rounded
            _put_back(working, layer, rounded)
    state = replace(state, weight_only=[*state.weight_only, *weights], weights={**state.weights, **weights})
    decisions = [config.decision(layer, context.target) for layer in taken]
    return PassResult(state, (*decisions, *kept), tuple(notes), measured)


def _round(
    config: Gptq, layer: GraphLayer, facts: LayerFacts, hessian: Hessian | None, context: PassContext
) -> RoundedWeight | QuantizedWeight:
    """Round a layer's weight; without a Hessian to the nearest."""
    scheme = config.setting(facts, context.target)
    weight = torch.from_numpy(layer.matrix().copy()).to(context.device)
    try:
        if hessian is None:
            return nearest(weight, scheme, context.target)
        return gptq_round_weights([weight], hessian, scheme.weights, _gptq_rules(config, scheme, context.target))[0]
    except ValueError as problem:
        raise PassError(f"gptq: {layer.name}: {problem}") from problem


def _put_back(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Let the layers after this one see it as it will be."""
    matrix = weight.dequantize()
    values = np.ascontiguousarray(matrix.T if layer.axis == 1 else matrix)
    layer.node.replace_input_with(layer.weight_input, initializer(model, f"{layer.name}/rounded", values))


def _make_notes(config: Gptq, group: list[GraphLayer], hessian: Hessian | None, trouble: str) -> list[Note]:
    names = [layer.name for layer in group]
    remarks = [f"gptq: {name}: {trouble}; rounded to the nearest" for name in names if hessian is None]
    if hessian is not None:
        remarks = _remark_dead(names, hessian)
    return [Note("warning", text) for text in remarks]


def _round_layers(config: Gptq, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    stream = Stream(model, context, compute=config.products, tables=config.takes_tables)
    for block in stream:
        rounding = _BlockRounding(config, block, block_layers(config, block, context.target), context.target)
        if rounding.layers.schemes:
            block.lockstep(rounding.visit, rounding.act)
        round_tables(config, block, rounding.layers, context.target)
        rounding.finish()
    return stream.result()


def _make_rounding(config: Gptq, target: Target, gram: Tensor) -> Callable[[Tensor, Scheme], QuantizedWeight]:
    """Return how rows of weights are rounded that read inputs of this Gram matrix."""
    hessian = factor_hessian(gram, config.damp_percent, config.actorder)

    def round_rows(rows: Tensor, scheme: Scheme) -> QuantizedWeight:
        rules = _gptq_rules(config, scheme, target)
        return gptq_round_weights([rows], hessian, scheme.weights, rules)[0].weight

    return round_rows


def _gptq_rules(config: Gptq, scheme: Scheme, target: Target) -> GptqRules:
    return GptqRules(may_be_negative(scheme, target), block=config.block_size, compute=config.products)


def _remark_dead(layers: Sequence[str], hessian: Hessian) -> list[str]:
    """Return what the user should know of the inputs that `layers` read."""
    n_dead, n = int(hessian.dead.sum()), len(hessian.dead)
    return [f"gptq: {', '.join(layers)}: {n_dead} of {n} inputs were zero on all calibration data"] if n_dead else []


def _name_mixture(layer: str) -> str:
    """Return what layers of the same name in all experts of a mixture are called: experts.*.gate_proj."""
    return re.sub(r"\.\d+(\.\D*)$", r".*\1", layer)


class _BlockRounding:
    """One block: a Gram matrix for each input group while it is needed, and what is to be said."""

    def __init__(self, config: Gptq, block: BlockWork, layers: BlockLayers, target: Target) -> None:
        self.config, self.block, self.layers, self.target = config, block, layers, target
        self.grams: dict[InputGroup, Gram] = {}
        self.inputs = InputRanges.of(layers.schemes)
        self.left = dict.fromkeys(layers.schemes, UNREAD)
        self.first = {layers[0] for layers in block.experts}
        self.mixtures: dict[str, tuple[Tensor, int]] = {}
        """What the experts of a mixture read together: X^T X, and the number of rows."""

    def visit(self, input_group: InputGroup, rows: Tensor) -> None:
        names = self.layers.of(input_group.layers)
        if names:
            if input_group not in self.grams:
                self.grams[input_group] = Gram(rows.shape[1], self.config.products, rows.device)
            self.grams[input_group].add(rows)
            self.inputs.see(names, rows)

    def act(self, input_group: InputGroup) -> None:
        """Round the input group's layers, those of one scheme together."""
        names = self.layers.of(input_group.layers)
        if not names:
            return
        width = self.layers.facts[names[0]].shape[1]
        seen = self.grams.pop(input_group, None) or Gram(width, self.config.products, self.block.part.device)
        gram, n_rows = seen.mean(sum_over_processes)
        if trouble := explain_no_gram(gram, n_rows):
            self.left |= dict.fromkeys(names, trouble)  # `finish` rounds them to the nearest
            return
        if input_group.layers[0] in self.first:
            mixture = _name_mixture(input_group.layers[0])
            total, n = self.mixtures.get(mixture, (torch.zeros_like(gram), 0))
            self.mixtures[mixture] = (total + gram * n_rows, n + n_rows)
        gram = shrink_correlations(gram, n_rows)
        names = leave_unscaled(self.config, self.block, self.layers, self.inputs, names)
        for shared in (False, True):  # a weight that is a table, too, is weighed by both of its uses
            alike = [name for name in names if (name in self.layers.sharers) == shared]
            if alike:
                self._round(alike, weigh_both_uses(gram) if shared else gram)

    def _round(self, names: list[str], gram: Tensor) -> None:
        """Round layers that read inputs of one Gram matrix, those of one scheme together, tall ones alone."""
        with name_errors("gptq", names):
            hessian = factor_hessian(gram, self.config.damp_percent, self.config.actorder)
        remark(self.block, _remark_dead(names, hessian))
        by_scheme: dict[Scheme, list[str]] = {}
        for name in names:
            by_scheme.setdefault(self.layers.schemes[name], []).append(name)
        for scheme, members in by_scheme.items():
            tall = [name for name in members if self.layers.facts[name].shape[0] > ROWS]
            rules = _gptq_rules(self.config, scheme, self.target)
            for group in filter(None, (*([name] for name in tall), [name for name in members if name not in tall])):
                weights = [matrix(self.config, self.block, name) for name in group]
                with name_errors("gptq", group):
                    all_rounded = gptq_round_weights(weights, hessian, scheme.weights, rules)
                for name, rounded in zip(group, all_rounded, strict=True):
                    put_layer(self.block, self.layers, name, rounded.weight, self.inputs.scale(name))
                    errors = {"output_error": rounded.error, "output_error_rtn": rounded.nearest_error}
                    self.block.say(measured={name: errors})
                    del self.left[name]

    def finish(self) -> None:
        """Round experts that no token chose, and layers whose inputs are broken; leave others that nothing reached."""
        config, block, target = self.config, self.block, self.target
        scaled = leave_unscaled(config, block, self.layers, self.inputs, self.layers.of(list(self.left)))
        unread = {name for name in scaled if self.left[name] == UNREAD}
        starved = [layers for layers in block.experts if unread.issuperset(layers)]
        floats = [name for name in scaled if name in unread and not any(name in layers for layers in starved)]
        self._round_like_siblings(starved)
        left = [name for name in scaled if name in self.left and name not in floats]
        texts = [f"gptq: {name}: {self.left[name]}; rounded to the nearest" for name in left if name not in unread]
        texts += [f"gptq: {', '.join(floats)}: no calibration data reaches what stays float"] if floats else []
        kept = [LayerDecision(name, self.layers.facts[name].type, "kept", UNREAD) for name in floats]
        facts = [layer for name, layer in self.layers.facts.items() if name not in floats]
        remark(block, [*texts, *(text for layer in facts if (text := config.fit_remark(layer, target)))])
        shared = find_shared(config, block, {name: self.layers.schemes[name] for name in left})
        for name in left:
            scheme = self.layers.schemes[name]
            weight = nearest(matrix(config, block, name), scheme, target, shared=shared.get(name))
            put_layer(block, self.layers, name, weight, self.inputs.scale(name))
        block.say(decisions=[*(config.decision(layer, target) for layer in facts), *self.layers.kept, *kept])

    def _round_like_siblings(self, starved: Sequence[Sequence[str]]) -> None:
        """Round what experts that no token chose read by what the mixture's others read, and say which these are.

        Their last layers, whose inputs are their own, are left to be rounded to the nearest.
        """
        first = {layers[0] for layers in starved}
        for group in (group for group in self.block.input_groups if group.layers[0] in first):
            total, n = self.mixtures.get(_name_mixture(group.layers[0]), (None, 0))
            if total is not None:
                self._round(self.layers.of(group.layers), shrink_correlations(total / n, n))
        if starved:
            experts = list_some([layers[0].rpartition(".")[0] for layers in starved])
            text = f"no calibration token reaches {len(starved)} of {len(self.block.experts)} experts ({experts})"
            remark(self.block, [f"gptq: {text}: rounded by what the others read, their last layers to the nearest"])
