"""The work of the `hqq` pass: block by block, without data."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.formats.schemes import Scheme
from compress.passes.hqq import Hqq
from compress.rounding.hqq import hqq_round
from compress.rounding.quantized_weight import QuantizedWeight, by_rows
from compress.work.block_layers import block_layers, matrix, may_be_negative, put_layer, remark, round_tables, say_error


def apply_hqq(config: Hqq, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    stream = Stream(model, context, data=False, lazy=not config.needs_forward)
    for block in stream:
        layers = block_layers(config, block, context.target)
        for layer, scheme in layers.schemes.items():
            signed = may_be_negative(scheme, context.target)
            try:
                values = matrix(config, block, layer)
                weight = by_rows(values, partial(_round, config, scheme, signed))
            except ValueError as error:
                raise PassError(f"hqq: {layer}: {error}") from error
            put_layer(block, layers, layer, weight)
            say_error(block, layer, values, weight)
        round_tables(config, block, layers, context.target)
        facts = layers.facts.values()
        remark(block, [text for layer_facts in facts if (text := config.fit_remark(layer_facts, context.target))])
        block.say(decisions=[*(config.decision(layer_facts, context.target) for layer_facts in facts), *layers.kept])
    return stream.result()


def _round(config: Hqq, scheme: Scheme, signed: bool, rows: Tensor) -> QuantizedWeight:
    return hqq_round(rows, scheme.weights, signed, config.steps)
