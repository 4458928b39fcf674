"""Tiny ONNX graphs with fixed weights: a residual CNN, transformer blocks with outlier channels, single layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from compress.facts import ModelFacts
from compress.formats.targets import TARGETS
from compress.graph.layers import layer_facts
from compress.graph.run import Feeds, open_session, run_batches
from compress.passes import Int8
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState, Variant
from compress.work import apply_pass
from compress.work.contexts import GraphContext
from runtime.progress import no_progress

VOCABULARY, WIDTH, HIDDEN, LENGTH = 256, 32, 64, 6


def build(
    nodes: Sequence[Any],
    constants: dict[str, np.ndarray],
    inputs: dict[str, tuple[Any, ...]],
    outputs: dict[str, tuple[Any, ...]],
    opset: int = 20,
) -> ir.Model:
    """A graph with inferred shapes. An input called ids is int64, others float32; nodes are named after outputs."""
    for node in nodes:
        node.name = node.name or f"node_{node.output[0]}"
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64 if name == "ids" else TensorProto.FLOAT, shape)
            for name, shape in inputs.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    model = ir.from_proto(proto)
    ir.passes.common.ShapeInferencePass()(model)
    return model


def one_layer(inputs: int = 64, outputs: int = 8, op: str = "MatMul", seed: int = 0) -> ir.Model:
    """`fc`: x [N, inputs] -> y [N, outputs], as MatMul and Add, or Gemm with either layout."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(inputs, outputs)).astype(np.float32)
    bias = rng.normal(size=outputs).astype(np.float32)
    make = helper.make_node
    if op == "MatMul":
        nodes = [make("MatMul", ["x", "fc.weight"], ["product"]), make("Add", ["product", "fc.bias"], ["y"])]
    elif op == "Gemm":
        nodes = [make("Gemm", ["x", "fc.weight", "fc.bias"], ["y"])]
    else:
        weight, nodes = weight.T.copy(), [make("Gemm", ["x", "fc.weight", "fc.bias"], ["y"], transB=1)]
    return build(nodes, {"fc.weight": weight, "fc.bias": bias}, {"x": ("n", inputs)}, {"y": ("n", outputs)})


def residual_cnn(batchnorm: bool = False, seed: int = 0) -> ir.Model:
    """x [N, 3, 8, 8] -> stem, a plain block, a block with an option-A shortcut, pool, Gemm -> logits [N, 5]."""
    rng = np.random.default_rng(seed)
    make, constants = helper.make_node, {}

    def conv(name: str, x: str, y: str, width: int, out: int, stride: int = 1) -> list[Any]:
        constants[f"{name}.weight"] = (rng.normal(size=(out, width, 3, 3)) / np.sqrt(9 * width)).astype(np.float32)
        constants[f"{name}.bias"] = rng.normal(0, 0.1, out).astype(np.float32)
        inner = f"{y}_raw" if batchnorm else y
        parameters = [f"{name}.weight"] if batchnorm else [f"{name}.weight", f"{name}.bias"]
        nodes = [make("Conv", [x, *parameters], [inner], pads=[1] * 4, strides=[stride] * 2)]
        if batchnorm:
            constants[f"{name}.gamma"] = rng.uniform(0.5, 1.5, out).astype(np.float32)
            constants[f"{name}.mean"] = rng.normal(0, 0.3, out).astype(np.float32)
            constants[f"{name}.var"] = rng.uniform(0.5, 2, out).astype(np.float32)
            parts = [inner, *(f"{name}.{part}" for part in ("gamma", "bias", "mean", "var"))]
            nodes.append(make("BatchNormalization", parts, [y]))
        return nodes

    constants |= {
        "starts": np.array([0]),
        "ends": np.array([2**63 - 1]),
        "rows": np.array([2]),
        "columns": np.array([3]),
        "steps": np.array([2]),
        "pads": np.array([0, 2, 0, 0, 0, 2, 0, 0]),
        "zero": np.zeros((), np.float32),
        "fc.weight": rng.normal(size=(5, 8)).astype(np.float32),
        "fc.bias": rng.normal(size=5).astype(np.float32),
    }
    nodes = [
        *conv("stem", "x", "stem_out", 3, 4),
        make("Relu", ["stem_out"], ["a"]),
        *conv("one.conv1", "a", "one_mid", 4, 4),
        make("Relu", ["one_mid"], ["one_relu"]),
        *conv("one.conv2", "one_relu", "one_out", 4, 4),
        make("Add", ["one_out", "a"], ["one_sum"]),
        make("Relu", ["one_sum"], ["b"]),
        *conv("two.conv1", "b", "two_mid", 4, 8, stride=2),
        make("Relu", ["two_mid"], ["two_relu"]),
        *conv("two.conv2", "two_relu", "two_out", 8, 8),
        make("Slice", ["b", "starts", "ends", "rows", "steps"], ["half_rows"]),
        make("Slice", ["half_rows", "starts", "ends", "columns", "steps"], ["quarter"]),
        make("Pad", ["quarter", "pads", "zero"], ["shortcut"]),
        make("Add", ["two_out", "shortcut"], ["two_sum"]),
        make("Relu", ["two_sum"], ["c"]),
        make("GlobalAveragePool", ["c"], ["pooled"]),
        make("Flatten", ["pooled"], ["flat"]),
        make("Gemm", ["flat", "fc.weight", "fc.bias"], ["logits"], transB=1),
    ]
    return build(nodes, constants, {"x": ("n", 3, 8, 8)}, {"logits": ("n", 5)})


def transformer(post_norm: bool = True, outlier: float = 1.0, seed: int = 0) -> ir.Model:
    """ids [N, 6] -> embedding -> attention -> feed-forward with Gelu, both residual, normed before or after -> hidden.

    `outlier` scales two channels of the feed-forward's output and of the first normalisation, as in BERT; the last
    one's gains take them back.
    """
    rng = np.random.default_rng(seed)
    make = helper.make_node
    constants: dict[str, np.ndarray] = {"embedding.weight": rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)}

    def linear(name: str, x: str, y: str, n_in: int, n_out: int) -> list[Any]:
        constants[f"{name}.weight"] = (rng.normal(size=(n_in, n_out)) / np.sqrt(n_in)).astype(np.float32)
        constants[f"{name}.bias"] = rng.normal(0, 0.1, n_out).astype(np.float32)
        return [make("MatMul", [x, f"{name}.weight"], [f"{y}_mm"]), make("Add", [f"{y}_mm", f"{name}.bias"], [y])]

    def norm(name: str, x: str, y: str) -> Any:
        constants[f"{name}.gain"] = rng.uniform(0.5, 1.5, WIDTH).astype(np.float32)
        constants[f"{name}.shift"] = rng.normal(0, 0.1, WIDTH).astype(np.float32)
        return make("LayerNormalization", [x, f"{name}.gain", f"{name}.shift"], [y], axis=-1)

    before = [] if post_norm else [norm("norm1", "embedded", "x1")]
    x1 = "embedded" if post_norm else "x1"
    attention = [
        *linear("query", x1, "q", WIDTH, WIDTH),
        *linear("key", x1, "k", WIDTH, WIDTH),
        *linear("value", x1, "v", WIDTH, WIDTH),
        make("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        make("MatMul", ["q", "kt"], ["scores"]),
        make("Softmax", ["scores"], ["probabilities"], axis=-1),
        make("MatMul", ["probabilities", "v"], ["context"]),
        *linear("projection", "context", "attended", WIDTH, WIDTH),
        make("Add", ["attended", "embedded"], ["sum1"]),
    ]
    middle = norm("norm1", "sum1", "x2") if post_norm else norm("norm2", "sum1", "x2")
    feed_forward = [
        *linear("up", "x2", "up_out", WIDTH, HIDDEN),
        make("Gelu", ["up_out"], ["activated"]),
        *linear("down", "activated", "down_out", HIDDEN, WIDTH),
        make("Add", ["down_out", "x2" if post_norm else "sum1"], ["sum2"]),
        norm("last_norm", "sum2", "hidden"),
    ]
    nodes = [make("Gather", ["embedding.weight", "ids"], ["embedded"]), *before, *attention, middle, *feed_forward]
    constants["down.weight"][:, :2] *= outlier
    constants["norm1.gain"][:2] *= np.sqrt(outlier)
    constants["last_norm.gain"][:2] /= outlier
    return build(nodes, constants, {"ids": ("n", "length")}, {"hidden": ("n", "length", WIDTH)})


def broken_sum() -> ir.Model:
    """A residual sum with one channel thousands of times the others, which the classifier does not look at."""
    rng = np.random.default_rng(0)
    make = helper.make_node
    gain = np.zeros((1, 4, 1, 1), np.float32)
    gain[:, 0] = 5000
    constants = {
        "conv1.weight": rng.normal(size=(4, 3, 3, 3)).astype(np.float32),
        "conv2.weight": rng.normal(size=(4, 4, 3, 3)).astype(np.float32),
        "gain": gain,
        "fc.weight": np.float32([[0, 1, -1, 0.5], [0, -1, 0.3, 1]]),
    }
    nodes = [
        make("Conv", ["x", "conv1.weight"], ["a"], pads=[1] * 4),
        make("Conv", ["a", "conv2.weight"], ["b"], pads=[1] * 4),
        make("Mul", ["a", "gain"], ["huge"]),
        make("Add", ["b", "huge"], ["sum"]),
        make("GlobalAveragePool", ["sum"], ["pooled"]),
        make("Flatten", ["pooled"], ["flat"]),
        make("Gemm", ["flat", "fc.weight"], ["y"], transB=1),
    ]
    return build(nodes, constants, {"x": ("n", 3, 8, 8)}, {"y": ("n", 2)})


def images(n_batches: int = 3, size: int = 8, seed: int = 1) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(size, 3, 8, 8)).astype(np.float32)} for _ in range(n_batches)]


def tokens(n_batches: int = 3, size: int = 4, seed: int = 1) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    return [{"ids": rng.integers(0, VOCABULARY, (size, LENGTH))} for _ in range(n_batches)]


def vectors(width: int = 64, n_batches: int = 2, size: int = 16, seed: int = 1) -> list[Feeds]:
    rng = np.random.default_rng(seed)
    return [{"x": rng.normal(size=(size, width)).astype(np.float32)} for _ in range(n_batches)]


def run(model: ir.Model, batches: Sequence[Feeds], optimize: bool = True) -> list[np.ndarray]:
    """The first output for each batch; `optimize` False computes every node as it is written."""
    return [next(iter(outputs.values())) for outputs in run_batches(open_session(model, 1, optimize), batches)]


@lru_cache
def sums_are_exact() -> bool:
    """Return whether int8 kernels sum without overflow here: those of a CPU without VNNI add pairs in 16 bits."""
    nodes = [
        helper.make_node("Cast", ["x"], ["levels"], to=TensorProto.UINT8),
        helper.make_node("MatMulInteger", ["levels", "w"], ["sums"]),
        helper.make_node("Cast", ["sums"], ["y"], to=TensorProto.FLOAT),
    ]
    model = build(nodes, {"w": np.full((64, 8), 127, np.int8)}, {"x": ("n", 64)}, {"y": ("n", 8)})
    (sums,) = run(model, [{"x": np.full((4, 64), 255, np.float32)}])
    return bool((sums == 64 * 127 * 255).all())


def written(
    state: GraphState, batches: Sequence[Feeds], variant: Variant = "u8s8", optimize: bool = False
) -> np.ndarray:
    """All outputs of a written state, one after another."""
    return np.concatenate(run(write_state(state, variant), batches, optimize))


def facts_of(model: ir.Model) -> ModelFacts:
    operators = tuple(sorted({node.op_type for node in model.graph}))
    return ModelFacts("onnx", "tiny", "generic", (), (), layer_facts(model), operators=operators)


def context(
    batches: Sequence[Feeds],
    target: str = "onnxruntime-cpu",
    log: list[str] | None = None,
    shortfalls: Callable[[Any], dict[str, str]] | None = None,
) -> GraphContext:
    """What a pass is given; `log` collects its lines."""
    lines = [] if log is None else log
    return GraphContext(batches, TARGETS[target], 0, lines.append, no_progress, shortfalls=shortfalls)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def node_of(model: ir.Model, output: str) -> ir.Node:
    """The node that makes a tensor."""
    return next(node for node in model.graph if any(value.name == output for value in node.outputs))


def makers(model: ir.Model, output: str) -> list[str]:
    """Operators of the nodes whose outputs the maker of `output` reads."""
    producers = [value.producer() if value is not None else None for value in node_of(model, output).inputs]
    return [node.op_type for node in producers if node is not None]


def int8_state(model: ir.Model, feeds: list[Any], **config: Any) -> GraphState:
    state: GraphState = apply_pass(Int8(**config), GraphState(model), context(feeds)).model
    return state
