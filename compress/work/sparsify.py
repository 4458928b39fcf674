"""The work of the `sparsify` pass: each block's forward stops before each input group while its layers become
sparse."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from compress.blocks.block import BlockWork
from compress.blocks.layers import is_hf_conv1d, weight_shape
from compress.blocks.sharing import sum_over_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import InputGroup, LayerFacts, Note
from compress.passes.sparsify import CONVOLUTIONS, Sparsify
from compress.pruning.masks import choose_zeros, refit, wanda_scores
from compress.pruning.matrix import as_matrices, as_weight, groups_of, visit_inputs
from compress.pruning.sparsegpt import sparsegpt
from compress.rounding.gptq import Hessian, factor_hessian
from compress.rounding.gram import Gram, explain_no_gram, shrink_correlations
from compress.work.block_layers import block_facts

JUDGED_ROWS = 128
"""Of each group of a weight, evenly spaced: the outputs on which the error is measured."""
T = TypeVar("T")


def apply_sparsify(config: Sparsify, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    """Make a streamed model sparse. Raises PassError naming the layer."""
    stream = Stream(model, context, data=config.needs_calibration)
    for block in stream:
        taken, kept = config.choose_layers(block_facts(block), model.structure)
        block.say(decisions=[*map(config.decision, taken), *kept])
        sparsifying = _BlockSparsifying(config, block, taken)
        if taken and config.needs_calibration:
            visit_inputs(
                block, [layer.name for layer in taken if layer.type in CONVOLUTIONS], sparsifying.visit, sparsifying.act
            )
        sparsifying.finish()
    return stream.result()


class _BlockSparsifying:
    """Zeros for the layers of one block: Gram matrices of what each input group's groups read, while they are
    needed."""

    def __init__(self, config: Sparsify, block: BlockWork, taken: Sequence[LayerFacts]) -> None:
        self.config, self.block = config, block
        self.facts = {layer.name: layer for layer in taken}
        self.grams: dict[InputGroup, list[Gram]] = {}
        self.left = dict.fromkeys(self.facts, "no calibration data reaches it")

    def visit(self, input_group: InputGroup, rows: Tensor) -> None:
        """Add `rows` [groups, n, in] to the input group's Gram matrices."""
        if any(name in self.facts for name in input_group.layers):
            if input_group not in self.grams:
                self.grams[input_group] = [Gram(rows.shape[2], device=rows.device) for _ in rows]
            for gram, part in zip(self.grams[input_group], rows, strict=True):
                gram.add(part)

    def act(self, input_group: InputGroup) -> None:
        """Make the input group's layers sparse."""
        names = [name for name in input_group.layers if name in self.facts]
        if not names:
            return
        means = [
            gram.mean(sum_over_processes) for gram in self.grams.pop(input_group, None) or self._make_grams(names[0])
        ]
        grams = torch.stack([gram for gram, _ in means])  # [groups, in, in]
        if trouble := explain_no_gram(grams, means[0][1]):
            self.left |= dict.fromkeys(names, trouble)  # `finish` takes them by magnitude
            return
        hessians = self._factor_grams(names, means) if self.config.method == "sparsegpt" else []
        for name in names:
            weight, amount = self._matrices(name), self.config.setting(self.facts[name])
            if hessians:
                sparse = sparsegpt(weight, hessians, amount, self.config.block_size)
                damped = torch.stack([hessian.gram + hessian.added.diag() for hessian in hessians])
                sparse = refit(weight, sparse, damped)
            else:
                sparse = weight.masked_fill(choose_zeros(wanda_scores(weight, grams), amount, "row"), 0.0)
            self._replace(name, sparse)
            self._measure(name, weight, sparse, grams)
            del self.left[name]

    def finish(self) -> None:
        """Prune by magnitude: all layers with that method, else those of whose inputs nothing is known."""
        if self.config.needs_calibration:
            self._remark([f"{name}: {why}; by magnitude" for name, why in self.left.items()])
        for name in self.left:
            weight = self._matrices(name)
            self._replace(name, self._prune_by_magnitude(name, weight))

    def _make_grams(self, name: str) -> list[Gram]:
        """Return the Gram matrices of a layer that no row reached in this process."""
        width = math.prod(self.facts[name].shape[1:])
        return [Gram(width, device=self.block.part.device) for _ in range(groups_of(self.block.layers[name]))]

    def _factor_grams(self, names: Sequence[str], means: Sequence[tuple[Tensor, int]]) -> list[Hessian]:
        factor = partial(factor_hessian, damp_percent=self.config.damp_percent, act_order=False)
        told = [shrink_correlations(gram.clone(), n_rows) for gram, n_rows in means]
        return [self._name_errors(names, partial(factor, gram)) for gram in told]

    def _measure(self, name: str, weight: Tensor, sparse: Tensor, grams: Tensor) -> None:
        """Report E|(W - S) x|^2 / E|W x|^2 of what was found, and of the smallest weights set to zero."""
        stride = -(-weight.shape[1] // JUDGED_ROWS)
        changes = (weight, weight - sparse, weight - self._prune_by_magnitude(name, weight))
        energy, error, other = (_energy(change[:, ::stride], grams) for change in changes)
        energy = max(energy, 1e-30)
        self.block.say(measured={name: {"output_error": error / energy, "output_error_magnitude": other / energy}})

    def _prune_by_magnitude(self, name: str, weight: Tensor) -> Tensor:
        amount = self.config.setting(self.facts[name])
        return weight.masked_fill(choose_zeros(weight.abs(), amount, self.config.scope), 0.0)

    def _matrices(self, name: str) -> Tensor:
        return as_matrices(self.block.matrix(name), groups_of(self.block.layers[name]))

    def _replace(self, name: str, matrices: Tensor) -> None:
        """Go on with other weights [groups, out, in]."""
        layer = self.block.layers[name]
        weight = as_weight(matrices, weight_shape(layer))
        self.block.replace(f"{name}.weight", weight.t() if is_hf_conv1d(layer) else weight)
        self.block.say(measured={name: {"sparsity": float((matrices == 0).float().mean())}})

    def _remark(self, texts: Sequence[str]) -> None:
        """Add notes of level warning."""
        self.block.say(notes=[Note("warning", f"sparsify: {text}") for text in texts])

    def _name_errors(self, names: Sequence[str], do: Callable[[], T]) -> T:
        """Return `do()`; its errors get the layers' names."""
        try:
            return do()
        except ValueError as error:
            raise PassError(f"sparsify: {', '.join(names)}: {error}") from error


def _energy(weight: Tensor, grams: Tensor) -> float:
    """Return E|W x|^2, summed over groups; `weight` [groups, out, in], `grams` [groups, in, in]."""
    return float(((weight @ grams) * weight).sum(dtype=torch.float64))
