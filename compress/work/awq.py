"""The work of the `awq` pass: gather what each input group of a block reads, search and fold its scales, then round."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from compress.blocks.block import BlockWork
from compress.blocks.folding import tie_scales
from compress.blocks.sharing import gather_from_processes, sum_over_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import InputGroup
from compress.formats.schemes import ActivationScheme
from compress.formats.targets import Target
from compress.passes.awq import Awq
from compress.rounding.activations import round_inputs
from compress.rounding.awq import RoundedInputs, Scaling, search_scales
from compress.rounding.gram import Gram, explain_no_gram
from compress.rounding.products import Compute
from compress.work.block_layers import (
    BlockLayers,
    block_layers,
    find_shared,
    fold_into,
    matrix,
    may_be_negative,
    nearest,
    put_layer,
    remark,
    round_tables,
    weigh_both_uses,
)
from compress.work.settle_compute import settle_compute


def apply_awq(config: Awq, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    """Scale, and perhaps round, a streamed model. Raises PassError naming the layer."""
    config, computing = settle_compute(config, model, context)
    stream = Stream(model, context, compute=config.products, tables=config.takes_tables and config.round)
    for block in stream:
        _BlockScaling(config, block, block_layers(config, block, context.target), context.target).run()
    return computing.add_to(stream.result())


ROWS_OF_PART, MOST_PARTS = 16, 32
"""Of what an input group reads, rows of each micro-batch and micro-batches that are kept to see what rounding them
loses."""


class _Seen:
    """Of what one input group reads: the Gram matrix, the sum of magnitudes, and a few rows from all over the data."""

    def __init__(self, width: int, compute: Compute, device: torch.device) -> None:
        self.gram = Gram(width, compute, device)
        self.magnitude = torch.zeros(width, dtype=torch.float64, device=device)
        self.parts: list[Tensor] = []
        self.n_added, self.stride = 0, 1

    def add(self, rows: Tensor) -> None:
        self.gram.add(rows)
        self.magnitude += rows.abs().sum(0, dtype=torch.float64)
        if self.n_added % self.stride == 0 and len(rows):
            self.parts.append(rows[:: -(-len(rows) // ROWS_OF_PART)].float().clone())
        if len(self.parts) > MOST_PARTS:
            self.parts, self.stride = self.parts[::2], 2 * self.stride
        self.n_added += 1

    def sample(self) -> Tensor:
        """Return the rows that all processes have kept [n, in], the same in each."""
        device = self.magnitude.device
        parts = [part for parts in gather_from_processes([part.cpu() for part in self.parts]) for part in parts]
        return torch.cat([part.to(device) for part in parts])


def _round_rows(scheme: ActivationScheme, rows: Tensor) -> Tensor:
    """Round rows as an engine does; a stored scale is that of the largest magnitude among them."""
    peak = float(rows.abs().amax()) or 1.0
    return round_inputs(rows, scheme, peak / scheme.most if scheme.has_stored_scale else None)


class _BlockScaling:
    """AWQ on one block: scales for each group of layers that read one tensor, then rounding."""

    def __init__(self, config: Awq, block: BlockWork, layers: BlockLayers, target: Target) -> None:
        self.config, self.block, self.layers, self.target = config, block, layers, target
        self.seen: dict[InputGroup, _Seen] = {}
        self.importance: dict[str, Tensor] = {}
        self.how: dict[str, str] = {}

    def run(self) -> None:
        input_groups = [input_group for input_group in self.block.input_groups if self.layers.of(input_group.layers)]
        if input_groups:
            self.block.collect(self._visit, input_groups)
        for input_group in input_groups:
            self._scale(input_group)
        if self.config.round:
            self._round()
        self._report()

    def _visit(self, input_group: InputGroup, rows: Tensor) -> None:
        if input_group not in self.seen:
            self.seen[input_group] = _Seen(rows.shape[1], self.config.products, rows.device)
        self.seen[input_group].add(rows)

    def _scale(self, input_group: InputGroup) -> None:
        names = self.layers.of(input_group.layers)
        width = self.layers.facts[names[0]].shape[1]
        seen = self.seen.pop(input_group, None) or _Seen(width, self.config.products, self.block.part.device)
        gram, n_rows = seen.gram.mean(sum_over_processes)
        magnitude = sum_over_processes(seen.magnitude).float() / max(n_rows, 1)
        trouble = explain_no_gram(gram, n_rows)
        obstacle = f"not scaled: {trouble}" if trouble else self._find_obstacle(input_group)
        if obstacle is None:
            scaling = self._search(input_group, names, gram, magnitude, self._find_rounding(names, seen))
            how = "left alone: no scale lowers the error"
            if scaling.scales is not None:
                fold_into(self.block, input_group, scaling.scales)
                gram = gram / torch.outer(scaling.scales, scaling.scales)
                how = f"exponent {scaling.alpha:g}, folded into {input_group.source.rpartition('.')[2]}"
            errors = {"error_before": scaling.error_before, "error_after": scaling.error_after}
            self.block.say(measured=dict.fromkeys(names, errors))
        self.how |= dict.fromkeys(names, obstacle or how)
        if not trouble:
            if any(name in self.layers.sharers for name in names):
                gram = weigh_both_uses(gram)
            self.importance |= dict.fromkeys(names, gram.diagonal() + 1e-3 * gram.diagonal().mean().clamp_min(1e-30))

    def _find_obstacle(self, input_group: InputGroup) -> str | None:
        """Return why no scale is searched for; None where one is."""
        if not input_group.source:
            return "not scaled: no module before it can take a scale exactly"
        tables = self.block.tables
        shared = [name for name in input_group.layers if name in tables.sharers]
        if any(self.config.table_scheme(tables.facts[name]) for name in shared):
            return f"not scaled: {shared[0]} shares its weight with embeddings"
        fixed = [name for name in (*input_group.layers, input_group.source) if name in self.block.quantized]
        return f"not scaled: {fixed[0]} is rounded already" if fixed else None

    def _find_rounding(self, names: list[str], seen: _Seen) -> RoundedInputs | None:
        """Return how engines round what these layers read; None where they do not, or not all layers alike."""
        schemes = {self.layers.schemes[name].activations for name in names}
        scheme = schemes.pop()
        return None if schemes or scheme is None else RoundedInputs(seen.sample(), partial(_round_rows, scheme))

    def _search(
        self, input_group: InputGroup, names: list[str], gram: Tensor, magnitude: Tensor, inputs: RoundedInputs | None
    ) -> Scaling:
        weights = [matrix(self.config, self.block, name) for name in names]
        schemes = [self.layers.schemes[name] for name in names]
        signed = all(may_be_negative(scheme, self.target) for scheme in schemes)
        tied = partial(tie_scales, input_group)
        try:
            steps, numbers = self.config.steps, [scheme.weights for scheme in schemes]
            return search_scales(weights, numbers, gram, magnitude, tied, signed, steps, inputs)
        except ValueError as error:
            raise PassError(f"awq: {', '.join(names)}: {error}") from error

    def _round(self) -> None:
        shared = find_shared(self.config, self.block, self.layers.schemes, self.importance)
        for name, scheme in self.layers.schemes.items():
            weight = matrix(self.config, self.block, name)
            try:
                rounded = nearest(weight, scheme, self.target, self.importance.get(name), shared.get(name))
                put_layer(self.block, self.layers, name, rounded)
            except ValueError as error:
                raise PassError(f"awq: {name}: {error}") from error
        round_tables(self.config, self.block, self.layers, self.target)

    def _report(self) -> None:
        config, target = self.config, self.target
        starved = [name for name in self.layers.schemes if name not in self.importance]
        verb = "rounded to the nearest, not scaled" if config.round else "not scaled"
        unread = "no calibration data reaches it"
        why = {name: self.how.get(name, unread).removeprefix("not scaled: ") for name in starved}
        texts = [f"awq: {name}: {why[name]}; {verb}" for name in starved]
        facts = self.layers.facts.values()
        remark(self.block, [*texts, *(text for layer in facts if (text := config.fit_remark(layer, target)))])
        decisions = []
        for layer in facts:
            decision = config.decision(layer, target)
            as_table = layer.is_table and config.table_scheme(layer) is not None
            usual = "rounded to the nearest" if as_table else "not scaled: nothing reads it in a forward pass"
            how = self.how.get(layer.name, usual)
            action = decision.action if config.round or not how.startswith(("not", "left")) else "kept"
            decisions.append(replace(decision, action=action, reason=f"{decision.reason}; {how}"))
        self.block.say(decisions=[*decisions, *self.layers.kept])
