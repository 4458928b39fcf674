"""The work of `qat`: which of its two ways a scheme goes."""

from __future__ import annotations

from compress.context import PassResult
from compress.models.load import TorchModel
from compress.passes.qat import Qat
from compress.rounding.state import GraphState
from compress.work.contexts import GraphContext, ModelContext
from compress.work.qat_int8 import apply_qat_int8
from compress.work.qat_weights import apply_qat_weights


def apply_qat(
    config: Qat, model: TorchModel | GraphState, context: ModelContext | GraphContext
) -> PassResult[TorchModel | GraphState]:
    """Train with rounding. Weights alone: a TorchModel, trained in place; W8A8: a GraphState. Raises PassError."""
    if isinstance(model, GraphState):
        assert isinstance(context, GraphContext)
        return apply_qat_int8(config, model, context)
    assert isinstance(context, ModelContext)
    return apply_qat_weights(config, model, context)
