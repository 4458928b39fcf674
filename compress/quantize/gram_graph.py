"""X^T X of the rows of a tensor in an ONNX graph."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
import torch
from torch import Tensor

from compress.graph.run import Feeds, open_session, run_batches, tap
from compress.quantize.gram import Gram


def gram_matrix(model: ir.Model, tensor: str, batches: Iterable[Feeds]) -> Tensor:
    """Return X^T X / n over the rows of a tensor [..., in], all batches together; float32 [in, in].

    Raises ValueError when there is no batch or a value is not finite.
    """
    session = open_session(tap(model, [tensor]))
    gram: Gram | None = None
    for outputs in run_batches(session, batches):
        values = torch.from_numpy(next(iter(outputs.values())))
        rows = values.reshape(-1, values.shape[-1])
        gram = gram or Gram(rows.shape[1])
        gram.add(rows)
    if gram is None:
        raise ValueError("there is no calibration data")
    mean, _ = gram.mean()
    if not torch.isfinite(mean).all():
        raise ValueError(f"tensor {tensor!r}: NaN or Inf on the calibration data")
    return mean
