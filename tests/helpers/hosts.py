"""A machine that is not this one: with as much memory and disk as a test says, and another processor."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from runtime.clock.machine import cpu_info
from runtime.processes import memory


@dataclass
class Host:
    """What is free: of memory, beside which no container and no limit of the process counts, and of every disk."""

    memory_bytes: float = 2**62
    disk_bytes: int = 2**50


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host, usage = Host(), shutil.disk_usage
    free = {"machine": lambda: host.memory_bytes, "container": list, "process": list}
    for whose, read in free.items():
        monkeypatch.setattr(memory, f"_read_{whose}_memory", read)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=host.disk_bytes))
    return host


@pytest.fixture
def cpuinfo(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Linux tells of the processor: "model name" and "flags", to be written anew."""
    file = tmp_path_factory.mktemp("proc") / "cpuinfo"
    shutil.copyfile("/proc/cpuinfo", file)
    monkeypatch.setattr(cpu_info, "__defaults__", (file,))  # whoever imported the function asks this file
    return file
