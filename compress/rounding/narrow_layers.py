"""Layers of float32 weights that multiply in bfloat16 and give float32, where no setting of torch does that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from compress.rounding.products import multiply


class NarrowLayers(TorchFunctionMode):
    """While open, linear layers on the CPU multiply in bfloat16; all other operations stay as they are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (_multiply if func is F.linear else func)(*args, **(kwargs or {}))


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not input.dtype == weight.dtype == torch.float32 or input.device.type != "cpu":
        return F.linear(input, weight, bias)
    product: Tensor = multiply(input, weight.T, "bfloat16")
    return product if bias is None else product + bias
