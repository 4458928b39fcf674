"""How large the inputs of layers are over the calibration data: sums of squares, for importance matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compress.blocks.sharing import sum_over_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.facts import InputGroup


@dataclass(frozen=True, eq=False)
class Squares:
    """The sum of the squares of each input of a layer, float64 [in], over so many rows."""

    sums: np.ndarray
    n_rows: int


class InputSquares:
    """Squares of what layers read, added up as rows come."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def see(self, layers: Sequence[str], rows: Tensor) -> None:
        """Add rows [n, in] that these layers read."""
        squares = rows.double().square().sum(0).cpu()
        for layer in layers:
            self._sums[layer] = self._sums[layer] + squares if layer in self._sums else squares
            self._rows[layer] = self._rows.get(layer, 0) + len(rows)

    def total(self, layer: str, inputs: int) -> Squares:
        """Return the sum over all processes for a layer with so many inputs; zeros where no row reached it."""
        sums = self._sums.get(layer, torch.zeros(inputs, dtype=torch.float64))
        n_rows = sum_over_processes(torch.tensor(self._rows.get(layer, 0)))
        return Squares(sum_over_processes(sums).numpy(), int(n_rows))


def gather_squares(model: StreamedModel, context: PassContext) -> dict[str, Squares]:
    """Return layer -> the squares of what it reads of the calibration data, in one forward pass of the model."""
    found: dict[str, Squares] = {}
    for block in Stream(model, context):
        seen = InputSquares()

        def visit(input_group: InputGroup, rows: Tensor, seen: InputSquares = seen) -> None:
            seen.see(input_group.layers, rows)

        block.lockstep(visit, lambda input_group: None)
        for input_group in block.input_groups:
            inputs = block.weight(input_group.layers[0]).shape[1]
            found |= {layer: seen.total(layer, inputs) for layer in input_group.layers}
    return found
