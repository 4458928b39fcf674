"""`gptq`: weights only, rounded one input at a time so that later ones make up for the error (arXiv:2210.17323)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.passes.calibrated import CalibratedWeightPass


class Gptq(CalibratedWeightPass):
    """Quantization of weights against the Hessian of each layer's calibration inputs, layer after layer.

    How inputs go together is believed for as much as so many rows of calibration data tell of other data.
    """

    calibration_runs: ClassVar[float] = 2.5
    takes_block_formats: ClassVar[bool] = True
    takes_mixed_bits: ClassVar[bool] = True

    kind: Literal["gptq"] = "gptq"
    damp_percent: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Of the mean of the Hessian's diagonal, added to it."""
    actorder: bool = True
    """Round the inputs of largest activation first; groups keep their places (static groups)."""
    block_size: Annotated[int, Field(ge=1)] = 128
    """Inputs whose errors are spread over the rest of the weight at once: for speed, not for the result."""
