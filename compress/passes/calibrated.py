"""What passes share that round the weights of large models by what calibration data gives."""

from __future__ import annotations

from typing import ClassVar, Literal

from compress.passes.weight_only import WeightPass
from compress.rounding.products import Compute


class CalibratedWeightPass(WeightPass):
    """Weights rounded, block after block, by X^T X of what their layers read."""

    needs_calibration: ClassVar[bool] = True

    compute: Compute | Literal["auto"] = "auto"
    """What the factors of large products are rounded to, in forward passes, Gram matrices and rounding. Sums are
    float32, but bfloat16, too, on a CPU without AMX. auto: bfloat16 where the model is large and this machine is faster
    in it, as processors with AMX or with AVX-512 for bfloat16 are."""

    @property
    def products(self) -> Compute:
        """Return what products are computed in; float32 as long as nothing has settled it."""
        return "float32" if self.compute == "auto" else self.compute
