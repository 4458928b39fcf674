"""Energy: counters that wrap around, what is counted for each piece of work, and why nothing is."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import numpy as np
import pytest
from faults import Faults, failing
from shortcuts import few_rounds

from runtime.measure.energy import BLOCKS, find_meter, find_packages, measure_energy


def write_counter(folder: Path, name: str, microjoules: int, span: int = 1_000_000) -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{microjoules}\n")
    (folder / name / "max_energy_range_uj").write_text(f"{span}\n")
    return folder / name


def test_packages_are_added_and_counters_wrap_around(tmp_path: Path) -> None:
    write_counter(tmp_path, "intel-rapl:0", 900_000)
    write_counter(tmp_path, "intel-rapl:1", 0)
    write_counter(tmp_path, "intel-rapl:0:0", 77)  # cores of package 0, counted there
    meter = find_packages(tmp_path)
    assert not isinstance(meter, str) and meter.joules() == 0.0
    write_counter(tmp_path, "intel-rapl:0", 100_000)
    write_counter(tmp_path, "intel-rapl:1", 500_000)
    assert meter.joules() == pytest.approx(0.2 + 0.5)


def test_why_nothing_is_counted(tmp_path: Path) -> None:
    assert "shows no energy counters" in str(find_packages(tmp_path))
    write_counter(tmp_path, "intel-rapl:0", 1)
    with failing(Faults((tmp_path / "intel-rapl:0",), at=0, number=errno.EACCES)):
        assert "is for root alone" in str(find_packages(tmp_path))


def test_a_gpu_without_its_driver_has_a_word_why(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = pytest.importorskip("cuda.bindings.nvml")

    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(nvml, "init_v2", fail)
    assert find_meter("tensorrt") == "the GPU's energy cannot be read: no driver"


def test_joules_are_those_of_each_models_own_calls() -> None:
    used = itertools.count()
    total = {"joules": 0.0}

    class Meter:
        def joules(self) -> float:
            return total["joules"]

    def work(joules: float) -> None:
        next(used)
        total["joules"] += joules

    with few_rounds():
        found = measure_energy(Meter(), [lambda n: work(6.0), lambda n: work(2.0)], [2, 2])
    assert found.shape == (2, BLOCKS)
    assert np.array_equal(found, np.repeat([[3.0], [1.0]], BLOCKS, axis=1))
    assert next(used) == 2 * BLOCKS
