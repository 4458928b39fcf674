"""Where passes compute: the processor, or a GPU, one for each process of a launch.

Weights are read to host memory and moved a block at a time; what leaves a block (integers, new values) is on the host.
Random numbers are drawn on the host and moved, so that they are the same wherever the work runs. Results on two devices
are equal but for the rounding of sums in another order; a cache does not tell them apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from types import TracebackType

import torch

from compress.errors import PassError

CPU = torch.device("cpu")
LEAST_ROWS = 128
"""Tokens at once below which it is not the tokens that a device has no room for."""


def choose_device(wanted: str) -> torch.device:
    """Return the device that a recipe means by auto, cpu, cuda or cuda:n. PassError where there is none such here.

    Of several processes on one machine each gets a GPU of its own.
    """
    if why := explain_no_device(wanted):
        raise PassError(why)
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CPU
    _, _, number = wanted.partition(":")
    return torch.device("cuda", int(number) if number else int(os.environ.get("LOCAL_RANK", "0")))


def describe_device(device: torch.device) -> str:
    """Return a device as people say it: cpu, or cuda:0 (NVIDIA H100 80GB HBM3)."""
    return "cpu" if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})"


def explain_no_device(wanted: str) -> str:
    """Return why passes cannot run on what a recipe asks for, and the way out; "" where they can."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = wanted.partition(":")
    if kind == "cpu" or (kind == "auto" and not there):
        return ""
    if not there:
        cuda = torch.version.cuda
        why = f"was built for CUDA {cuda}, but sees no GPU" if cuda else "was built without CUDA"
        way = "see `nvidia-smi`" if cuda else "install a build of torch for CUDA (pytorch.org, Get Started)"
        return f"{wanted} was asked for, and the installed torch {version('torch')} {why}; {way}, or use device: auto"
    if number and local > 1:
        return f"{wanted} is one GPU, and each of the {local} processes needs its own; use device: cuda"
    if (int(number) if number else local - 1) >= there:
        return f"{wanted} was asked for by {local} process(es), and torch sees {there} GPU(s), numbered from 0"
    return ""


def room_for_activations(device: torch.device) -> int:
    """Return the bytes of a device's memory in which activations may stay between blocks; 0 of the processor."""
    # three quarters are for a block and the work on it
    return 0 if device.type == "cpu" else int(0.25 * torch.cuda.mem_get_info(device)[0])


class DeviceAttempt(AbstractContextManager[None]):
    """Work with so many `rows` at once (None: as many as usual); the context ends quietly where the device is full."""

    def __init__(self, rows: int | None) -> None:
        self.rows, self.is_full = rows, False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, RuntimeError):
            # Here, because a plan is made without it, and it takes half a second to import.
            from accelerate.utils.memory import should_reduce_batch_size  # type: ignore[import-untyped]

            self.is_full = should_reduce_batch_size(error)
        return self.is_full


def halve_rows(
    usual: int, log: Callable[[str], None], least: int = LEAST_ROWS, what: str = "tokens"
) -> Iterator[DeviceAttempt]:
    """Yield attempts at some work, each of which is its context, until one does not fill the device.

    The first is with as many rows as usual, the next with half of `usual`, and so on. `what`: the rows are. PassError
    where not even `least` fit.
    """
    attempt = DeviceAttempt(None)
    yield attempt
    while attempt.is_full:
        from accelerate.utils.memory import clear_device_cache

        # Only beyond the handler is free what the failed frames held.
        clear_device_cache(garbage_collection=True)
        rows = (attempt.rows or usual) // 2
        if rows < least:
            raise PassError(
                f"the device has no memory for the work, not even with {2 * rows} {what} at once; use device: cpu, or "
                "a GPU with more memory"
            )
        log(f"the device's memory is full; going on with {rows} {what} at once")
        attempt = DeviceAttempt(rows)
        yield attempt
