"""What glibc does with freed memory, by the pages that a process of its own is given and holds."""

from __future__ import annotations

import resource
from ctypes.util import find_library

import pytest
import torch
from child_processes import run_in_process

from compress.blocks import heap
from compress.blocks.stream import rss_mib

N_TENSORS, TENSOR_MIB = 50, 16


def count_given_pages() -> tuple[int, int, float]:
    """Return the pages given for tensors that come and go where large ones go back, and where what is freed is kept;
    and the MiB that are held afterwards beside those of before."""
    heap.return_large()
    returned, before = _count_for_tensors(), rss_mib()
    with heap.keep_freed():
        kept = _count_for_tensors()
    return returned, kept, rss_mib() - before


def _count_for_tensors() -> int:
    torch.zeros(TENSOR_MIB, 2**18)  # the first may find nothing that was freed
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(N_TENSORS):
        torch.zeros(TENSOR_MIB, 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(find_library("c") != "libc.so.6", reason="the heap is told in glibc alone")
def test_freed_memory_is_kept_for_as_long_as_it_is_asked_for() -> None:
    returned, kept, still_held = run_in_process(count_given_pages)
    assert 5 * kept < returned
    assert still_held < TENSOR_MIB / 2
