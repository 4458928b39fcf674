"""Complex numbers of rotary embeddings as pairs of real ones, which is all that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Rotation:
    """Complex numbers [...] as real and imaginary parts [..., 2], with what models do with those by which keys turn."""

    def __init__(self, pairs: Tensor) -> None:
        self.pairs = pairs

    def __mul__(self, other: Rotation | Tensor | float) -> Rotation:
        if isinstance(other, Tensor):
            return Rotation(self.pairs * other[..., None])
        if not isinstance(other, Rotation):
            return Rotation(self.pairs * other)
        (a, b), (c, d) = self.pairs.unbind(-1), other.pairs.unbind(-1)
        return Rotation(torch.stack([a * c - b * d, a * d + b * c], dim=-1))

    __rmul__ = __mul__

    def __getitem__(self, index: Any) -> Rotation:
        index = index if isinstance(index, tuple) else (index,)
        return Rotation(self.pairs[(*index, slice(None)) if Ellipsis in index else index])

    def unsqueeze(self, dim: int) -> Rotation:
        return Rotation(self.pairs.unsqueeze(dim if dim >= 0 else dim - 1))

    def to(self, *_: Any, **__: Any) -> Rotation:
        """Return itself: a graph has no devices."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Give torch's own functions what they ask of complex numbers: `view_as_real`, and a product from the right."""
        if func is torch.view_as_real:
            return args[0].pairs
        if func in (Tensor.mul, torch.mul, Tensor.__mul__):
            return args[1] * args[0]
        return NotImplemented

    @property
    def device(self) -> torch.device:
        return self.pairs.device

    @property
    def shape(self) -> torch.Size:
        return self.pairs.shape[:-1]


class RealRotations(TorchFunctionMode):
    """Let code that is exported make Rotation in the place of complex tensors while the context is open."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.polar:
            length, angle = args
            return Rotation(torch.stack([length * angle.cos(), length * angle.sin()], dim=-1))
        if func is torch.view_as_complex:
            return Rotation(args[0])
        return func(*args, **(kwargs or {}))
