"""The keys and values that attention computes with, seen and exchanged where it computes.

That is after norms and positions were put into the keys, as a cache holds them; a projection's output shows neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.blocks.skeleton import StopForward
from compress.errors import PassError

Exchange = Callable[[Literal["key", "value"], Tensor], Tensor]
"""Takes keys or values [..., tokens, head size] (or keys transposed), and gives what attention goes on with."""

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
_WRITTEN_OUT: tuple[Literal["key", "value"], ...] = ("key", "value")
"""What the products of four dimensions read on their right, in order: q k^T and p v."""


def exchange_keys_and_values(attention: nn.Module, name: str, exchange: Exchange) -> None:
    """Let `exchange` see and replace all keys and values of a module; `del attention.forward` ends it.

    PassError, naming the module, from a call whose attention is neither torch's fused one nor two matrix products.
    """
    inner = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mode = _Attention(exchange)
        try:
            with mode:
                out = inner(*args, **kwargs)
        except StopForward:
            mode.check(name)
            raise
        mode.check(name)
        return out

    attention.forward = forward


class _Attention(TorchFunctionMode):
    """One call of an attention module."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        self.n_products, self.fused = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = list(args), dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.fused = True
            for place, kind in enumerate(_WRITTEN_OUT, 1):
                if len(args) > place:
                    args[place] = self.exchange(kind, args[place])
                else:
                    kwargs[kind] = self.exchange(kind, kwargs[kind])
        elif func in _PRODUCTS and args[1].dim() == 4:
            if self.n_products < len(_WRITTEN_OUT):
                args[1] = self.exchange(_WRITTEN_OUT[self.n_products], args[1])
            self.n_products += 1
        return func(*args, **kwargs)

    def check(self, name: str) -> None:
        if not self.fused and self.n_products != len(_WRITTEN_OUT):
            raise PassError(
                f"kv_cache: {name}: no keys and values were seen; its attention is neither "
                "scaled_dot_product_attention nor two matrix products"
            )
