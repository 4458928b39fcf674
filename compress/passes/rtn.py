"""`rtn`: weights rounded to the nearest of 2^bits levels (or of FP8's), each group's scale searched for."""

from __future__ import annotations

from typing import ClassVar, Literal

from compress.facts import ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes.weight_only import WeightPass, with_problems


class Rtn(WeightPass):
    """Round-to-nearest quantization of the matrix products; needs no data but for stored input scales (FP8), for
    `importance`, and for bits that are chosen."""

    takes_k_formats: ClassVar[bool] = True
    takes_mixed_bits: ClassVar[bool] = True

    kind: Literal["rtn"] = "rtn"
    importance: bool = False
    """Scales are chosen by each input's mean square on the calibration data, as with an importance matrix of llama.cpp;
    of a torch model."""

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        """Return whether a scheme stores input scales, inputs are weighed, or bits are chosen."""
        return self.streams_data or self.budget is not None or bool(self.open_tables)

    @property
    def needs_forward(self) -> bool:
        return self.needs_calibration

    @property
    def streams_data(self) -> bool:
        """Return whether rounding itself needs the data."""
        return self.importance or any(s.activations and s.activations.has_stored_scale for s in self.schemes())

    @property
    def calibration_runs(self) -> float:  # type: ignore[override]
        return 1.1 if self.needs_calibration else 0.0

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        graph = self.importance and self.stage_on(facts) == "graph"
        text = "rtn: importance needs a torch model, and an onnx: source is none; use gptq"
        return with_problems(super().check(facts, target), [text] if graph else [])
