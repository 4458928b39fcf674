"""Bits in 32-bit words: against a slow reference that knows nothing but where each bit belongs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from compress.export import packing
from compress.export.packing import as_signed, as_unsigned, count_words, pack_bits

RNG = np.random.default_rng(0)


def slow_unpack(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Each row as one long integer, cut into pieces of `bits`."""
    rows = []
    for row in words:
        number = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        rows.append([(number >> (bits * i)) & ((1 << bits) - 1) for i in range(n)])
    return np.array(rows)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("n", [1, 5, 32, 43, 64])
def test_unpacking_gives_the_values_back(bits: int, n: int) -> None:
    values = RNG.integers(0, 2**bits, (3, n)).astype(np.uint8)
    words = pack_bits(values, bits)
    assert words.dtype == np.int32 and words.shape == (3, count_words(n, bits))
    np.testing.assert_array_equal(slow_unpack(words, bits, n), values)


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_layout_is_that_of_compressed_tensors(bits: int) -> None:
    values = RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (4, 45)).astype(np.int8)
    ours = pack_bits(as_unsigned(values, bits), bits)
    np.testing.assert_array_equal(ours, pack_to_int32(torch.from_numpy(values), bits).numpy())


def test_rows_are_packed_in_chunks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = RNG.integers(0, 8, (7, 21)).astype(np.uint8)
    whole = pack_bits(values, 3)
    monkeypatch.setattr(packing, "CHUNK", 40)
    np.testing.assert_array_equal(pack_bits(values, 3), whole)


def test_signed_and_unsigned_are_the_same_integers_shifted() -> None:
    signed = np.array([-8, -1, 0, 7], np.int8)
    np.testing.assert_array_equal(as_unsigned(signed, 4), [0, 7, 8, 15])
    np.testing.assert_array_equal(as_signed(as_unsigned(signed, 4), 4), signed)
    np.testing.assert_array_equal(as_signed(np.array([0, 255], np.uint8), 8), [-128, 127])
