"""The GPU of this machine, as the driver's own tool tells it: no library is loaded for it."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass

QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
SECONDS = 20
"""After them a driver that hangs counts as none."""
NO_GPU = "no GPU that the driver sees; see `nvidia-smi`"


@dataclass(frozen=True)
class Gpu:
    """`capability`: "8.9"."""

    name: str
    capability: str
    driver: str


def gpu_here() -> Gpu | None:
    """Return the first GPU that the driver sees; None without one."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    parts = [part.strip() for part in done.stdout.partition("\n")[0].split(",")]
    return Gpu(*parts) if done.returncode == 0 and len(parts) == 3 else None


def platform_here() -> str:
    """Return operating system and processor, for which engines are built: "linux-x86_64"."""
    return f"{platform.system().lower()}-{platform.machine().lower()}"
