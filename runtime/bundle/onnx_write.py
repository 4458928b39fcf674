"""Write a tiny .onnx file without the onnx package: a few nodes and constants, to time what a runtime makes of them.

Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

OPSET, MICROSOFT_OPSET, IR_VERSION = 21, 1, 10
DTYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7}
"""numpy's names -> TensorProto.DataType."""
Node = tuple[str, Sequence[str], Sequence[str], Mapping[str, int]]
"""(operator, with "com.microsoft." before it where it is not of ONNX itself; inputs; outputs; attributes)."""


def write_model(
    nodes: Sequence[Node],
    constants: Mapping[str, np.ndarray],
    inputs: Mapping[str, tuple[str, tuple[int, ...]]],
    outputs: Mapping[str, tuple[str, tuple[int, ...]]],
) -> bytes:
    """Return the bytes of a model. `inputs` and `outputs`: name -> (dtype, shape)."""
    graph = b"".join(
        [
            *(_field(1, _node(*node)) for node in nodes),
            _field(2, b"trial"),
            *(_field(5, _tensor(name, array)) for name, array in constants.items()),
            *(_field(11, _value(name, *known)) for name, known in inputs.items()),
            *(_field(12, _value(name, *known)) for name, known in outputs.items()),
        ]
    )
    opsets = _field(8, _number(2, OPSET)) + _field(8, _field(1, b"com.microsoft") + _number(2, MICROSOFT_OPSET))
    return _number(1, IR_VERSION) + _field(7, graph) + opsets


def _node(operator: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, int]) -> bytes:
    domain, _, kind = operator.rpartition(".")
    listed = [_field(1, name.encode()) for name in inputs] + [_field(2, name.encode()) for name in outputs]
    integers = [_field(5, _field(1, name.encode()) + _number(3, n) + _number(20, 2)) for name, n in attributes.items()]
    return b"".join([*listed, _field(3, kind.encode()), _field(4, kind.encode()), *integers]) + (
        _field(7, domain.encode()) if domain else b""
    )


def _tensor(name: str, array: np.ndarray) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, DTYPES[array.dtype.name]) + _field(8, name.encode()) + _field(9, array.tobytes())


def _value(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    dims = b"".join(_field(1, _number(1, size)) for size in shape)
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, DTYPES[dtype]) + _field(2, dims)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
