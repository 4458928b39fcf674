"""How long a pass takes that takes structure out of a torch model: forwards, fits by least squares, timed exports.

Counts times rates, as `compress.planning.block_time` has it; the counts are the pass's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from compress.facts import FLOAT_BYTES, LayerFacts
from compress.passes.base import PruningWorkload
from compress.planning.judging_time import turns_seconds
from compress.planning.rates import Rates
from compress.timing.clock import CALLS
from compress.work.contexts import TIMING_BUDGET_S

IN_TORCH = 1.3
"""Times that a forward pass takes in torch what it takes in ONNX Runtime."""
ROWS_OF_OTHERS = 256
"""As `compress.blocks.activations.ROWS_OF_OTHERS`."""
ROWS_PER_FEATURE, FEWEST_ROWS = 128, 65536
"""Of all batches together, that a layer is fitted to: as `compress.prune.statistics.rows_per_batch`."""
SWEEPS = 4
"""Over the rows where a ReLU follows, as one does most convolutions: `compress.prune.compensate.RECTIFIED_STEPS`, 1."""
TAKEN_OUT, SHIFTED = 6, 2
"""Times that a sweep reads and writes what each row sees: to take it out of an image, and to centre and sum it."""
SOLUTIONS = 6
"""Ridges tried: `compress.prune.compensate.RIDGES`."""
FLOPS = 2
"""A multiplication and a sum."""


@dataclass(frozen=True)
class PruningTime:
    """The seconds of a pruning pass.

    `n_samples`: of calibration; `sample_rows`: tokens or patches that one is, 1 where it is neither; `forward`,
    `export`: the seconds of a sample through the model in ONNX Runtime, and of an export; `calls`: of a timed call of
    the float model and of the smaller one.
    """

    rates: Rates
    n_samples: int
    sample_rows: int
    forward: float
    export: float
    calls: tuple[float, float]

    def pass_seconds(self, work: PruningWorkload) -> float:
        rows = self.sample_rows if self.sample_rows > 1 else ROWS_OF_OTHERS
        tried = min(self.n_samples, max(work.tried_rows // rows, 1))
        forwards = work.forwards * self.n_samples + work.tried * tried
        read = sum(self._sum_seconds(layer, 1) for layer in work.read)
        fitted = sum(self._fit_seconds(layer) for layer in work.fitted)
        timed = work.timed * turns_seconds(self.calls, CALLS, 2, TIMING_BUDGET_S)
        return forwards * IN_TORCH * self.forward + read + fitted + work.exports * self.export + timed

    def _fit_seconds(self, layer: LayerFacts) -> float:
        """Return the seconds of fitting one layer's weight to what it is to give."""
        sweeps = SWEEPS if layer.op == "Conv" else 1
        targets = 2 * FLOPS * sweeps * self._count_rows(layer) * layer.n_weights
        solved = SOLUTIONS * FLOPS * _count_features(layer) ** 3
        return self._sum_seconds(layer, sweeps) + (targets + solved) / self.rates.product("float32")

    def _sum_seconds(self, layer: LayerFacts, sweeps: int) -> float:
        """Return the seconds of summing the products of what a layer's outputs see, and of reading it so often."""
        rows, features, groups = self._count_rows(layer), _count_features(layer), _count_groups(layer)
        seen = rows * groups * features
        passes = sweeps * (SHIFTED + (TAKEN_OUT if layer.op == "Conv" else 0))
        summed = FLOPS * seen * features / self.rates.product("float32")
        return summed + passes * 2 * FLOAT_BYTES * seen / self.rates.touch

    def _count_rows(self, layer: LayerFacts) -> int:
        rows = self.n_samples * layer.macs // max(layer.n_weights, 1)
        return min(rows, max(ROWS_PER_FEATURE * _count_features(layer), FEWEST_ROWS))


def _count_features(layer: LayerFacts) -> int:
    """Return how many numbers one output sees."""
    return layer.n_weights // max(layer.shape[0], 1)


def _count_groups(layer: LayerFacts) -> int:
    """Return how many groups of outputs see other inputs: all where each channel is filtered by itself."""
    return layer.shape[0] if layer.op == "Conv" and layer.shape[1] == 1 and layer.shape[0] > 1 else 1
