"""What a killed training run goes on from: one safetensors file, whose header holds the numbers as JSON. No pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

Tensors = dict[str, Tensor]
RECORD = "record"


def module_state(module: nn.Module) -> Tensors:
    """Parameters and buffers by name, on the CPU; tied ones once. Copies."""
    return {name: _plain_copy(tensor) for name, tensor in distinct(module).items()}


def distinct(module: nn.Module) -> Tensors:
    """Parameters and buffers by name, as the module holds them; tied ones once, by their first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def restore_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The inverse of `module_state`: values are copied into the tensors that are there."""
    own = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in state.items():
            own[name].copy_(value)


def optimizer_state(optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's tensors as "<parameter's number>.<key>"."""
    found = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{number}.{key}"] = _plain_copy(value)
    return found


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """The inverse. A tensor of a parameter's shape gets its layout in memory, too: sums then round as they did."""
    parameters = _parameters(optimizer)
    for name, value in state.items():
        number, _, key = name.partition(".")
        parameter = parameters[int(number)]
        like = torch.empty_like(parameter) if value.shape == parameter.shape else torch.empty_like(value)
        optimizer.state[parameter][key] = like.copy_(value)


def write_state(path: Path, tensors: Tensors, record: Mapping[str, Any]) -> None:
    """Under another name first, then renamed: there is a whole file at any instant."""
    draft = path.with_suffix(".draft")
    save_file(tensors, draft, {RECORD: json.dumps(record)})
    os.replace(draft, path)


def read_state(path: Path) -> tuple[Tensors, dict[str, Any]] | None:
    """None where there is no file, or none that is whole."""
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {})[RECORD])
            return {name: file.get_tensor(name) for name in file.keys()}, record  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError):
        return None


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def unprefixed(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}


def _plain_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
