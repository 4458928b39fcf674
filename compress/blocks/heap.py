"""What the C library keeps of freed memory: little, so that a process holds what it uses."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

MMAP_THRESHOLD = -3
"""mallopt's number for it, of glibc."""
LARGE = 4 * 2**20
"""Bytes from which a tensor gets pages of its own, which go back to the system when it is freed.

Left alone, glibc raises this to 32 MiB as tensors come and go, and a hole between two small tensors is kept: a third
more memory on a model of width 1024, against a tenth more time in its forward passes. To be set before a model is
built: the parameters that come and go there would leave a heap of holes that every later tensor spreads over.
"""


def return_large() -> None:
    """Make glibc return large tensors when they are freed, from now on, in this process; do nothing without glibc."""
    if _load_library() is not None:
        _load_library().mallopt(MMAP_THRESHOLD, LARGE)


def return_all() -> None:
    """Return all memory that is free now to the system; do nothing without glibc."""
    if _load_library() is not None:
        _load_library().malloc_trim(0)


@cache
def _load_library() -> Any:
    """Return glibc, or None where there is none."""
    try:
        library = ctypes.CDLL("libc.so.6")
        return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    except OSError:
        return None
