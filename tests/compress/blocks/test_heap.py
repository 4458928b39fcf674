"""What glibc does with freed memory, by the pages that a process of its own is given."""

from __future__ import annotations

import resource
from contextlib import nullcontext
from ctypes.util import find_library

import pytest
import torch
from child_processes import run_in_process

from compress.blocks import heap

N_TENSORS, N_NUMBERS = 50, 2**22
"""Tensors that come and go, and the numbers in each: 16 MiB."""


def count_given_pages(kept: bool) -> tuple[int, int]:
    """Return the pages given for tensors that come and go where large ones go back, then for as many afterwards."""
    heap.return_large()
    with heap.keep_freed() if kept else nullcontext():
        within = _count_for_tensors()
    return within, _count_for_tensors()


def _count_for_tensors() -> int:
    torch.zeros(N_NUMBERS)  # the first may find nothing that was freed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(N_TENSORS):
        torch.zeros(N_NUMBERS)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(find_library("c") != "libc.so.6", reason="the heap is told in glibc alone")
@pytest.mark.parametrize("kept", [True, False])
def test_freed_memory_is_kept_for_as_long_as_it_is_asked_for(kept: bool) -> None:
    within, afterwards = run_in_process(count_given_pages, kept)
    assert (10 * within < afterwards) == kept
