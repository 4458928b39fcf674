"""Products that are timed alone."""

from __future__ import annotations

import pytest

from runtime.clock import peaks
from runtime.clock.peaks import MOST_WEIGHT_BYTES, Product, time_products


@pytest.mark.parametrize(("numbers", "bits", "n_bytes"), [("float32", 4, 4.0), ("uint8", 4, 1.0), ("bits", 4, 0.5)])
def test_a_product_of_many_outputs_is_timed_with_fewer_and_told_whole(
    monkeypatch: pytest.MonkeyPatch, numbers: str, bits: int, n_bytes: float
) -> None:
    large = Product(1, 1024, 10**6, numbers, bits)
    shrunk = large.shrink()
    assert 0.99 * MOST_WEIGHT_BYTES < n_bytes * shrunk.inputs * shrunk.outputs <= MOST_WEIGHT_BYTES
    monkeypatch.setattr(peaks, "MOST_WEIGHT_BYTES", 2**16)
    assert Product(1, 64, 32, numbers, bits).shrink() == Product(1, 64, 32, numbers, bits)
    monkeypatch.setattr(peaks, "_time", lambda backend, threads, trials: [0.001] * len(trials))
    few = Product(1, 64, 8192, numbers, bits)
    assert time_products("onnxruntime-cpu", 1, [few]) == [pytest.approx(8192 / few.shrink().outputs)]
