"""Weights that a module computes from other parameters: weight_norm, spectral_norm, masks, any parametrization."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Fold = Callable[[], object]


def list_computed(module: nn.Module) -> list[str]:
    """Return the names of the tensors that the module's parts compute from other parameters: "stem.weight"."""
    return [name for name, _ in _find_computed(module)]


def fold_computed(module: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Make parameters of the `wanted` tensors that are computed, in place, with their values; return their names."""
    found = [(name, fold) for name, fold in _find_computed(module) if wanted(name)]
    with torch.no_grad():
        for _, fold in found:
            fold()
    return [name for name, _ in found]


def without_computed(module: nn.Module) -> nn.Module:
    """Return the module with parameters for tensors that are computed: itself where there are none, else a copy."""
    if list_computed(module):
        module = copy.deepcopy(module)
        fold_computed(module)
    return module


def _find_computed(module: nn.Module) -> Iterator[tuple[str, Fold]]:
    """Yield (name, what makes a parameter of it), shared modules once."""
    for path, part in list(module.named_modules()):
        for key in list(getattr(part, "parametrizations", ())) if parametrize.is_parametrized(part) else ():
            yield _join(path, key), partial(_fold_parametrization, part, key)
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                yield _join(path, hook.name), partial(remove_weight_norm, part, hook.name)
            elif isinstance(hook, SpectralNorm):
                yield _join(path, hook.name), partial(remove_spectral_norm, part, hook.name)
            elif isinstance(hook, prune.BasePruningMethod):
                yield _join(path, hook._tensor_name), partial(prune.remove, part, hook._tensor_name)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _fold_parametrization(part: nn.Module, key: str) -> None:
    computed: Any = part.parametrizations[key]  # type: ignore[index]
    value = getattr(part, key).detach().clone()
    # what it is computed from may be another layer's, too, and the removal writes the value into it
    for name, original in list(computed.named_parameters(recurse=False)):
        computed.register_parameter(name, nn.Parameter(original.detach().clone()))
    kind = type(part)  # a copy has its class in common with the original, and the removal takes the tensor out of it
    part.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
    parametrize.remove_parametrizations(part, key)
    delattr(part, key)  # of several tensors the removal makes a buffer
    part.register_parameter(key, nn.Parameter(value))
