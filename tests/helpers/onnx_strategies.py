"""Small ONNX models of every construct that is read here, and changes of them: of bytes, and of what they hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

RNG = np.random.default_rng(0)
SHAPES = {"x": ((4,), "float32"), "image": ((3, 8, 8), "float32")}
"""What the models are fed, a sample."""


def constant(name: str, values: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values), name)


def weights(name: str, *shape: int) -> TensorProto:
    return constant(name, RNG.standard_normal(shape).astype(np.float32))


def value(name: str, *shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: list[Any], inputs: list[Any], outputs: list[Any], tensors: list[Any], **more: Any) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    made = helper.make_model(helper.make_graph(nodes, "net", inputs, outputs, tensors), opset_imports=opsets, **more)
    made.ir_version = 9
    onnx.checker.check_model(made, full_check=True)
    return made


def convolution() -> onnx.ModelProto:
    node = helper.make_node
    return model(
        [
            node("Conv", ["image", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["c", "one", "zero", "zero", "one"], ["n"], "norm"),
            node("ReduceMean", ["n", "axes"], ["m"], keepdims=0),
            node("Reshape", ["m", "shape"], ["r"]),
            node("MatMul", ["r", "v"], ["z"], "fc"),
            node("Constant", [], ["k"], value=weights("k", 5)),
            node("Add", ["z", "k"], ["logits"]),
        ],
        [value("image", "n", 3, 8, 8)],
        [value("logits", "n", 5)],
        [
            *(weights("w", 4, 3, 3, 3), weights("v", 4, 5), constant("axes", [2, 3]), constant("shape", [0, 4])),
            *(constant("one", np.ones(4, np.float32)), constant("zero", np.zeros(4, np.float32))),
        ],
    )


def branches() -> onnx.ModelProto:
    node, graph, free = helper.make_node, helper.make_graph, helper.make_tensor_value_info
    twice = helper.make_function(
        "own", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    then = graph([node("Identity", ["d"], ["t"])], "then", [], [free("t", TensorProto.FLOAT, None)])
    other = graph([node("Neg", ["d"], ["e"])], "other", [], [free("e", TensorProto.FLOAT, None)])
    body = graph(
        [node("Identity", ["again"], ["on"]), node("MatMul", ["s", "square"], ["next"])],
        "body",
        [value("i", kind=TensorProto.INT64), value("again", kind=TensorProto.BOOL), value("s", "n", 4)],
        [value("on", kind=TensorProto.BOOL), value("next", "n", 4)],
    )
    return model(
        [
            node("Twice", ["x"], ["d"], domain="own"),
            node("If", ["yes"], ["i"], then_branch=then, else_branch=other),
            node("Loop", ["three", "yes", "x"], ["l"], body=body),
            node("Shape", ["d"], ["size"]),
            node("Reshape", ["l", "size"], ["r"]),
            node("Gemm", ["r", "v", "bias"], ["y"], transB=1),
            node("DequantizeLinear", ["q", "scale"], ["dq"], axis=0),
            node("MatMul", ["x", "dq"], ["y2"]),
        ],
        [value("x", "n", 4)],
        [value("y", "n", 5), value("y2", "n", 5)],
        [
            *(weights("v", 5, 4), weights("bias", 5), weights("square", 4, 4), constant("three", 3)),
            *(constant("yes", True), constant("q", np.ones((4, 5), np.int8)), weights("scale", 4)),
        ],
        functions=[twice],
    )


MODELS = (convolution(), branches())
INTEGERS = (0, -1, 1, 2, 7, 100, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63))
WORDS = (
    "nope é a/b .. \n Conv MatMul Gemm Gather If Loop Scan Constant Reshape Pad Tile Expand ConstantOfShape Range own"
)


def messages(message: Any) -> Iterator[Any]:
    yield message
    for field, child in message.ListFields():
        if field.message_type is not None:
            for one in child if field.is_repeated else (child,):
                yield from messages(one)


def change(proto: onnx.ModelProto, chance: random.Random) -> None:
    """Change one field of one message: lost, doubled, exchanged, or with another value of its type."""
    every = list(messages(proto))
    message = chance.choice(every)
    present = [field for field, _ in message.ListFields()]
    field = chance.choice(present if present and chance.random() < 0.75 else list(message.DESCRIPTOR.fields))
    if field.message_type is not None:
        alike = [one for one in every if one.DESCRIPTOR is field.message_type]
        if field.is_repeated:
            children = getattr(message, field.name)
            if len(children) and chance.random() < 0.5:
                del children[chance.randrange(len(children))]
            else:
                child = copied(chance.choice(alike)) if alike else None
                children.add() if child is None else children.add().CopyFrom(child)
        elif alike and chance.random() < 0.5:
            getattr(message, field.name).CopyFrom(copied(chance.choice(alike)))
        else:
            message.ClearField(field.name)
    elif field.is_repeated:
        values = getattr(message, field.name)
        if len(values) and chance.random() < 0.3:
            del values[chance.randrange(len(values))]
        elif len(values) and chance.random() < 0.7:
            values[chance.randrange(len(values))] = scalar(field, every, chance)
        else:
            values.append(scalar(field, every, chance))
    elif chance.random() < 0.25:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, scalar(field, every, chance))


def copied(message: Any) -> Any:
    """A copy of its own: protobuf dies of one that is taken into what is inside it."""
    other = type(message)()
    other.CopyFrom(message)
    return other


def scalar(field: FieldDescriptor, every: list[Any], chance: random.Random) -> Any:
    """Another value for a field: extreme, or one that stands somewhere else."""
    if field.type == FieldDescriptor.TYPE_STRING:
        names = [one.name for one in every if "name" in one.DESCRIPTOR.fields_by_name]
        return chance.choice([*names, *WORDS])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice([chance.randbytes(chance.randint(0, 9)), b"\0" * 64, b"..", b"NOTSET"])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return chance.choice((0.0, -1.0, float("nan"), float("inf"), 1e30))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return chance.choice(field.enum_type.values).number
    bits = 31 if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else 63
    number = chance.choice([number for number in INTEGERS if -(2**bits) <= number < 2**bits])
    return abs(number) % 2**63 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 else number


@st.composite
def changed_models(draw: st.DrawFn) -> bytes:
    """The bytes of a model with a few changes; half of them keep it a protobuf."""
    chance = random.Random(draw(st.integers(0, 2**32)))
    proto = onnx.ModelProto()
    proto.CopyFrom(chance.choice(MODELS))
    if chance.random() < 0.7:
        for _ in range(chance.randint(1, 3)):
            change(proto, chance)
        return proto.SerializeToString()
    content = bytearray(proto.SerializeToString())
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(content))
        content[at : at + chance.choice((0, 1, 1, 1, 5))] = chance.randbytes(chance.choice((0, 1, 1, 1, 4)))
    return bytes(content)
