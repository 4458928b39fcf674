"""Gather X^T X of the rows that a layer reads, bit by bit, from a torch model or an ONNX graph. Torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import onnx_ir as ir
import torch
from torch import Tensor

from compress.graph.run import Feeds, open_session, run_tokens, tap

Compute = Literal["float32", "bfloat16"]
ROWS = 1024
"""Multiplied at once in bfloat16, whose products come out with 8 bits: their sum in float32 evens that out."""

NARROW = 512
"""Below this width one product is cheaper than its stripes."""


class Gram:
    """The sum of x x^T over rows x [in], of which `mean` gives the mean in float32.

    Products of float32 are summed in float64, so that no order of the sums is seen in the result; those of bfloat16,
    which have 8 bits, in float32. Rows lie on `device`.
    """

    def __init__(self, width: int, compute: Compute = "float32", device: torch.device | None = None) -> None:
        self.dtype = getattr(torch, compute)
        summed = torch.float64 if compute == "float32" else torch.float32
        self.total = torch.zeros(width, width, dtype=summed, device=device)
        self.n_rows = 0

    def add(self, rows: Tensor) -> None:
        """Add x x^T of each of `rows` [n, in] to the sum."""
        self.n_rows += len(rows)
        rows = rows.to(self.dtype)
        for part in rows.split(len(rows) or 1 if self.dtype == torch.float32 else ROWS):
            width = part.shape[1]
            # symmetric: each of 4 stripes of columns is multiplied with those up to itself alone
            step = width if width < NARROW else -(-width // 4)
            for start in range(0, width, step):
                stripe = part[:, start : start + step]
                self.total[: start + step, start : start + step] += part[:, : start + step].T @ stripe

    def mean(self, summed: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> tuple[Tensor, int]:
        """Return (X^T X / n, n) over all processes, whose tensors `summed` adds up; zeros if there was no row.

        The sum itself is let go of: nothing can be added afterwards.
        """
        n_rows = int(summed(torch.tensor(self.n_rows)))
        total = summed(self.total)
        del self.total
        mean = total.float().div_(max(n_rows, 1))
        n = len(mean)
        for start in range(0, n, ROWS):
            stop = min(start + ROWS, n)
            corner = mean[start:stop, start:stop].triu_()
            corner += corner.triu(1).T
            mean[stop:, start:stop] = mean[start:stop, stop:].T
        return mean, n_rows


def explain_no_gram(mean: Tensor, n_rows: int) -> str:
    """Return why a Gram matrix, or several, of `n_rows` rows tell nothing of what a layer reads; "" where they do."""
    if not n_rows:
        return "no calibration data reaches it"
    return "" if torch.isfinite(mean).all() else "NaN or Inf among its inputs on the calibration data"


def gram_matrix(
    model: ir.Model, tensor: str, batches: Iterable[Feeds], device: torch.device | None = None
) -> tuple[Tensor, int]:
    """Return (X^T X / n, n) over the rows of a tensor [..., in] of all batches, padding left out; float32 [in, in].

    Raises ValueError when there is no batch.
    """
    session = open_session(tap(model, [tensor]))
    gram: Gram | None = None
    for outputs in run_tokens(session, batches):
        values = torch.from_numpy(next(iter(outputs.values()))).to(device)
        rows = values.reshape(-1, values.shape[-1])
        gram = gram or Gram(rows.shape[1], device=device)
        gram.add(rows)
    if gram is None:
        raise ValueError("there is no calibration data")
    return gram.mean()
