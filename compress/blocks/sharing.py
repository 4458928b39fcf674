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
        """Return whether the micro-batch of that number is this process's."""
        return index % self.size == self.rank


def share() -> Share:
    """Return this process's share; the first call joins the group of a `torchrun` launch.

    RuntimeError if the group is not as large as WORLD_SIZE says.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or _ALONE.get():
        return Share()
    import torch.distributed as dist

    if not dist.is_initialized():
        # Its functions' defaults hold the group that there is when it is first imported. Imported later, it would keep
        # the group's threads alive past `_leave_group`, and one that frees a tensor while Python ends aborts.
        import torch.distributed.nn.functional  # noqa: F401

        dist.init_process_group("gloo")
        atexit.register(_leave_group)
    if dist.get_world_size() != size:
        raise RuntimeError(f"{size} processes were launched, but {dist.get_world_size()} found each other")
    return Share(dist.get_rank(), size)


def _leave_group() -> None:
    """Leave the group before the process ends: a member that disappears aborts the others."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Make this process's share the whole while the context is open, for work that the others have no part in."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def main_process() -> bool:
    """Return whether this is the process that writes files."""
    return share().rank == 0


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Return the sum over all processes, the same bits in each: floats are added in float64; the type stays.

    With one process the tensor itself.
    """
    if share().size == 1:
        return tensor
    import torch.distributed as dist

    total = tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True).contiguous()
    dist.all_reduce(total)
    return total.to(tensor.dtype)


def gather_from_processes(value: Any) -> list[Any]:
    """Return every process's value (anything that can be pickled), in their order."""
    size = share().size
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def from_main(value: Any) -> Any:
    """Return the first process's value, in every process."""
    return gather_from_processes(value)[0]


def wait() -> None:
    """Wait until all processes have come here."""
    if share().size > 1:
        import torch.distributed as dist

        dist.barrier()
