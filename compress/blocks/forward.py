"""One forward pass of a module, the names of what it gives, and hooks that end with what asked for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.errors import SourceError


@contextlib.contextmanager
def remove_hooks_on_exit(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks when the context ends, whatever happened inside."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def read_part(layers: Iterable[nn.Module], row: int, tokens: slice) -> Iterator[None]:
    """Let layers that read samples, [B, T, in], read these tokens of one of them alone."""

    def narrow(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][row : row + 1, tokens], *args[1:]) if args and args[0].dim() == 3 else args

    with remove_hooks_on_exit([layer.register_forward_pre_hook(narrow) for layer in layers]):
        yield


def run(module: nn.Module, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the real forward pass without gradients and return the outputs by name."""
    with torch.inference_mode():
        return name_outputs(module(**feeds))


def name_outputs(out: Any) -> dict[str, Tensor]:
    """Name a forward's outputs: "output" for one tensor, "output_k" for several; a dict keeps its names.

    SourceError for anything else.
    """
    if isinstance(out, Tensor):
        return {"output": out}
    named = {f"output_{k}": item for k, item in enumerate(out)} if isinstance(out, (tuple, list)) else out
    if not isinstance(named, Mapping) or not all(isinstance(item, Tensor) for item in named.values()):
        kinds = ", ".join(type(item).__name__ for item in named.values()) if isinstance(named, Mapping) else ""
        raise SourceError(
            f"model: forward gives {type(out).__name__}{f' of {kinds}' if kinds else ''}; a tensor, or tensors in a "
            "tuple or dict, can be exported"
        )
    return {str(name): item for name, item in named.items()}
