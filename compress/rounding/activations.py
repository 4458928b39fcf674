"""What engines compute with in place of a layer's inputs and of cached keys and values: few bits, rounded as they run.

The arithmetic is compressed-tensors' own (levels, clamping, the scale of a row of zeros), so that what is scored is
what transformers computes of the checkpoint; engines' kernels differ from it in the last level of a value at most.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from compress.formats.schemes import ActivationScheme, KvScheme

SCALE_TYPES = {"e4m3": torch.float8_e4m3fn, "e8m0": torch.uint8}
"""How a scale is stored -> the library's type for it."""


@functools.cache
def input_arguments(scheme: ActivationScheme, symmetric: bool = True) -> Any:
    """Return the library's record of how a layer's inputs are rounded: by token or group, or by a stored scale.

    As its presets have it, which say of what is left to them what they leave.
    """
    from compressed_tensors.quantization import QuantizationArgs

    two_levels = scheme.scales == "e4m3"
    strategy = (
        "tensor_group" if two_levels else "group" if scheme.group_size > 0 else "token" if scheme.dynamic else "tensor"
    )
    more = {} if scheme.scales == "float" else dict.fromkeys(("scale_dtype", "zp_dtype"), SCALE_TYPES[scheme.scales])
    return QuantizationArgs(
        num_bits=scheme.bits,
        type=scheme.kind,
        symmetric=symmetric,
        strategy=strategy,
        group_size=scheme.group_size if scheme.group_size > 0 else None,
        dynamic="local" if two_levels else scheme.dynamic,
        **more,
        **({"observer": "static_minmax"} if two_levels else {}),
    )


@functools.cache
def cache_arguments(scheme: KvScheme) -> Any:
    """Return the library's record of how keys and values are rounded: by one stored scale each."""
    from compressed_tensors.quantization import QuantizationArgs

    kind = "int" if scheme == "int8" else "float"
    return QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="tensor", dynamic=False)


def round_inputs(x: Tensor, scheme: ActivationScheme, scale: float | None = None, symmetric: bool = True) -> Tensor:
    """Return `x` [..., in] as the engine computes with it. `scale`: the stored one of a scheme that has one.

    Not `symmetric`: each token has a zero point beside its scale, which a scheme does not say, but a kernel may do.
    """
    arguments = input_arguments(scheme, symmetric)
    if scheme.has_stored_scale and scale is None:
        raise ValueError("inputs with a stored scale were given none")
    if not scheme.dynamic:
        return _round(x, torch.tensor([scale], device=x.device), None, arguments)
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    rows = x.reshape(1, -1, x.shape[-1])  # the library takes [tokens, in], as experts read it, for one tensor's scale
    whole = None if scale is None else global_scale(scale)
    # [1, tokens, groups]; a token's scale as it is, groups' in the type that the record gives
    scales, zero_points = compute_dynamic_scales_and_zp(rows, arguments, torch.nn.Identity(), whole)
    return _round(rows, scales, zero_points, arguments, whole).reshape(x.shape)


def global_scale(scale: float) -> Tensor:
    """Return what files hold, float32 [1], for what an E4M3 scale of 1 stands for: they divide by it."""
    return torch.tensor([1 / scale], dtype=torch.float32)


def round_cached(x: Tensor, scheme: KvScheme, scale: float) -> Tensor:
    """Return keys or values as a cache in 8 bits gives them back."""
    return _round(x, torch.tensor([scale], device=x.device), None, cache_arguments(scheme))


def _round(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, arguments: Any, whole: Tensor | None = None
) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    rounded: Tensor = fake_quantize(x, scales.to(x.dtype), zero_points, arguments, whole)
    return rounded
