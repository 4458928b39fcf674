"""X^T X of the rows that a layer reads, gathered bit by bit. Torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Compute = Literal["float32", "bfloat16"]
ROWS = 1024
"""Multiplied at once in bfloat16, whose products come out with 8 bits: their sum in float32 evens that out."""
STRIPES = 4
"""The product is symmetric: of so many stripes of columns, each is multiplied with those up to itself alone."""


class Gram:
    """The sum of x x^T over rows x [in], float32 [in, in], of which `mean` gives the mean."""

    def __init__(self, width: int, compute: Compute = "float32") -> None:
        self.dtype = getattr(torch, compute)
        self.total = torch.zeros(width, width)
        self.n_rows = 0
        self._waiting: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """`rows` [n, in]. Few of them wait for more: small products cost more than their arithmetic."""
        self.n_rows += len(rows)
        self._waiting.append(rows.to(self.dtype))
        if sum(map(len, self._waiting)) >= ROWS:
            self._multiply()

    def _multiply(self) -> None:
        rows = torch.cat(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._waiting = []
        for part in rows.split(len(rows) if self.dtype == torch.float32 else ROWS):
            self._add(part)

    def _add(self, rows: Tensor) -> None:
        """The upper triangle, stripe by stripe."""
        step = -(-rows.shape[1] // STRIPES)
        for start in range(0, rows.shape[1], step):
            stripe = rows[:, start : start + step]
            self.total[: start + step, start : start + step] += rows[:, : start + step].T @ stripe

    def mean(self, summed: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> tuple[Tensor, int]:
        """(X^T X / n, n) over all processes, whose tensors `summed` adds up; zeros if there was no row."""
        if any(map(len, self._waiting)):
            self._multiply()
        n_rows = int(summed(torch.tensor(self.n_rows)))
        upper = summed(self.total).triu_()
        return (upper + upper.triu(1).T) / max(n_rows, 1), n_rows
