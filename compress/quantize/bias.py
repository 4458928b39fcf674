"""Bias correction: rounding a weight shifts its layer's mean output; the shift is known, and the bias can take it.

Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction (2019), section 4.2, with the input
means measured on calibration data. It depends on the weights' rounding alone, so it serves every flavour.
"""

from __future__ import annotations

import numpy as np


def mean_shift(weight: np.ndarray, rounded: np.ndarray, input_mean: np.ndarray, groups: int = 1) -> np.ndarray:
    """Return what rounding adds to each output's mean: (rounded - weight) applied to the input means.

    `weight`, `rounded`: [out, in / groups, *kernel]; `input_mean`: [in], the mean over samples and positions (positions
    that padding reaches are taken as if they were inside). Returns float64 [out].
    """
    difference = (rounded.astype(np.float64) - weight).reshape(*weight.shape[:2], -1).sum(axis=2)  # [out, in / groups]
    out, per_group = difference.shape
    means = input_mean.reshape(groups, per_group)  # [groups, in / groups]
    grouped = difference.reshape(groups, out // groups, per_group)  # [groups, out / groups, in / groups]
    shift: np.ndarray = np.einsum("goi,gi->go", grouped, means)  # [groups, out / groups]
    return shift.reshape(out)
