"""`rtn`: weights rounded to the nearest of 2^bits levels (or of FP8's), each group's scale searched for."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes.weight_only import WeightPass, with_problems
from compress.specs import NAMES_PLACE


class Rtn(WeightPass):
    """Round-to-nearest quantization of the matrix products; needs no data but for stored input scales (FP8), for
    `importance`, and for bits that are chosen."""

    takes_block_formats: ClassVar[bool] = True
    takes_mixed_bits: ClassVar[bool] = True

    kind: Literal["rtn"] = "rtn"
    importance: Annotated[bool | Annotated[str, Field(min_length=1)], NAMES_PLACE] = False
    """Scales are chosen by each input's mean square on the calibration data, or by those that a file of llama-imatrix
    holds (.gguf, or .dat as it was before), by its name: it needs no calibration set. Of a torch model."""

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
        return self.importance is True or any(s.activations and s.activations.has_stored_scale for s in self.schemes())

    @property
    def importance_file(self) -> str:
        return self.importance if isinstance(self.importance, str) else ""

    @property
    def calibration_runs(self) -> float:  # type: ignore[override]
        return 1.1 if self.needs_calibration else 0.0

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        graph = bool(self.importance) and self.stage_on(facts) == "graph"
        text = "rtn: importance needs a torch model, and an onnx: source is none; use gptq"
        return with_problems(super().check(facts, target), [text] if graph else [])
