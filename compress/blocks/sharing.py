"""Several processes that share the calibration data: who this one is, and sums over all. One process: identities."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALONE = ContextVar("alone", default=False)


@dataclass(frozen=True)
class Share:
    """This process among those that work together."""

    rank: int = 0
    size: int = 1

    def mine(self, index: int) -> bool:
        """True if the micro-batch of that number is this process's."""
        return index % self.size == self.rank


def share() -> Share:
    """Joins the group of a `torchrun` launch on the first call. RuntimeError if the group is not as large as said."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or _ALONE.get():
        return Share()
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
        atexit.register(_leave)
    if dist.get_world_size() != size:
        raise RuntimeError(f"{size} processes were launched, but {dist.get_world_size()} found each other")
    return Share(dist.get_rank(), size)


def _leave() -> None:
    """Take leave of the group before the process ends: one that is left without a word aborts the others."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Inside, this process does by itself what the others have no part in: its share is the whole."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def main_process() -> bool:
    """True for the one that writes files."""
    return share().rank == 0


def summed(tensor: Tensor) -> Tensor:
    """The sum over all processes (the same bits in each), added in float64 where it is floating point; its own type.

    With one process the tensor itself.
    """
    if share().size == 1:
        return tensor
    import torch.distributed as dist

    total = tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
    dist.all_reduce(total)
    return total.to(tensor.dtype)


def gathered(value: Any) -> list[Any]:
    """Every process's value (anything that can be pickled), in their order."""
    size = share().size
    if size == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * size
    dist.all_gather_object(found, value)
    return found


def from_main(value: Any) -> Any:
    """The first process's value, in every process."""
    return gathered(value)[0]


def wait() -> None:
    """Go on when all have come here."""
    if share().size > 1:
        import torch.distributed as dist

        dist.barrier()
