"""Integers of 2 to 8 bits in 32-bit words: the bit order that compressed-tensors' and GPTQ's files share."""

from __future__ import annotations

import ml_dtypes
import numpy as np

CHUNK = 1 << 24
"""Values that are packed at a time: odd widths pass through one byte for each bit."""
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
FP4_CODES: np.ndarray = np.zeros(256, np.uint8)
"""Byte of an FP8 (E4M3) number -> bits of the same number of FP4."""
for _sign in (-1, 1):  # zero has one code, 0, as the library packs it
    FP4_CODES[np.copysign(FP4, _sign).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)] = [
        code + 8 * (_sign < 0) * (code > 0) for code in range(8)
    ]


def count_words(n: int, bits: int) -> int:
    """Return the number of 32-bit words that `n` values of `bits` bits take."""
    return -(-n * bits // 32)


def pack_bits(values: np.ndarray, bits: int, at_once: int = CHUNK) -> np.ndarray:
    """Pack unsigned integers [rows, n] (uint8, below 2^bits) into int32 [rows, packed_words(n, bits)].

    Value i of a row begins at bit i * bits of the row, lowest bit first, with no gaps: where `bits` does not divide 32,
    a value may straddle two words (GPTQ's 3-bit layout, and compressed-tensors' since 0.18; before that it left gaps
    for 3, 5, 6 and 7 bits). Bits beyond the last value are 0.
    """
    rows, n = values.shape
    words = np.zeros((rows, count_words(n, bits)), "<i4")
    held = words.view(np.uint8).reshape(rows, words.shape[1] * 4)
    step = max(1, at_once // max(1, n))
    fold = _pack_aligned if 8 % bits == 0 else _pack_straddling
    for start in range(0, rows, step):
        packed = fold(values[start : start + step], bits)
        held[start : start + step, : packed.shape[1]] = packed
    return words


def _pack_aligned(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack values of a width that divides 8 into bytes [rows, ceil(n * bits / 8)]."""
    each = 8 // bits
    rows, n = values.shape
    padded = np.pad(values, ((0, 0), (0, -n % each))).reshape(rows, -1, each)
    folded = padded[:, :, 0].copy()
    for place in range(1, each):
        folded |= padded[:, :, place] << np.uint8(place * bits)
    return folded


def _pack_straddling(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack values of any width into bytes [rows, ceil(n * bits / 8)]."""
    single = np.unpackbits(values[:, :, None], axis=2, count=bits, bitorder="little")  # [rows, n, bits]
    return np.packbits(single.reshape(len(values), -1), axis=1, bitorder="little")


def pack_floats(values: np.ndarray) -> np.ndarray:
    """Pack FP4 numbers [rows, n], held in FP8 (E4M3), into bytes [rows, n / 2], the first of two in the lower half.

    A number's bits are its sign and its place among 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (OCP MX 1.0, section 5.3.3).
    """
    codes = FP4_CODES[np.ascontiguousarray(values).view(np.uint8)]
    lower, upper = codes[:, 0::2], codes[:, 1::2]
    return lower | (upper << 4)


def as_unsigned(values: np.ndarray, bits: int) -> np.ndarray:
    """Return signed integers (int8) of `bits` bits, shifted to begin at 0; unsigned ones (uint8) as they are."""
    if values.dtype == np.uint8:
        return values
    return (values.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)


def as_signed(values: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned integers (uint8) of `bits` bits, shifted to straddle 0; signed ones (int8) as they are."""
    if values.dtype == np.int8:
        return values
    return (values.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
