"""Which other files an .onnx file reads its weights from, found in its bytes: no onnx package, no weights loaded.

A bundle may come from anyone, and an external-data location is a path that a runtime will open. Only the protobuf wire
format (https://protobuf.dev/programming-guides/encoding/) and the field numbers of onnx.proto are needed to see them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import BundleError

# message -> {field number: the message it holds}, for every way that leads to a TensorProto
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}


def external_files(path: Path) -> frozenset[str]:
    """The external-data locations in the .onnx file at `path`, as written there; BundleError if it is not protobuf."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise BundleError(f"{path}: the model file is empty; build the bundle again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return frozenset(_locations(data))
            except (ValueError, IndexError) as error:
                raise BundleError(f"{path}: not an ONNX model ({error}); build the bundle again") from error


def _locations(data: mmap.mmap) -> Iterator[str]:
    pending = [("model", 0, len(data))]
    while pending:
        message, start, stop = pending.pop()
        for number, first, last in _fields(data, start, stop):
            child = _CHILDREN[message].get(number)
            if child == "entry":
                entry = {n: bytes(data[a:b]) for n, a, b in _fields(data, first, last)}
                if entry.get(1) == b"location":
                    yield entry.get(2, b"").decode()
            elif child is not None:
                pending.append((child, first, last))


def _fields(data: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(field number, first byte, last byte + 1) of each length-delimited field in data[start:stop]."""
    while start < stop:
        tag, start = _varint(data, start)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 2:
            length, start = _varint(data, start)
            if start + length > stop:
                raise ValueError("a field is longer than the message around it")
            yield number, start, start + length
            start += length
        elif wire_type == 0:
            _, start = _varint(data, start)
        elif wire_type in (1, 5):
            start += 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """The number at `at`, seven bits a byte with the lowest first, and where it ends."""
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
