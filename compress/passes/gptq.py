"""`gptq`: weights only, rounded one input at a time so that later ones make up for the error (arXiv:2210.17323)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.passes.weight_only import WeightPass


class Gptq(WeightPass):
    """Quantization of weights against the Hessian of each layer's calibration inputs, layer after layer."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 2.5
    takes_block_formats: ClassVar[bool] = True
    takes_mixed_bits: ClassVar[bool] = True

    kind: Literal["gptq"] = "gptq"
    damp_percent: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Of the mean of the Hessian's diagonal, added to it. Raised tenfold, and said so, where it does not suffice."""
    actorder: bool = True
    """Round the inputs of largest activation first; groups keep their places (static groups)."""
    block_size: Annotated[int, Field(ge=1)] = 128
    """Inputs whose errors are spread over the rest of the weight at once: for speed, not for the result."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """The type of products in forward passes and Hessians; bfloat16 is faster on CPUs that have it. Its 8 bits leave a
    Hessian less sure: of Qwen2.5-Coder 0.5B, 16 windows of 512 tokens, 19 layers needed 10 to 100 times the damping."""
