"""Our integers as the blocks of a GGUF file: which of its types holds a scheme, and the bytes. No torch here.

Blocks of 32 weights have one half float (Q4_0, Q5_0, Q8_0) or two (Q4_1, Q5_1); larger groups repeat theirs. K and IQ4
types hold what `rounding.k_quants` stored. Layouts are those of ggml-common.h; tests compare with `gguf.dequantize`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compress.errors import ExportError
from compress.formats.schemes import BLOCK_BITS, IQ4_NUMBERS, SUPER_BLOCK, Scheme
from compress.rounding.quantized_weight import QuantizedWeight

BLOCK = 32
"""Weights that share the half floats of the types without super-blocks."""


def find_block_type(scheme: Scheme, inputs: int) -> tuple[str, str]:
    """Return the GGUF type that holds a layer with so many inputs exactly, or "" and why none does."""
    weights = scheme.weights
    if block := weights.block:
        if inputs % block:
            way = "set indivisible: fit, or ignore it" if block == SUPER_BLOCK else "ignore it"
            return "", f"{scheme.name} has blocks of {block} inputs, which do not divide {inputs}; {way}"
        return scheme.name, ""
    if scheme.activations is not None or weights.kind != "int":
        return "", f"{scheme.name}: GGUF holds integer weights alone; use scheme: W4A16, W8A16 or Q4_K"
    if weights.scales != "float" or weights.rows != 1:
        return "", f"{scheme.name}: GGUF has no such scales; use scheme: W4A16 or Q4_K"
    size = weights.group_size if weights.group_size > 0 else inputs
    if size % BLOCK:
        ways = f"set group_size: {BLOCK}" if inputs % BLOCK == 0 else "ignore it"
        return "", f"GGUF stores groups of {BLOCK}, and {size} inputs share a scale; {ways}"
    if weights.bits > 5 and not weights.symmetric:
        return "", f"{scheme.name}: GGUF has no offsets beside more than 5 bits; set symmetric: true"
    if weights.bits > 5:
        return "Q8_0", ""
    return f"Q{max(weights.bits, 4)}_{0 if weights.symmetric else 1}", ""


def as_stored(weight: QuantizedWeight, kind: str) -> QuantizedWeight:
    """Return the weight that the file holds: scales, and what zero points stand for, as half floats; K and IQ4 types as
    it is.

    ExportError where a scale does not fit into a half float.
    """
    if kind in BLOCK_BITS:
        return weight
    scales = _to_half(weight.scales).astype(np.float32)
    if weight.zero_points is None:
        return replace(weight, scales=scales)
    # llama.cpp adds a real minimum where we subtract whole zero points
    offsets = _to_half(weight.zero_points.astype(np.float32) * weight.scales).astype(np.float32)
    return replace(weight, scales=scales, zero_points=None, offsets=offsets)


def pack_blocks(stored: QuantizedWeight, kind: str) -> np.ndarray:
    """Return the bytes uint8 [out, bytes of a row] of a weight that `as_stored` gave for the type `kind`."""
    rows, inputs = stored.values.shape
    if kind.startswith("IQ4"):
        blocks = _pack_iq4(stored, kind)
    else:
        blocks = _pack_k(stored, kind) if kind in BLOCK_BITS else _pack_plain(stored, kind, inputs)
    return np.ascontiguousarray(blocks.reshape(rows, -1))


def _to_half(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        half: np.ndarray = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise ExportError("a scale does not fit into a half float, which GGUF stores")
    return half


def _pack_plain(stored: QuantizedWeight, kind: str, inputs: int) -> np.ndarray:
    """Return blocks of 32: half floats, the fifth bits, then levels."""
    levels = stored.values.reshape(-1, BLOCK)
    repeats = inputs // stored.scales.shape[1] // BLOCK
    parts = [_half_bytes(np.repeat(stored.scales, repeats, axis=1))]
    if stored.offsets is not None:
        parts.append(_half_bytes(np.repeat(-stored.offsets, repeats, axis=1)))
    if kind == "Q8_0":
        return np.concatenate([*parts, levels.astype(np.int8).view(np.uint8)], axis=1)
    bits = int(kind[1])
    codes = (
        levels.astype(np.uint8)
        if stored.offsets is not None
        else (levels.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    )
    if bits == 5:
        parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
    half = BLOCK // 2
    return np.concatenate([*parts, (codes[:, :half] & 15) | (codes[:, half:] << 4)], axis=1)


def _half_bytes(values: np.ndarray) -> np.ndarray:
    """Return the bytes [n, 2] of n numbers that are half floats."""
    return values.reshape(-1, 1).astype("<f2").view(np.uint8)


def _pack_k(stored: QuantizedWeight, kind: str) -> np.ndarray:
    """Return blocks of 256 weights [blocks, bytes], their parts in the type's order."""
    n_groups = SUPER_BLOCK // stored.group_size
    codes = stored.values.reshape(-1, SUPER_BLOCK)
    scales = stored.stored["scales"].reshape(-1, n_groups)
    d = _half_bytes(stored.stored["d"])
    if kind == "Q6_K":
        codes = (codes.astype(np.int16) + 32).astype(np.uint8)
        nibbles = _interleave(codes & 15, 64, 4)
        return np.concatenate(
            [nibbles, _interleave(codes >> 4, 32, 2), scales.astype(np.int8).view(np.uint8), d], axis=1
        )
    if kind == "Q3_K":
        codes = (codes.astype(np.int16) + 4).astype(np.uint8)
        high = _interleave(codes >> 2, 32, 1)
        return np.concatenate([high, _interleave(codes & 3, 32, 2), _pack_signed_six(scales), d], axis=1)
    codes, m = codes.astype(np.uint8), _half_bytes(stored.stored["m"])
    scales, offsets = scales.astype(np.uint8), stored.stored["offsets"].reshape(-1, n_groups).astype(np.uint8)
    if kind == "Q2_K":
        return np.concatenate([scales | (offsets << 4), _interleave(codes, 32, 2), d, m], axis=1)
    high_bits = [_interleave(codes >> 4, 32, 1)] if kind == "Q5_K" else []
    low = scales[:, :4] | ((scales[:, 4:] >> 4) << 6)
    middle = offsets[:, :4] | ((offsets[:, 4:] >> 4) << 6)
    high = (scales[:, 4:] & 15) | ((offsets[:, 4:] & 15) << 4)  # 12 bytes: 8 scales and 8 offsets of 6 bits each
    return np.concatenate([d, m, low, middle, high, *high_bits, _interleave(codes & 15, 32, 4)], axis=1)


def _pack_iq4(stored: QuantizedWeight, kind: str) -> np.ndarray:
    """Return blocks of 32 (IQ4_NL) or 256 weights (IQ4_XS) [blocks, bytes]: a half float, scales, then levels."""
    codes = np.searchsorted(IQ4_NUMBERS, stored.values).astype(np.uint8)
    d = _half_bytes(stored.stored["d"])
    nibbles = _interleave(codes.reshape(len(d), -1), 16, 4)
    if kind == "IQ4_NL":
        return np.concatenate([d, nibbles], axis=1)
    scales = (stored.stored["scales"].reshape(len(d), -1).astype(np.int16) + 32).astype(np.uint8)
    return np.concatenate([d, _interleave(scales >> 4, 1, 2), _interleave(scales & 15, 1, 4), nibbles], axis=1)


def _interleave(codes: np.ndarray, run: int, bits: int) -> np.ndarray:
    """Return bytes, each with a code of `bits` of as many runs of `run` weights as fit into it, the first lowest."""
    per_byte = 8 // bits
    runs = codes.reshape(len(codes), -1, per_byte, run)
    shifts = (np.arange(per_byte, dtype=np.uint8) * bits)[:, None]
    return np.bitwise_or.reduce(runs << shifts, axis=2).reshape(len(codes), -1)


def _pack_signed_six(scales: np.ndarray) -> np.ndarray:
    """Return the 12 bytes of 16 six-bit scales from -32 to 31 (Q3_K)."""
    codes = (scales.astype(np.int16) + 32).astype(np.uint8)
    low = (codes[:, :8] & 15) | ((codes[:, 8:] & 15) << 4)
    high = np.bitwise_or.reduce((codes >> 4).reshape(-1, 4, 4) << np.array([[0], [2], [4], [6]], np.uint8), axis=1)
    return np.concatenate([low, high], axis=1)
