"""Weights in FP8 E4M3: rounded by the format's own rule, scaled so that the largest one is the format's largest."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from compress.graph.layers import GraphLayer
from compress.quantize.rounding import SMALLEST_SCALE, QuantizedWeight
from compress.quantize.state import LARGEST_FLOAT8


def round_layer_to_fp8(layer: GraphLayer) -> QuantizedWeight:
    """Round a graph's layer to FP8, one scale in all. Raises ValueError naming the layer on NaN or Inf."""
    try:
        return round_to_fp8(torch.tensor(layer.matrix()), 0)
    except ValueError as error:
        raise ValueError(f"{layer.name}: {error}") from error


def round_to_fp8(weight: Tensor, group_size: int = -1, least_peak: float = 0.0) -> QuantizedWeight:
    """Round `weight` [out, in] to FP8 with one scale for each output channel (-1) or one for all of it (0).

    `least_peak`: a magnitude that each scale has room for, whatever the weight's own.
    Raises ValueError on another group size, or a weight that is not finite.
    """
    if group_size not in (-1, 0):
        raise ValueError(f"FP8 weights have one scale for each output channel (-1) or one in all (0), not {group_size}")
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or Inf")
    weight = weight.float()
    peak = weight.abs().amax(1, keepdim=True) if group_size else weight.abs().amax().reshape(1, 1)  # [out or 1, 1]
    peak = peak.clamp_min(least_peak)
    scales = (torch.where(peak > 0, peak, LARGEST_FLOAT8) / LARGEST_FLOAT8).clamp_min(SMALLEST_SCALE)
    levels = (weight / scales).clamp_(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(torch.float8_e4m3fn)
    values = levels.view(torch.uint8).cpu().numpy().view(ml_dtypes.float8_e4m3fn)
    return QuantizedWeight(values, scales.cpu().numpy().astype(np.float32), None, 8, group_size)
