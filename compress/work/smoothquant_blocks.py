"""The steps of the `smoothquant` pass on a torch model, for W8A8: inputs scaled by row, folded where that is exact."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from compress.blocks.folding import tie_scales
from compress.blocks.sharing import gather_from_processes
from compress.blocks.step import BlockStep
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, Reading
from compress.passes.choosing import choose_layers
from compress.passes.smoothquant import SmoothQuant
from compress.quantize.smooth import ALPHAS, FREE, Smoothing, search_smoothing
from compress.work.block_layers import fold_into, step_facts


def smoothquant_blocks(knobs: SmoothQuant, model: StreamedModel, context: PassContext) -> PassResult:
    """Smooth a streamed model. Raises PassError naming the layers."""
    stream = Stream(model, context)
    for step in stream:
        _BlockSmoothing(knobs, step, context).run()
    return stream.result()


class _Sample:
    """Of what one reading reads: some rows of each micro-batch, and each channel's largest magnitude."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.peak: Tensor | None = None

    def add(self, rows: Tensor, n: int) -> None:
        if len(rows):
            self.rows.append(rows[:: -(-len(rows) // n)].clone())
            peak = rows.abs().amax(0)
            self.peak = peak if self.peak is None else torch.maximum(self.peak, peak)


class _BlockSmoothing:
    """SmoothQuant on one block: what each group of layers reads, and the scales that are folded for it."""

    def __init__(self, knobs: SmoothQuant, step: BlockStep, context: PassContext) -> None:
        self.knobs, self.step = knobs, step
        taken, self.kept = choose_layers(step_facts(step), (), knobs.ignore, knobs.unfit)
        self.facts = {layer.name: layer for layer in taken}
        self.samples: dict[Reading, _Sample] = {}
        self.n_each = max(1, knobs.rows // max(1, len(context.batches)))

    def run(self) -> None:
        able = [reading for reading in self.step.readings if self._find_obstacle(reading) is None]
        if able:
            self.step.collect(self._visit, able)
        for reading in self.step.readings:
            names = [name for name in reading.layers if name in self.facts]
            smoothed, how = self._smooth(reading)
            self._report([self.facts.pop(name) for name in names], "smoothed" if smoothed else "kept", how)
        self._report(list(self.facts.values()), "kept", "nothing reads it in a forward pass")
        self.step.say(decisions=self.kept)

    def _visit(self, reading: Reading, rows: Tensor) -> None:
        self.samples.setdefault(reading, _Sample()).add(rows, self.n_each)

    def _find_obstacle(self, reading: Reading) -> str | None:
        """Return why this reading cannot be smoothed, or None."""
        if not reading.source:
            return "left alone: no module before it can take a scale exactly"
        if other := [name for name in reading.layers if name not in self.facts]:
            return f"left alone: it reads a tensor with {other[0]}, which is kept"
        if reading.source in self.step.quantized:
            return f"left alone: {reading.source} is rounded already"
        return None

    def _smooth(self, reading: Reading) -> tuple[bool, str]:
        """Smooth a reading; return whether it was done, and how or why not."""
        if obstacle := self._find_obstacle(reading):
            return False, obstacle
        samples = [
            sample
            for sample in gather_from_processes(self.samples.pop(reading, None))
            if sample is not None and sample.rows
        ]
        if not samples:
            return False, "left alone: no calibration data reaches it"
        rows = torch.cat([part for sample in samples for part in sample.rows]).numpy()
        peak = torch.stack([sample.peak for sample in samples]).amax(0).numpy()
        smoothing = self._search(reading, rows, peak)
        errors = {"error_before": smoothing.error_before, "error_after": smoothing.error_after}
        self.step.say(measured=dict.fromkeys(reading.layers, errors))
        if smoothing.scales is None:
            return False, "left alone: no strength lowers the error enough"
        fold_into(self.step, reading, torch.from_numpy(smoothing.scales))
        return True, f"alpha {smoothing.alpha:g}, folded into {reading.source.rpartition('.')[2]}"

    def _search(self, reading: Reading, rows: np.ndarray, peak: np.ndarray) -> Smoothing:
        if not np.isfinite(peak).all():
            raise PassError(
                f"smoothquant: {', '.join(reading.layers)}: NaN or Inf among its inputs on the calibration data"
            )
        knobs = self.knobs
        alphas, gain = (ALPHAS, FREE) if knobs.alpha is None else ((knobs.alpha,), float("inf"))
        weights = [self.step.matrix(name).numpy() for name in reading.layers]
        return search_smoothing(rows, peak, weights, alphas, gain, partial(_tie, reading), by_row=True)

    def _report(self, layers: list[LayerFacts], action: str, how: str) -> None:
        self.step.say(decisions=[LayerDecision(layer.name, layer.type, action, how) for layer in layers])


def _tie(reading: Reading, scales: np.ndarray) -> np.ndarray:
    return tie_scales(reading, torch.from_numpy(scales)).numpy()
