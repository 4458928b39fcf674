"""A protobuf message's fields, found in its bytes: https://protobuf.dev/programming-guides/encoding/.

Enough to look into an .onnx file without the onnx package and without loading its weights.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

Data = bytes | mmap.mmap
Field = tuple[int, int, int, int]
"""(field number, first byte, last byte + 1, value): value for a varint, the bytes for anything longer."""


def fields(data: Data, start: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in data[start:stop], in order.

    ValueError where a field is longer than the message, of a type that proto3 lacks, or a number of more than 64 bits;
    IndexError where the data ends inside a number.
    """
    while start < stop:
        tag, start = _read_varint(data, start)
        wire_type, value, length = tag & 7, 0, 0
        if wire_type == 0:
            value, start = _read_varint(data, start)
        elif wire_type == 2:
            length, start = _read_varint(data, start)
            if start + length > stop:
                raise ValueError("a field is longer than the message around it")
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        yield tag >> 3, start, start + length, value
        start += length


def _read_varint(data: Data, at: int) -> tuple[int, int]:
    """Read the number at `at`, seven bits a byte with the lowest first; return it and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
