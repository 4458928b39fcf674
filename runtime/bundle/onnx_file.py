"""What an .onnx file holds, found in its bytes: no onnx package, no weights loaded.

A bundle may come from anyone, and an external-data location is a path that a runtime will open. Only the wire format
and the field numbers of onnx.proto are needed to see them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from runtime.bundle.protobuf import Data, fields
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
    "entry": {},
}


def external_files(path: Path) -> frozenset[str]:
    """Return the external-data locations in an .onnx file, as written there; BundleError if it is not protobuf."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise BundleError(f"{path}: the model file is empty; build the bundle again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return frozenset(_find_locations(data))
    except OSError as error:
        raise BundleError(f"{path}: the model file cannot be read: {error.strerror}") from error
    except (ValueError, IndexError) as error:
        raise BundleError(f"{path}: not an ONNX model ({error}); build the bundle again") from error


def messages(data: Data) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, first byte, last byte + 1) of each message on a way to a tensor, the model first.

    Errors are those of `fields`.
    """
    pending = [("model", 0, len(data))]
    while pending:
        kind, start, stop = pending.pop()
        yield kind, start, stop
        children = _CHILDREN[kind]
        pending += [(children[n], first, last) for n, first, last, _ in fields(data, start, stop) if n in children]


def _find_locations(data: Data) -> Iterator[str]:
    for kind, start, stop in messages(data):
        if kind == "entry":
            entry = {n: bytes(data[a:b]) for n, a, b, _ in fields(data, start, stop)}
            if entry.get(1) == b"location":
                yield entry.get(2, b"").decode()
