"""What a killed training run goes on from: one safetensors file, whose header holds the numbers as JSON. No pickles."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.errors import OutputError
from compress.store.durable import DIGEST, blame
from runtime.bundle.files import put_in_place

Tensors = dict[str, Tensor]
RECORD = "record"
SAVE_SECONDS = 10.0
"""Of work that a killed run may lose, where nothing else is said."""
SLOW_SAVE, SAVING_SHARE = 1.0, 20
"""Seconds from which a save is slow; of such a one a run then takes so many times as long before the next."""


class SavedRun:
    """The file that a training run is saved in now and then, and what an earlier run of it left there.

    `file` None: nothing is saved. `writes`: whether this process does; of several that train together one, and none
    before all have made this object, which reads. `damaged`: a file is there, but not as it was written.
    """

    def __init__(self, file: Path | None, writes: bool = True, seconds: float | None = None) -> None:
        self.file, self.writes = file, writes
        self.seconds = self.pause = SAVE_SECONDS if seconds is None else seconds
        self.left = None if file is None else read_state(file)
        self.damaged = self.left is None and file is not None and file.exists()
        self.saved = time.monotonic()

    def take(self) -> tuple[Tensors, dict[str, Any]] | None:
        """Return what an earlier run left, (tensors, record), and hold it no longer."""
        left, self.left = self.left, None
        return left

    def is_due(self) -> bool:
        """Return whether so much time has passed that the run should be saved."""
        return time.monotonic() - self.saved >= self.pause

    def save(self, tensors: Callable[[], Tensors], record: Mapping[str, Any]) -> None:
        """Write the run as it is now, in the process that does so. OutputError: it cannot be written."""
        started = self.saved = time.monotonic()
        if self.file is None or not self.writes:
            return
        write_state(self.file, tensors(), record)
        self.saved = time.monotonic()
        took = self.saved - started
        self.pause = max(self.seconds, SAVING_SHARE * took if took > SLOW_SAVE else 0.0)


def module_state(module: nn.Module) -> Tensors:
    """Copy parameters and buffers by name to the CPU; tied ones once."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in distinct(module).items()
    }


def distinct(module: nn.Module) -> Tensors:
    """Return parameters and buffers by name, as the module holds them; tied ones once, by their first name."""
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


def restore_module(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the values of a `module_state` into the tensors that are there."""
    tensors = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in state.items():
            tensors[name].copy_(value)


def optimizer_state(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's tensors, named "<parameter's number>.<key>", on the CPU; its own where they lie there."""
    tensors = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{key}"] = value.detach().cpu().contiguous()
    return tensors


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Give the optimizer, in place, the tensors that `optimizer_state` returned.

    A tensor of a parameter's shape gets its layout in memory, too: sums then round as they did.
    """
    parameters = _parameters(optimizer)
    for name, value in state.items():
        number, _, key = name.partition(".")
        parameter = parameters[int(number)]
        like = torch.empty_like(parameter) if value.shape == parameter.shape else torch.empty_like(value)
        optimizer.state[parameter][key] = like.copy_(value)


def write_state(path: Path, tensors: Tensors, record: Mapping[str, Any]) -> None:
    """Write under another name first, then rename: there is a whole file at any instant.

    OutputError: it cannot be written. Several processes may write the same file; the last one stays.
    """
    draft, text = path.with_name(f"draft-{os.getpid()}-{path.name}"), json.dumps(record)
    try:
        with blame(path):
            save_file(tensors, draft, {RECORD: text, DIGEST: _digest(tensors, text)})
            put_in_place(draft, path)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OutputError(f"{path}: cannot be written: {error}; what is finished is kept, run again") from error
    finally:
        draft.unlink(missing_ok=True)


def read_state(path: Path) -> tuple[Tensors, dict[str, Any]] | None:
    """Read (tensors, record); None if there is no file, or one in which a byte that counts is not as it was written."""
    try:
        with safe_open(path, framework="pt") as file:
            kept = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return (tensors, json.loads(kept[RECORD])) if _digest(tensors, kept[RECORD]) == kept[DIGEST] else None
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError):
        return None


def _digest(tensors: Tensors, text: str) -> str:
    """Return the sha256 (hex) of names, dtypes, shapes and values, and of the record's text."""
    sha = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        sha.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def add_prefix(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def remove_prefix(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {key.removeprefix(f"{name}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
