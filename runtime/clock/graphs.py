"""Write a tiny .onnx file without the onnx package: a few nodes and constants, to time what a runtime makes of them.

Field numbers are those of onnx.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np

OPSET, MICROSOFT_OPSET, IR_VERSION = 21, 1, 10
DTYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7}
"""numpy's names -> TensorProto.DataType."""
Attribute = int | float | str | Sequence[int] | Sequence[float]
Node = tuple[str, Sequence[str], Sequence[str], Mapping[str, Attribute]]
"""(operator, with "com.microsoft." before it where it is not of ONNX itself; inputs; outputs; attributes)."""


def write_model(
    nodes: Sequence[Node],
    constants: Mapping[str, np.ndarray],
    inputs: Mapping[str, tuple[str, tuple[int, ...]]],
    outputs: Mapping[str, tuple[str, tuple[int, ...] | None]],
    opset: int = OPSET,
    names: Sequence[str] = (),
) -> bytes:
    """Return the bytes of a model. `inputs` and `outputs`: name -> (dtype, shape, or None); `names`: of the nodes."""
    graph = b"".join(
        [
            *(
                _field(1, _node(*node, name=name))
                for node, name in zip(nodes, names or map("node{}".format, range(len(nodes))), strict=True)
            ),
            _field(2, b"trial"),
            *(_field(5, _tensor(name, array)) for name, array in constants.items()),
            *(_field(11, _value(name, *known)) for name, known in inputs.items()),
            *(_field(12, _value(name, *known)) for name, known in outputs.items()),
        ]
    )
    opsets = _field(8, _number(2, opset)) + _field(8, _field(1, b"com.microsoft") + _number(2, MICROSOFT_OPSET))
    return _number(1, IR_VERSION) + _field(7, graph) + opsets


def _node(
    operator: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Attribute], name: str
) -> bytes:
    domain, _, kind = operator.rpartition(".")
    listed = [_field(1, name.encode()) for name in inputs] + [_field(2, name.encode()) for name in outputs]
    given = [_field(5, _field(1, key.encode()) + _attribute(value)) for key, value in attributes.items()]
    return b"".join([*listed, _field(3, name.encode()), _field(4, kind.encode()), *given]) + (
        _field(7, domain.encode()) if domain else b""
    )


def _attribute(value: Attribute) -> bytes:
    """Return an attribute's value and type: FLOAT 1, INT 2, STRING 3, FLOATS 6, INTS 7."""
    if isinstance(value, float):
        return _float(2, value) + _number(20, 1)
    if isinstance(value, int):
        return _number(3, value) + _number(20, 2)
    if isinstance(value, str):
        return _field(4, value.encode()) + _number(20, 3)
    if any(isinstance(item, float) for item in value):
        return b"".join(_float(7, float(item)) for item in value) + _number(20, 6)
    return b"".join(_number(8, int(item)) for item in value) + _number(20, 7)


def _tensor(name: str, array: np.ndarray) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    return dims + _number(2, DTYPES[array.dtype.name]) + _field(8, name.encode()) + _field(9, array.tobytes())


def _value(name: str, dtype: str, shape: tuple[int, ...] | None) -> bytes:
    dims = b"" if shape is None else _field(2, b"".join(_field(1, _number(1, size)) for size in shape))
    return _field(1, name.encode()) + _field(2, _field(1, _number(1, DTYPES[dtype]) + dims))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value % 2**64)  # protobuf writes negative numbers in 64 bits


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
