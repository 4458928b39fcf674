"""Bits in 32-bit words: against a slow reference that knows nothing but where each bit belongs."""

from __future__ import annotations

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compress.export.packing import as_signed, as_unsigned, count_words, pack_bits


def slow_unpack(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Each row as one long integer, cut into pieces of `bits`."""
    rows = []
    for row in words:
        number = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(row))
        rows.append([(number >> (bits * i)) & ((1 << bits) - 1) for i in range(n)])
    return np.array(rows)


@settings(max_examples=30)
@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 70), st.integers(1, 400), st.integers(0, 2**32 - 1))
@example(bits=3, rows=7, n=21, chunk=40, seed=0)
def test_any_width_and_length_is_packed_as_compressed_tensors_packs_it(
    bits: int, rows: int, n: int, chunk: int, seed: int
) -> None:
    """In chunks of rows too; and each value is where a row as one long number has it."""
    signed = np.random.default_rng(seed).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, n)).astype(np.int8)
    values = as_unsigned(signed, bits)
    words = pack_bits(values, bits, chunk)
    assert words.dtype == np.int32 and words.shape == (rows, count_words(n, bits))
    np.testing.assert_array_equal(slow_unpack(words, bits, n), values)
    np.testing.assert_array_equal(words, pack_to_int32(torch.from_numpy(signed), bits).numpy())
    np.testing.assert_array_equal(as_signed(values, bits), signed)


def test_signed_and_unsigned_are_the_same_integers_shifted() -> None:
    signed = np.array([-8, -1, 0, 7], np.int8)
    np.testing.assert_array_equal(as_unsigned(signed, 4), [0, 7, 8, 15])
    np.testing.assert_array_equal(as_signed(as_unsigned(signed, 4), 4), signed)
    np.testing.assert_array_equal(as_signed(np.array([0, 255], np.uint8), 8), [-128, 127])
