"""Small questions about modules and what they give."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.blocks.trace import is_layer


def layers_of(block: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """Return the layers of a block by full plain name. `name`: the block's path in the model."""
    modules = {plain(".".join(part for part in (name, path) if part)): layer for path, layer in block.named_modules()}
    return {path: layer for path, layer in modules.items() if is_layer(layer)}


def own_names(path: str, part: nn.Module) -> list[str]:
    """Return the full names of a module's own parameters, those of its children left out."""
    return [f"{path}.{key}" if path else key for key, value in part._parameters.items() if value is not None]


def is_table(part: nn.Module) -> bool:
    """Return whether a module is an embedding that only looks rows up, in torch's own way."""
    return type(part) is nn.Embedding and part.max_norm is None


def is_real(parameter: nn.Parameter | None) -> bool:
    """Return whether a parameter is there and has values."""
    return parameter is not None and parameter.device.type != "meta"


def as_float(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    """Return a module's output in float32; a forward hook."""
    return out.float()


def no_data(i: int) -> Tensor:
    """Raise IndexError: the forward of a block without data."""
    raise IndexError("this stream has no data")
