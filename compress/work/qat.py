"""The steps of `qat`: which of its two ways a scheme goes."""

from __future__ import annotations

from typing import Any

from compress.context import PassContext, PassResult
from compress.passes.qat import Qat
from compress.work.qat_int8 import apply_qat_int8
from compress.work.qat_weights import apply_qat_weights


def apply_qat(knobs: Qat, model: Any, context: PassContext) -> PassResult:
    """Train with rounding. Weights alone: a LoadedModel, trained in place; W8A8: a GraphState. Raises PassError."""
    work = apply_qat_int8 if knobs.integer_inputs else apply_qat_weights
    return work(knobs, model, context)
