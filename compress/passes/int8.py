"""`int8`: weights and activations in eight bits (W8A8), static or dynamic. The arithmetic is in `compress.rounding`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerFacts, ModelFacts, PassPlan
from compress.formats.targets import Format, Target
from compress.passes.eight_bit import Calibration, EightBit, Number, Placement
from compress.specs import LayerPattern, Record

SMALL_TABLE = 4096
"""Embeddings with fewer weights stay float: there is nothing to gain."""


class Int8Override(Record):
    """Other settings for the layers that `targets` selects (names, `re:` patterns or types)."""

    targets: tuple[LayerPattern, ...]
    """Layer names, `re:` patterns or types."""
    calibration: Calibration | None = None
    """How the ranges of what these layers read and give are chosen."""
    percentile: Annotated[float, Field(gt=50, le=100)] | None = None
    """Of these ranges, with calibration: percentile."""


class Int8(EightBit):
    """Eight-bit weights (symmetric, per output channel) and activations (per tensor, calibrated or at run time)."""

    number: ClassVar[Number] = "int8"

    kind: Literal["int8"] = "int8"
    mode: Literal["static", "dynamic"] = "static"
    """static: activation ranges are measured on the calibration data; dynamic: at run time, for each batch."""
    calibration: Calibration = "mse"
    """How a range is chosen from what was observed."""
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    """With calibration: percentile, how much of what was observed lies inside the range, in per cent."""
    placement: Literal["fastest", "auto", "all", "inputs"] = "fastest"
    """fastest: as auto, but layers that int8 makes slower are computed in float from weights stored in int8, by times
    measured on this machine; where nothing can be timed (a target that does not run here, a model that generates) it is
    auto. all: activations stay int8 between operators (convolutional nets). inputs: only the inputs of matrix products
    are quantized, and what convolutions read and write; the residual stream stays float (transformers). auto: one of
    these two, decided from the graph."""
    weight_bits: Literal[8, 7] = 8
    """7: the weights of convolutions and matrix products lie in -63 to 63, so that sums of two products fit into the 16
    bits in which an x86 CPU without VNNI or AMX adds them. Of 8 bits such sums may saturate there."""
    overrides: tuple[Int8Override, ...] = ()
    """Exceptions for some of the layers."""

    @property
    def format(self) -> Format:
        return "int8-static" if self.mode == "static" else "int8-dynamic"

    @property
    def scheme(self) -> str:
        return f"W{self.weight_bits}A8" if self.mode == "static" else f"W{self.weight_bits}A8 dynamic"

    @property
    def is_dynamic(self) -> bool:
        return self.mode == "dynamic"

    @property
    def placement_is_given(self) -> bool:
        return self.placement in ("all", "inputs")

    @property
    def chooses_by_time(self) -> bool:
        return self.placement == "fastest"

    def unfit(self, layer: LayerFacts) -> str | None:
        if layer.type == "Embedding":
            return "a small table" if layer.n_weights < SMALL_TABLE else None
        if layer.op == "Conv" and self.mode == "dynamic":
            return "dynamic int8 convolutions are slower than float32 on every target"
        return None if layer.op in ("Conv", "Gemm", "MatMul") else f"{layer.op} has no int8 form"

    def choose_tensors(self) -> Placement:
        if self.placement in ("all", "inputs"):
            return self.placement
        return "inputs" if self.is_dynamic or self.attention else "auto"

    def patterns(self) -> dict[str, tuple[LayerPattern, ...]]:
        return super().patterns() | {
            f"overrides.{i}.targets": override.targets for i, override in enumerate(self.overrides)
        }

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        plan = super().check(facts, target)
        return replace(plan, problems=(*plan.problems, *self._find_contradictions()))

    def _find_contradictions(self) -> list[str]:
        """Return a sentence for each setting that would have no effect beside the others."""
        problems = []
        if self.mode == "dynamic" and self.placement == "all":
            problems.append("int8: mode: dynamic quantizes inputs only; leave placement at auto or set it to inputs")
        if self.mode == "dynamic" and self.overrides:
            problems.append("int8: overrides set calibrated ranges, and mode: dynamic has none; remove them")
        if self.attention and (self.mode == "dynamic" or self.placement == "all"):
            problems.append("int8: attention: true needs mode: static and placement: inputs")
        return problems
