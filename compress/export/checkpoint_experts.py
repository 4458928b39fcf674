"""Experts of a mixture that stay float, put back into the stacks that transformers keeps them in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from compress.blocks.experts import ExpertPart, Experts, find_stacked_parts
from compress.blocks.materialise import plain


def float_stacks(module: nn.Module, quantized: Iterable[str]) -> dict[str, ExpertPart]:
    """Return where each float expert's parameter lies in its layer's stack, of mixtures with no quantized expert.

    Empty for modules that are none of transformers', whose experts stay single.
    """
    wrapped: Any = getattr(module, "wrapped", module)
    config = getattr(wrapped, "config", None)
    layers = tuple(quantized)
    mixtures = [plain(name) for name, part in module.named_modules() if isinstance(part, Experts)]
    mixtures = [name for name in mixtures if not any(layer.startswith(f"{name}.") for layer in layers)]
    if not mixtures or not hasattr(config, "model_type"):
        return {}
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        stacked = type(wrapped)(copy.deepcopy(config))
    return {
        parameter: part
        for name in mixtures
        for parameter, part in find_stacked_parts(stacked.get_submodule(name), name).items()
    }


def stack_shape(parts: Mapping[str, ExpertPart], shape: Callable[[str], tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the stack that `parts` (all of one stack) make; `shape` gives that of one part, by name."""
    name, part = next(iter(parts.items()))
    rows, *rest = shape(name)
    single = (rows * (2 if part.half else 1), *rest)
    return (1 + max(part.expert for part in parts.values()), *(single[::-1] if part.transposed else single))
