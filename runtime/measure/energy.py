"""Energy of a model's calls, where the machine counts it: the processor's (RAPL) or the GPU's (NVML)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from runtime.backends import find_backend
from runtime.bundle.columns import Array

POWERCAP = Path("/sys/class/powercap")
"""Linux's counters of processors by Intel and AMD: `intel-rapl:N` is package N, whoever made it."""
BLOCK_S = 0.25
"""Calls of one model in a row: a counter that moves each millisecond is then read to within half a percent."""
BLOCKS = 2
"""Blocks of each model in a process."""


class Meter(Protocol):
    """What counts energy since some time."""

    def joules(self) -> float:
        """Return what was used since then."""
        ...


@dataclass
class Packages:
    """All processors of the machine, whose counters wrap around."""

    counters: Sequence[tuple[Path, float]]
    """A file of microjoules, and the joules at which it starts again at 0."""
    last: list[float]
    total: float = 0.0

    def joules(self) -> float:
        """Return what all packages used since the first call, idle power and other work included."""
        now = [_read_joules(path) for path, _ in self.counters]
        for (_, span), before, after in zip(self.counters, self.last, now, strict=True):
            self.total += after - before if after >= before else after - before + span
        self.last = now
        return self.total


@dataclass(frozen=True)
class FirstGpu:
    """The first NVIDIA GPU, from the driver's own counter."""

    read: Callable[[], int]
    """Millijoules."""

    def joules(self) -> float:
        """Return what it used since its driver was loaded."""
        return self.read() / 1000


def find_meter(backend: str) -> Meter | str:
    """Return what counts the energy of calls on a backend, or why nothing does here."""
    return _find_gpu() if find_backend(backend).on_gpu else find_packages(POWERCAP)


def find_packages(folder: Path) -> Packages | str:
    """Return the processors' counters, or why there are none."""
    places = sorted(path for path in folder.glob("intel-rapl:*") if re.fullmatch(r"intel-rapl:\d+", path.name))
    if not places:
        return f"this machine shows no energy counters ({folder}/intel-rapl:*); virtual machines seldom do"
    try:
        counters = [(path / "energy_uj", _read_joules(path / "max_energy_range_uj")) for path in places]
        return Packages(counters, [_read_joules(path) for path, _ in counters])
    except PermissionError as error:
        return f"{error.filename} is for root alone; run as root, or let others read it: chmod a+r"
    except (OSError, ValueError) as error:
        return f"the energy counters cannot be read: {error}"


def measure_energy(meter: Meter, works: Sequence[Callable[[int], object]], amounts: Sequence[int]) -> Array:
    """Return joules for each piece of work, float64 [works, BLOCKS]: blocks of each in turn.

    `works`: what does the n-th call; `amounts`: the pieces of work that a call of it does.
    """
    joules = np.empty((len(works), BLOCKS))
    for block in range(BLOCKS):
        for m, (work, amount) in enumerate(zip(works, amounts, strict=True)):
            calls, before, until = 0, meter.joules(), time.perf_counter() + BLOCK_S
            while not calls or time.perf_counter() < until:
                work(calls)
                calls += 1
            joules[m, block] = (meter.joules() - before) / (calls * amount)
    return joules


def _find_gpu() -> Meter | str:
    try:
        from cuda.bindings import nvml
    except ImportError:
        return "the GPU's energy is read by cuda-bindings 13 or newer: pip install -U cuda-bindings"
    try:
        nvml.init_v2()
        handle = nvml.device_get_handle_by_index_v2(0)
        meter = FirstGpu(lambda: int(nvml.device_get_total_energy_consumption(handle)))
        meter.joules()
    except (RuntimeError, nvml.NvmlError) as error:  # the first is what its loader raises
        return f"the GPU's energy cannot be read: {error}"
    return meter


def _read_joules(path: Path) -> float:
    return int(path.read_text()) / 1e6
