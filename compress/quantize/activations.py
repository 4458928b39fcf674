"""What engines compute with in place of a layer's inputs and of cached keys and values: 8 bits, rounded as they run.

The arithmetic is compressed-tensors' own (levels, clamping, the scale of a row of zeros), so that what is scored is
what transformers computes of the checkpoint; engines' kernels differ from it in the last level of a value at most.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from compress.formats.schemes import ActivationScheme, KvScheme


@functools.cache
def input_arguments(scheme: ActivationScheme, symmetric: bool = True) -> Any:
    """Return the library's record of how a layer's inputs are rounded: each token for itself, or by a stored scale."""
    from compressed_tensors.quantization import QuantizationArgs

    strategy = "token" if scheme.dynamic else "tensor"
    return QuantizationArgs(
        num_bits=scheme.bits, type=scheme.kind, symmetric=symmetric, strategy=strategy, dynamic=scheme.dynamic
    )


@functools.cache
def cache_arguments(scheme: KvScheme) -> Any:
    """Return the library's record of how keys and values are rounded: by one stored scale each."""
    from compressed_tensors.quantization import QuantizationArgs

    kind = "int" if scheme == "int8" else "float"
    return QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="tensor", dynamic=False)


def round_inputs(x: Tensor, scheme: ActivationScheme, scale: float | None = None, symmetric: bool = True) -> Tensor:
    """Return `x` [..., in] as the engine computes with it. `scale`: the stored one of a scheme that is not dynamic.

    Not `symmetric`: each token has a zero point beside its scale, which a scheme does not say, but a kernel may do.
    """
    arguments = input_arguments(scheme, symmetric)
    if not scheme.dynamic:
        if scale is None:
            raise ValueError("inputs with a stored scale were given none")
        return _round(x, torch.tensor([scale], device=x.device), None, arguments)
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    rows = x.reshape(1, -1, x.shape[-1])  # the library takes [tokens, in], as experts read it, for one tensor's scale
    scales, zero_points = compute_dynamic_scales_and_zp(rows, arguments, torch.nn.Identity())  # [1, tokens, 1]
    return _round(rows, scales, zero_points, arguments).reshape(x.shape)


def round_cached(x: Tensor, scheme: KvScheme, scale: float) -> Tensor:
    """Return keys or values as a cache in 8 bits gives them back."""
    return _round(x, torch.tensor([scale], device=x.device), None, cache_arguments(scheme))


def _round(x: Tensor, scales: Tensor, zero_points: Tensor | None, arguments: Any) -> Tensor:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    rounded: Tensor = fake_quantize(x, scales.to(x.dtype), zero_points, arguments)
    return rounded
