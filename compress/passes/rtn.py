"""`rtn`: weights rounded to the nearest of 2^bits levels (or of FP8's), each group's scale searched for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from compress.passes.weight_only import WeightPass

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult


class Rtn(WeightPass):
    """Round-to-nearest quantization of the matrix products; needs no data but for stored input scales (FP8)."""

    kind: Literal["rtn"] = "rtn"

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        """True where a scheme stores input scales."""
        return any(scheme.activations and not scheme.activations.dynamic for scheme in self.schemes())

    @property
    def calibration_runs(self) -> float:  # type: ignore[override]
        return 1.1 if self.needs_calibration else 0.0

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a StreamedModel or a GraphState. Raises PassError naming the layer."""
        from compress.passes.rtn_steps import apply_rtn  # torch, onnx-ir

        return apply_rtn(self, model, context)
