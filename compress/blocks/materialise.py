"""Modules without weights: made, filled from a store, emptied again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.store import WeightStore

WRAPPER = "wrapped."
"""The attribute under which a Hugging Face model lies in its wrapper; not part of the plain names."""
Holders = dict[str, list[tuple[nn.Module, str]]]
"""Parameter's plain name -> where it is held: modules, and its name in each."""


class NamedParts(nn.Module):
    """A module that is known by the names of its tensors alone, as a checkpoint has them: it has no forward."""


@contextmanager
def empty_weights() -> Iterator[None]:
    """Put parameters on the meta device as they are made while the context is open; buffers are real.

    Parameters that are shared stay shared.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def copy_without_weights(module: nn.Module) -> nn.Module:
    """Return a copy of a module, in eval mode, with its parameters on meta and its buffers real."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), False) for p in module.parameters()}
    memo |= {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    return copy.deepcopy(module, memo).eval()


def memory_store(module: nn.Module) -> WeightStore:
    """Return a store of the module's state, held by reference; tied parameters once."""
    held = {plain(name): tensor for name, tensor in module.state_dict(keep_vars=True).items()}
    tied = tied_names(module)
    return WeightStore({name: tensor.detach() for name, tensor in held.items() if name not in tied}, tied)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return parameter -> the first in the module's order that is the same object, for tied ones; plain names."""
    owners: dict[int, str] = {}
    tied = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        owner = owners.setdefault(id(tensor), plain(name))
        if owner != plain(name):
            tied[plain(name)] = owner
    return tied


def fill(
    module: nn.Module,
    read: Callable[[str], Tensor],
    tied: Mapping[str, str],
    prefix: str = "",
    only: set[int] | None = None,
) -> None:
    """Give every parameter and persistent buffer of `module` (changed in place) its value; tied ones share it.

    `prefix`: the module's own path in the model. `only`: of the modules with these ids.
    """
    done: dict[str, nn.Parameter] = {}
    for part, key, full in _iter_tensors(module, prefix):
        if only is not None and id(part) not in only:
            continue
        if key in part._parameters:
            owner = tied.get(full, full)
            if owner not in done:
                done[owner] = nn.Parameter(read(owner), requires_grad=False)
            part._parameters[key] = done[owner]
        else:
            part._buffers[key] = read(full)


def empty(module: nn.Module) -> None:
    """Take the parameters' values away again (changed in place)."""
    for part in module.modules():
        for key, old in part._parameters.items():
            if old is not None and old.device.type != "meta":
                part._parameters[key] = nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False)


def holders(module: nn.Module, tied: Mapping[str, str], prefix: str = "") -> Holders:
    """Return where each parameter is held: a tied one's name leads to itself alone, its owner's to all."""
    places: Holders = {}
    for part, key, full in _iter_tensors(module, prefix):
        if key in part._parameters:
            places.setdefault(full, []).append((part, key))
            if full in tied:
                places.setdefault(tied[full], []).append((part, key))
    return places


def plain(name: str) -> str:
    """Return a module's or parameter's name without the wrapper around a Hugging Face model."""
    return name.removeprefix(WRAPPER)


def _iter_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module inside, name in it, full plain name) of every parameter and persistent buffer."""
    for path, part in module.named_modules():
        for key in [*part._parameters, *(key for key in part._buffers if key not in part._non_persistent_buffers_set)]:
            if (part._parameters.get(key) if key in part._parameters else part._buffers[key]) is not None:
                yield part, key, plain(".".join(name for name in (prefix, path, key) if name))
