"""Sizes and places that are known while a model is exported: code that looks at them finds numbers.

What a tower computes of how many patches an image has, and where they lie, depends on no pixel and on no weight. The
exporter, and a run by shapes alone, would forget its values, at which the model's own code looks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes as in_earnest
from torch.utils._pytree import tree_leaves

__all__ = ["KnownValues", "in_earnest"]

SIZED = (Tensor.view, Tensor.reshape, Tensor.expand, Tensor.repeat, Tensor.narrow, Tensor.unflatten)
"""What takes sizes one by one."""
JOINED = (torch.stack, torch.cat)
"""What takes tensors in a list."""
INDEXED = (Tensor.__getitem__, Tensor.__setitem__)


class KnownValues(TorchFunctionMode):
    """Compute in earnest what depends on known tensors alone, and give it as numbers where code takes sizes of them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        with in_earnest():
            if not any(map(_is_unknown, tree_leaves((args, named)))):
                return func(*args, **named)
            if func not in JOINED:
                args = [arg if isinstance(arg, Tensor) and func not in SIZED else _to_numbers(arg) for arg in args]
                named = {name: arg if isinstance(arg, Tensor) else _to_numbers(arg) for name, arg in named.items()}
            if func in INDEXED:
                args = [args[0], _list_places(args[1]), *args[2:]]
        return func(*args, **named)


def _to_numbers(value: Any) -> Any:
    """Return known tensors of one number as that, within slices, tuples and lists, too."""
    if isinstance(value, Tensor):
        return value if value.dim() or _is_unknown(value) else value.item()
    if isinstance(value, slice):
        return slice(*map(_to_numbers, (value.start, value.stop, value.step)))
    return type(value)(map(_to_numbers, value)) if type(value) in (tuple, list) else value


def _list_places(key: Any) -> Any:
    """Return a key with the places of known masks: what they choose has a size that is known, too."""
    parts = key if isinstance(key, tuple) else (key,)
    masks = [isinstance(part, Tensor) and part.dtype == torch.bool and not _is_unknown(part) for part in parts]
    if not any(masks):
        return key
    places = (part.nonzero(as_tuple=True) if mask else (part,) for part, mask in zip(parts, masks, strict=True))
    return tuple(itertools.chain.from_iterable(places))


def _is_unknown(value: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor | nn.Parameter) or value.is_meta
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
