"""Where passes compute: the processor, or a GPU, one for each process of a launch.

Weights are read to host memory and moved a block at a time; what leaves a block (integers, new values) is on the host.
Random numbers are drawn on the host and moved, so that they are the same wherever the work runs. Results on two devices
are equal but for the rounding of sums in another order; a cache does not tell them apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import torch
from accelerate.utils.memory import (  # type: ignore[import-untyped]
    clear_device_cache,
    should_reduce_batch_size,
)

from compress.errors import PassError

CPU = torch.device("cpu")
HELD_PART = 0.25
"""Of the memory that a device has free before the first block; the rest is for a block and the work on it."""
LEAST_ROWS = 128
"""Tokens at once below which it is not the tokens that a device has no room for."""
T = TypeVar("T")


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


def explain_no_device(wanted: str) -> str:
    """Return why passes cannot run on what a recipe asks for, and the way out; "" where they can."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = wanted.partition(":")
    if kind == "cpu" or (kind == "auto" and not there):
        return ""
    if not there:
        built = f"was built for CUDA {torch.version.cuda}, but sees no GPU" if torch.version.cuda else "has no CUDA"
        way = "see `nvidia-smi`" if torch.version.cuda else "install a build of torch for CUDA (pytorch.org, Get Started)"
        return f"{wanted} was asked for, and the installed torch {version('torch')} {built}; {way}, or use device: auto"
    if number and local > 1:
        return f"{wanted} is one GPU, and each of the {local} processes needs its own; use device: cuda"
    if (int(number) if number else local - 1) >= there:
        return f"{wanted} was asked for by {local} process(es), and torch sees {there} GPU(s), numbered from 0"
    return ""


def room_for_activations(device: torch.device) -> int:
    """Return the bytes of a device's memory in which activations may stay between blocks; 0 of the processor."""
    return 0 if device.type == "cpu" else int(HELD_PART * torch.cuda.mem_get_info(device)[0])


def run_with_fewer_rows(run: Callable[[int | None], T], usual: int, log: Callable[[str], None]) -> T:
    """Return `run(None)`; where a device has no memory for it, `run` of half of `usual` rows at once, and so on.

    PassError where not even LEAST_ROWS fit.
    """
    rows: int | None = None
    while True:
        try:
            return run(rows)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
        # Only beyond the handler is free what the failed frames held.
        clear_device_cache(garbage_collection=True)
        rows = (rows or usual) // 2
        if rows < LEAST_ROWS:
            raise PassError(
                f"the device has no memory for the work on one block, not even with {2 * rows} tokens at once; use "
                "device: cpu, or a GPU with more memory"
            )
        log(f"the device's memory is full; going on with {rows} tokens at once")
