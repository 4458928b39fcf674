"""The AWQ format (AutoAWQ's gemm version): 4-bit weights packed along their outputs, a zero point for each group.

A word holds eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first, as AutoAWQ's kernels unpack them.
Symmetric weights have the zero point 8: readers want one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.export.packing import as_unsigned, pack_bits
from compress.export.shards import Entry
from compress.formats.schemes import Scheme
from compress.rounding.quantized_weight import QuantizedWeight

SCALE_TYPE = torch.float16
BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbouring outputs stands at each place of a word."""


def entries(layer: str, shape: tuple[int, int], scheme: Scheme) -> tuple[Entry, ...]:
    """Return what a quantized layer of `shape` [out, in] is stored as, without its bias."""
    rows, columns = shape
    groups = columns // scheme.weights.group_size if scheme.weights.group_size > 0 else 1
    return (
        Entry(f"{layer}.qweight", torch.int32, (columns, rows // len(ORDER))),
        Entry(f"{layer}.qzeros", torch.int32, (groups, rows // len(ORDER))),
        Entry(f"{layer}.scales", SCALE_TYPE, (groups, rows)),
    )


def tensors(layer: str, weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors that `entries` announces."""
    rows, groups = weight.values.shape[0], weight.scales.shape[1]
    if weight.zero_points is None:
        zeros = np.full((groups, rows), 1 << (BITS - 1), np.uint8)
    else:
        zeros = as_unsigned(weight.zero_points, BITS).T  # [groups, out]
    stored = {
        "qweight": torch.from_numpy(_pack(as_unsigned(weight.values, BITS).T)),  # [in, out / 8]
        "qzeros": torch.from_numpy(_pack(zeros)),
        "scales": torch.from_numpy(np.ascontiguousarray(weight.scales.T)).to(SCALE_TYPE),
    }
    return {f"{layer}.{name}": tensor for name, tensor in stored.items()}


def _pack(values: np.ndarray) -> np.ndarray:
    """Pack uint8 below 16, [rows, out], into int32 [rows, out / 8]."""
    rows, n = values.shape
    ordered = values.reshape(rows, -1, len(ORDER))[:, :, ORDER]  # [rows, words, 8]
    return pack_bits(np.ascontiguousarray(ordered.reshape(rows, n)), BITS)


def quantization_config(schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json.

    `schemes`: by layer, all the same (see `checkpoint_problems`). `ignore`: layers that stay float; readers leave out
    every layer whose name holds one of these.
    """
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": next(iter(schemes.values())).weights.group_size,
        "zero_point": True,
        "modules_to_not_convert": list(ignore),
    }
