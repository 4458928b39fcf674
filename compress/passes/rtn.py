"""`rtn`: weights rounded to the nearest of 2^bits levels (or of FP8's), each group's scale searched for."""

from __future__ import annotations

from typing import Literal

from compress.facts import ModelFacts
from compress.passes.base import BlockWorkload
from compress.passes.weight_only import WeightPass


class Rtn(WeightPass):
    """Round-to-nearest quantization of the matrix products; needs no data but for stored input scales (FP8)."""

    kind: Literal["rtn"] = "rtn"

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        """Return whether a scheme stores input scales."""
        return any(scheme.activations and not scheme.activations.dynamic for scheme in self.schemes())

    @property
    def calibration_runs(self) -> float:  # type: ignore[override]
        return 1.1 if self.needs_calibration else 0.0

    def count_block_work(self, facts: ModelFacts, sample_rows: int) -> BlockWorkload:
        return BlockWorkload(forwards=2.0 if self.needs_calibration else 0.0, searches=1)
