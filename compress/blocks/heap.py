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
    """From now on, in this process. Nothing where there is no glibc."""
    if _library() is not None:
        _library().mallopt(MMAP_THRESHOLD, LARGE)


def return_all() -> None:
    """Give the system what is free now."""
    if _library() is not None:
        _library().malloc_trim(0)


@cache
def _library() -> Any:
    """glibc, or None."""
    try:
        library = ctypes.CDLL("libc.so.6")
        return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
    except OSError:
        return None
