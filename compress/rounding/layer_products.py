"""Products of linear layers with float32 weights: in another precision, or by another library than torch chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from compress.rounding.products import Compute, multiply, products_in, rounds_sums

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What a layer gives of its input [..., in], weight [out, in] and bias [out], all float32."""


@contextmanager
def layers_in(compute: Compute, device: str) -> Iterator[None]:
    """Let linear layers multiply as `multiply` does while open; they take and give float32."""
    with products_in(compute), LayersBy(multiply_narrow) if rounds_sums(compute, device) else nullcontext():
        yield


class LayersBy(TorchFunctionMode):
    """While open, linear layers on the CPU multiply by `product`; all other operations stay as they are."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (self._multiply if func is F.linear else func)(*args, **(kwargs or {}))

    def _multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        usual = input.dtype == weight.dtype == torch.float32 and input.device.type == "cpu"
        return (self.product if usual else F.linear)(input, weight, bias)


def multiply_narrow(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in bfloat16, where no setting of torch does that."""
    rows = input.reshape(-1, input.shape[-1])
    product: Tensor = multiply(rows, weight.T, "bfloat16").view(*input.shape[:-1], len(weight))
    return product if bias is None else product + bias


def multiply_by_onednn(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in float32 by oneDNN; AttributeError where torch has no such operator. No gradients."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product
