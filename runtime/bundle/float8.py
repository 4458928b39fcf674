"""Whether an ONNX model holds float8 values, read from the file's own bytes: no package for ONNX is needed.

ONNX Runtime 1.31 optimizes such a model to one that computes something else: it takes a Relu before a QuantizeLinear
for done by its zero point, as it would be in uint8, and makes integer products of float8 ones. Models that hold float8
are therefore opened with basic optimizations alone.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from runtime.bundle.onnx_file import messages
from runtime.bundle.protobuf import Data, fields

FLOAT8 = range(17, 21)
"""Of TensorProto.DataType: FLOAT8E4M3FN, FLOAT8E4M3FNUZ, FLOAT8E5M2, FLOAT8E5M2FNUZ."""
DATA_TYPE, NAME, INTEGER = 2, 1, 3
"""Fields of onnx.proto: TensorProto.data_type, AttributeProto.name, AttributeProto.i."""
MAKES = (b"to", b"output_dtype", b"dtype")
"""Attributes that say which type an operator gives."""


def holds_float8(model: str | bytes) -> bool:
    """Return whether a constant is float8, or an operator gives it. `model`: a file's path, or its content.

    False of what is no ONNX model: who opens it will say so.
    """
    if isinstance(model, bytes):
        return _scan_for_float8(model)
    try:
        with Path(model).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _scan_for_float8(data)
    except (OSError, ValueError):  # not there, or empty
        return False


def _scan_for_float8(data: Data) -> bool:
    checks = {"tensor": _is_float8, "attribute": _gives_float8}
    try:
        return any(kind in checks and checks[kind](data, start, stop) for kind, start, stop in messages(data))
    except (IndexError, ValueError):
        return False


def _is_float8(data: Data, start: int, stop: int) -> bool:
    return any(number == DATA_TYPE and value in FLOAT8 for number, _, _, value in fields(data, start, stop))


def _gives_float8(data: Data, start: int, stop: int) -> bool:
    found_fields = {number: (first, last, value) for number, first, last, value in fields(data, start, stop)}
    if NAME not in found_fields or INTEGER not in found_fields:
        return False
    first, last, _ = found_fields[NAME]
    return bytes(data[first:last]) in MAKES and found_fields[INTEGER][2] in FLOAT8
