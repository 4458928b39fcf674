"""`fp8`: matrix products and convolutions in float8 (E4M3), for GPUs from compute capability 8.9 on."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import model_validator

from compress.facts import LayerFacts
from compress.formats.targets import Format
from compress.passes.eight_bit import EightBit, Number


class Fp8(EightBit):
    """Weights and what products read in float8 (E4M3, largest 448), one scale for each tensor: its largest magnitude.

    Kernels take one scale for a whole weight: with one for each output channel TensorRT computes in float32.
    """

    number: ClassVar[Number] = "fp8"

    kind: Literal["fp8"] = "fp8"

    @model_validator(mode="after")
    def _check_restore(self) -> Fp8:
        if self.restore.speedup is not None:
            raise ValueError("restore: no CPU multiplies float8, so that no layer's time is measured; use size_ratio")
        return self

    @property
    def format(self) -> Format:
        return "fp8-static"

    @property
    def scheme(self) -> str:
        return "W8A8 float8"

    def unfit(self, layer: LayerFacts) -> str | None:
        return None if layer.op in ("Conv", "Gemm", "MatMul") else f"{layer.op} has no float8 form"
