"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")
"""Of a container, as it sees itself."""


def available_bytes() -> int:
    """Return the memory that could be had now: of the machine, of the container and of the process's own limit."""
    return max(0, min([_read_machine_memory(), *_read_container_memory(), *_read_process_memory()]))


def _read_machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_container_memory() -> list[int]:
    try:
        most, taken = ((_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        details = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return []
    # What files left in memory counts as taken, and is given up as soon as it is needed.
    return [] if most == "max" else [int(most) - int(taken) + int(details.get("inactive_file", 0))]


def _read_process_memory() -> list[int]:
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return []
    return [] if limit == resource.RLIM_INFINITY else [limit - taken]
