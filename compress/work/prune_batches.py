"""The calibration data as the pruning passes read it: as much at once as memory has room for what comes out."""

from __future__ import annotations

from collections.abc import Sequence

from compress.blocks.activations import ROWS, MicroBatch, micro_batches
from compress.errors import PassError
from compress.models.load import TorchModel
from compress.work.contexts import ModelContext
from runtime.bundle.tensors import TensorSpec

AT_ONCE = 4 * ROWS
"""Tokens of one forward pass, at most; an image counts as 256."""
OUTPUT_BYTES = 512 * 2**20
"""What the outputs of one forward pass may take in float64: vocabularies are wide."""


def pruning_batches(kind: str, loaded: TorchModel, context: ModelContext) -> list[MicroBatch]:
    """Return the calibration data in micro-batches. PassError if there is none. `kind`: the pass, for the message."""
    rows = rows_within(loaded.outputs, AT_ONCE, OUTPUT_BYTES)
    batches = list(micro_batches(context.batches, loaded.parameters, rows))
    if not batches:
        raise PassError(f"{kind}: there is no calibration data; give the recipe a calibration set")
    return batches


def rows_within(outputs: Sequence[TensorSpec], rows: int, n_bytes: int) -> int:
    """Return at most `rows`, and no more than those whose outputs take `n_bytes` in float64."""
    widths = [spec.shape[-1] for spec in outputs if spec.shape]
    widest = max((width for width in widths if isinstance(width, int)), default=1)
    return max(1, min(rows, n_bytes // (8 * widest)))
