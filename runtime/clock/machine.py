"""Where a measurement was made: a speed without its machine is no fact."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from runtime.plugins import plugin_versions

CPU_FLAGS = (
    *("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimddp", "i8mm", "bf16", "sve"),
)
"""Instruction sets that decide which number format is fast: x86, then Arm."""
PACKAGES = ("numpy", "onnxruntime", "openvino", "executorch", "tokenizers", "pillow")


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(threads: int) -> dict[str, Any]:
    """Describe the machine and the libraries, plug-ins too: cpu, flags, cores, threads, load, os, python, versions."""
    model, flags = cpu_info()
    return {
        "cpu": model,
        "cpu_flags": flags,
        "cores": count_cores(),
        "threads": threads,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _find_version(name))} | plugin_versions(),
    }


def say_busy(machine: Mapping[str, Any]) -> str:
    """Return a sentence where other work had the processor ("taken", of what was timed) or all cores; else ""."""
    taken = machine.get("taken")
    if taken is not None:
        if taken <= 0.02:  # not worth a word
            return ""
        return f"Other work had the processor for {taken:.0%} of the time that was measured; that is not counted."
    load, cores = machine.get("load_average"), machine.get("cores")
    if load is None or cores is None or load <= cores:
        return ""
    return f"The machine was busy: load average {load:g} on {cores} cores. Measure again when it is idle."


def cpu_info(path: Path = Path("/proc/cpuinfo")) -> tuple[str, list[str]]:
    """Return (model name, those of CPU_FLAGS that it has); no flags where the system does not list them."""
    if not path.exists():
        return platform.processor() or platform.machine(), []
    fields: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    listed = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name", platform.machine()), [flag for flag in CPU_FLAGS if flag in listed]


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def peak_memory_bytes() -> int:
    """Return the most resident memory this process has had: VmHWM on Linux, ru_maxrss elsewhere."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
