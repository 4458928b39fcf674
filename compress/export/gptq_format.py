"""The GPTQ format (AutoGPTQ's, GPTQModel's): weights packed along their inputs, unsigned, a zero point for each group.

Groups are contiguous (`desc_act` false). Symmetric weights have the zero point 2^(bits - 1), stored less one as
version 1 asks for. Asymmetric ones are written in version 2, which stores zero points as they are: in version 1 a zero
point of 0 has no representation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.export.packing import as_unsigned, count_words, pack_bits
from compress.export.shards import Entry
from compress.formats.schemes import Scheme
from compress.rounding.quantized_weight import QuantizedWeight

SCALE_TYPE = torch.float16
"""Whatever the model computes in."""


def entries(layer: str, shape: tuple[int, int], scheme: Scheme) -> tuple[Entry, ...]:
    """Return what a quantized layer of `shape` [out, in] is stored as, without its bias."""
    rows, columns = shape
    bits = scheme.weights.bits
    groups = columns // scheme.weights.group_size if scheme.weights.group_size > 0 else 1
    return (
        Entry(f"{layer}.qweight", torch.int32, (count_words(columns, bits), rows)),
        Entry(f"{layer}.qzeros", torch.int32, (groups, count_words(rows, bits))),
        Entry(f"{layer}.scales", SCALE_TYPE, (groups, rows)),
        Entry(f"{layer}.g_idx", torch.int32, (columns,)),
    )


def tensors(layer: str, weight: QuantizedWeight, scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors that `entries` announces."""
    bits = scheme.weights.bits
    rows, columns = weight.values.shape
    groups = weight.scales.shape[1]
    qweight = pack_bits(as_unsigned(weight.values, bits), bits).T  # [in * bits / 32, out]
    if weight.zero_points is None:
        zeros = np.full((groups, rows), (1 << (bits - 1)) - 1, np.uint8)
    else:
        zeros = as_unsigned(weight.zero_points, bits).T  # [groups, out]
    stored = {
        "qweight": torch.from_numpy(np.ascontiguousarray(qweight)),
        "qzeros": torch.from_numpy(pack_bits(np.ascontiguousarray(zeros), bits)),
        "scales": torch.from_numpy(np.ascontiguousarray(weight.scales.T)).to(SCALE_TYPE),
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }
    return {f"{layer}.{name}": tensor for name, tensor in stored.items()}


def quantization_config(schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` of config.json, which is all of quantize_config.json, too.

    `schemes`: by layer, all the same (see `checkpoint_problems`). `ignore`: layers that stay float; readers leave
    lm_head alone unless it is named, and the rest as `dynamic` tells them.
    """
    from compress.version import __version__

    weights = next(iter(schemes.values())).weights
    return {
        "quant_method": "gptq",
        "bits": weights.bits,
        "group_size": weights.group_size,
        "sym": weights.symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if weights.symmetric else "gptq_v2",
        "pack_dtype": "int32",
        "lm_head": "lm_head" in schemes,
        "dynamic": {f"-:^{re.escape(name)}$": {} for name in ignore if name != "lm_head"},
        "meta": {"quantizer": [f"compress:{__version__}"]},
    }
