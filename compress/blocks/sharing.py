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
        # Tensors on a GPU travel by NCCL, those in main memory and what is pickled by gloo, whichever a pass has.
        nccl = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo")
    if _Group.ours is None:
        _Group.ours = dist.new_group()
        atexit.register(_leave_group)
    if dist.get_world_size() != size:
        raise RuntimeError(f"{size} processes were launched, but {dist.get_world_size()} found each other")
    return Share(dist.get_rank(), size)


class _Group:
    """The group that our tensors travel in.

    Not the default one, which cannot be left: what is imported of torch after it was joined (`fsdp`, `optim`,
    `nn.functional`) keeps it in the defaults of functions. Its threads would live on, and one that frees a tensor while
    Python ends aborts the process.
    """

    ours: Any = None


def _leave_group() -> None:
    """Leave the groups before the process ends: a member that disappears aborts the others."""
    import torch.distributed as dist

    _Group.ours = None
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
    dist.all_reduce(total, group=_Group.ours)
    return total.to(tensor.dtype)


def gather_from_processes(value: Any) -> list[Any]:
    """Return every process's value (anything that can be pickled), in their order."""
    size = share().size
    if size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=_Group.ours)
    return values


def from_main(value: Any) -> Any:
    """Return the first process's value, in every process."""
    return gather_from_processes(value)[0]


def wait() -> None:
    """Wait until all processes have come here."""
    if share().size > 1:
        import torch.distributed as dist

        dist.barrier(_Group.ours)
