"""A few of the random models of benchmarks/fuzz_models.py: what plan takes, apply does, and the answers are right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import BENCHMARKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fuzz_models() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import fuzz_models

        with fuzz_models.in_this_process():
            yield fuzz_models


@pytest.mark.parametrize("seed", [*range(16), 20_252])  # the last gives NaN for its samples
def test_random_graphs(seed: int, fuzz_models: Any, tmp_path: Path) -> None:
    fault = fuzz_models.find_fault("graph", seed, tmp_path)
    assert not fault or fault.startswith("refused")


@pytest.mark.parametrize("seed", range(12))
def test_random_modules(seed: int, fuzz_models: Any, tmp_path: Path) -> None:
    fault = fuzz_models.find_fault("module", seed, tmp_path)
    assert not fault or fault.startswith("refused")
