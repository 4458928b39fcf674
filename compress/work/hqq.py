"""The steps of the `hqq` pass: block by block, without data."""

from __future__ import annotations

from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.passes.hqq import Hqq
from compress.quantize.hqq import hqq_round
from compress.work.block_layers import block_layers, matrix, may_be_negative, remark


def apply_hqq(knobs: Hqq, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    stream = Stream(model, context, data=False)
    for step in stream:
        work = block_layers(knobs, step, context.target)
        for layer, scheme in work.schemes.items():
            signed = may_be_negative(scheme, context.target)
            try:
                weight = hqq_round(matrix(knobs, step, layer), scheme.weights, signed, knobs.steps)
            except ValueError as error:
                raise PassError(f"hqq: {layer}: {error}") from error
            step.put(layer, weight, scheme)
        facts = work.facts.values()
        remark(knobs, step, [text for layer_facts in facts if (text := knobs.fit_remark(layer_facts, context.target))])
        step.say(decisions=[*(knobs.decision(layer_facts, context.target) for layer_facts in facts), *work.kept])
    return stream.result()
