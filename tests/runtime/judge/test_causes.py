"""Why a candidate is not faster: five mechanisms and silence, each in a small graph that its runtime has profiled.

Structure decides, and peaks and trials of a recorded machine, never this one's stopwatch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.recipe.remedies import REMEDIES
from runtime.bundle.onnx_file import Graph, GraphNode
from runtime.clock.peaks import Peaks, Product
from runtime.judge import causes
from runtime.judge.causes import Cause
from runtime.judge.twins import ProfiledPair, match_twins
from runtime.judge.why import Explanation, explain
from runtime.measure.profile import NodeTime, Profile, Tensor
from runtime.measure.profile_models import profile_model

ZEN4 = Peaks({"float32": 100.0, "uint8": 430.0, "int8": 34.0}, 20.0)
"""Measured on a CPU with VNNI in ONNX Runtime 1.31: signed by signed int8 is the slow path."""
RNG = np.random.default_rng(0)


def save(path: Path, nodes: Sequence[Any], constants: dict[str, Any], x: tuple[int, ...], opset: int = 21) -> Path:
    """Write a graph x -> the last node's output, nodes named after their outputs."""
    for node in nodes:
        node.name = node.name or f"node_{node.output[0]}"
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return path


def profile(path: Path, x: tuple[int, ...]) -> Profile:
    return profile_model("onnxruntime-cpu", path, 1, {"x": RNG.normal(size=x).astype(np.float32)}, budget_s=0.05)


def with_times(found: Profile, ms: dict[str, float], usual: float = 0.01) -> Profile:
    """The executed graph with other times, by operator, so that no test depends on this machine's."""
    nodes = tuple(replace(node, ms=ms.get(node.operator, usual)) for node in found.nodes)
    return replace(found, nodes=nodes, call_ms=0.0)


def no_trials(products: Sequence[Product]) -> list[float | None]:
    return [None] * len(products)


def look(after: Profile, before: Profile | None = None, **settings: Any) -> Explanation:
    given = {"peaks": ZEN4, "before_peaks": ZEN4, "trials": no_trials, "remedies": REMEDIES, **settings}
    return explain(ProfiledPair(after, before, **given))


def kinds(explanation: Explanation) -> list[str]:
    return [cause.kind for cause in explanation.causes]


def quantized(x: str, name: str, zero: str) -> list[Any]:
    """Nodes of Q and DQ of x."""
    return [
        helper.make_node("QuantizeLinear", [x, "scale", zero], [f"{name}_q"]),
        helper.make_node("DequantizeLinear", [f"{name}_q", "scale", zero], [name]),
    ]


def int8_weight(constants: dict[str, Any], name: str, shape: tuple[int, ...], axis: int) -> Any:
    """A node that unpacks an int8 weight per channel."""
    constants[f"{name}.q"] = RNG.integers(-100, 100, shape).astype(np.int8)
    constants[f"{name}.scale"] = np.full(shape[axis], 0.01, np.float32)
    constants[f"{name}.zero"] = np.zeros(shape[axis], np.int8)
    return helper.make_node(
        "DequantizeLinear", [f"{name}.q", f"{name}.scale", f"{name}.zero"], [name], axis=axis, name=f"unpack_{name}"
    )


ENCODER = (1, 32, 64)


def encoder(path: Path, quantize: str | None) -> Path:
    """Queries, keys and values of one tensor: in float, or between Q and DQ with activations in `quantize`."""
    constants: dict[str, Any] = {"scale": np.float32(0.05), "zero": np.array(0, quantize or "uint8")}
    nodes: list[Any] = [helper.make_node("Identity", ["x"], ["a"])] if quantize is None else quantized("x", "a", "zero")
    for part in "qkv":
        name = f"{part}.weight"
        if quantize is None:
            constants[name] = RNG.normal(size=(64, 64)).astype(np.float32)
            nodes.append(helper.make_node("MatMul", ["a", name], [part]))
            continue
        nodes += [int8_weight(constants, name, (64, 64), 1), helper.make_node("MatMul", ["a", name], [f"{part}_float"])]
        nodes += quantized(f"{part}_float", part, "zero")
    nodes.append(helper.make_node("Sum", ["q", "k", "v"], ["y"]))
    return save(path, nodes, constants, ENCODER)


def test_signed_activations_are_named_where_products_stay_in_float_or_take_the_slow_path(tmp_path: Path) -> None:
    before = with_times(profile(encoder(tmp_path / "f.onnx", None), ENCODER), {"MatMul": 1.0})
    found = profile(encoder(tmp_path / "s.onnx", "int8"), ENCODER)
    slow = {"MatMul": 1.0, "QLinearMatMul": 3.0, "MatMulIntegerToFloat": 3.0, "DequantizeLinear": 0.1}
    explanation = look(with_times(found, slow), before)
    cause = explanation.causes[0]
    assert cause.kind == "signed_activations"
    assert "signed int8" in cause.seen and "34 GFLOP/s" in cause.why and "kind: int8" in cause.recipe
    assert cause.speedup > 1.3
    # made for an engine that wants them signed: not to be built for the runtime that stands in
    asked = look(with_times(found, slow), before, target="tensorrt").causes[0]
    assert (
        "tensorrt, which it is made for, wants them signed" in asked.change
        and "target: onnxruntime-cpu" in asked.recipe
    )
    # a CPU whose signed kernels are as fast has no such cause
    arm = replace(ZEN4, gflops={"float32": 50.0, "uint8": 200.0, "int8": 200.0})
    assert "signed_activations" not in kinds(look(with_times(found, slow), before, peaks=arm, before_peaks=arm))


IMAGES = (1, 16, 12, 12)


def cnn(
    path: Path,
    quantize: bool,
    batch_norm: bool = False,
    around: bool = False,
    width: int = 16,
    images: tuple[int, ...] = IMAGES,
) -> Path:
    """Three convolutions with Relu; with a batch norm behind each, between Q and DQ of its own if `around`."""
    constants: dict[str, Any] = {"scale": np.float32(0.05), "zero": np.uint8(0)}
    nodes: list[Any] = []
    x, inputs = "x", 16
    for n in range(3):
        name = f"layer{n}.conv.weight"
        if quantize:
            nodes += [*quantized(x, f"a{n}", "zero"), int8_weight(constants, name, (width, inputs, 3, 3), 0)]
            x = f"a{n}"
        else:
            constants[name] = RNG.normal(size=(width, inputs, 3, 3)).astype(np.float32)
        nodes.append(helper.make_node("Conv", [x, name], [f"c{n}"], pads=[1] * 4))
        x = f"c{n}"
        if batch_norm:
            if around and quantize:
                nodes += quantized(x, f"b{n}", "zero")
                x = f"b{n}"
            parts = [f"bn{n}.{part}" for part in ("gamma", "beta", "mean", "var")]
            constants |= dict.fromkeys(parts, np.ones(width, np.float32))
            nodes.append(helper.make_node("BatchNormalization", [x, *parts], [f"n{n}"]))
            x = f"n{n}"
        nodes.append(helper.make_node("Relu", [x], [f"r{n}"]))
        x, inputs = f"r{n}", width
    if quantize:
        nodes += quantized(x, "last", "zero")
        x = "last"
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["y"]))
    return save(path, nodes, constants, images)


@pytest.mark.parametrize("around", [False, True])
def test_q_and_dq_left_around_batch_norm_are_named(tmp_path: Path, around: bool) -> None:
    before = with_times(profile(cnn(tmp_path / "f.onnx", False, True), IMAGES), {"Conv": 0.5})
    found = profile(cnn(tmp_path / "q.onnx", True, True, around), IMAGES)
    times = {"Conv": 0.5, "FusedConv": 0.5, "QLinearConv": 0.2, "BatchNormalization": 0.1, "DequantizeLinear": 0.1}
    explanation = look(with_times(found, times), before)
    cause = explanation.causes[0]
    assert cause.kind == "unfused_qdq"
    assert "BatchNormalization" in cause.seen if around else "executed in float" in cause.seen
    assert "fold batch norm" in cause.change and cause.speedup > 1.2
    assert explanation.remaining["DequantizeLinear"].n >= 3


def test_a_fused_int8_cnn_gets_no_cause(tmp_path: Path) -> None:
    before = profile(cnn(tmp_path / "f.onnx", False), IMAGES)
    after = profile(cnn(tmp_path / "q.onnx", True), IMAGES)
    assert after.find("QLinearConv") and not after.find("Conv", "FusedConv")
    before = with_times(before, {"Conv": 1.0})
    assert kinds(look(with_times(after, {"QLinearConv": 0.4}), before)) == []


FEW = (1, 4, 64)


def few_bits(path: Path, level: int, rows: tuple[int, ...] = FEW) -> Path:
    """Two layers with weights of four bits."""
    constants: dict[str, Any] = {}
    nodes = []
    for n, x in enumerate(("x", "h0")):
        constants[f"layer{n}.weight"] = RNG.integers(0, 255, (64, 2, 16)).astype(np.uint8)
        constants[f"layer{n}.scale"] = np.full(128, 0.01, np.float32)
        settings: dict[str, Any] = {"K": 64, "N": 64, "bits": 4, "block_size": 32, "accuracy_level": level}
        inputs = [x, f"layer{n}.weight", f"layer{n}.scale"]
        nodes.append(helper.make_node("MatMulNBits", inputs, [f"h{n}"], domain="com.microsoft", **settings))
    return save(path, nodes, constants, rows)


def test_few_bits_computed_in_float_are_named_where_a_trial_shows_the_gain(tmp_path: Path) -> None:
    asked: list[Product] = []

    def trials(products: Sequence[Product]) -> list[float | None]:
        asked.extend(products)
        return [1.0 if product.level < 4 else 0.3 for product in products]

    found = with_times(profile(few_bits(tmp_path / "m.onnx", 0), FEW), {"MatMulNBits": 1.0})
    (cause,) = look(found, trials=trials).causes
    assert cause.kind == "computed_in_float"
    assert "2 MatMulNBits have accuracy_level 0" in cause.seen and "in float32" in cause.why
    assert cause.saves_ms == pytest.approx(1.4) and cause.layers == ("layer0", "layer1")
    assert [(p.rows, p.inputs, p.outputs, p.bits, p.block, p.level) for p in asked] == [
        (4, 64, 64, 4, 32, 0),
        (4, 64, 64, 4, 32, 4),
    ]
    assert (
        look(with_times(profile(few_bits(tmp_path / "4.onnx", 4), FEW), {"MatMulNBits": 1.0}), trials=trials).causes
        == ()
    )


def test_small_groups_are_named_where_a_trial_shows_the_gain() -> None:
    def trials(products: Sequence[Product]) -> list[float | None]:
        return [1.0 if product.block < 128 else 0.6 for product in products]

    def seek(trials: Any, width: int = 384, **integers: int) -> tuple[Cause, ...]:
        return look(recorded([matrix_node("layer", "MatMulNBits", 1, width, 1.0, **integers)]), trials=trials).causes

    (cause,) = seek(trials)
    assert cause.kind == "small_groups" and cause.saves_ms == pytest.approx(0.4)
    assert "every 32 weights" in cause.seen and "0.6 ms in groups of 128" in cause.why
    assert "group_size: 128" in cause.recipe
    assert seek(trials, block_size=128) == seek(trials, width=352) == ()
    assert seek(lambda products: [1.0] * len(products)) == ()


def matrix_node(name: str, operator: str, rows: int, width: int, ms: float, **integers: int) -> NodeTime:
    """A recorded product of [rows, width] by [width, width]."""
    packed = operator == "MatMulNBits"
    weight = Tensor(f"{name}.weight", "uint8" if packed else "float32", (width, width // 2 if packed else width), True)
    x, y = Tensor("x", "float32", (1, rows, width)), Tensor(f"{name}_out", "float32", (1, rows, width))
    settings = {"K": width, "N": width, "bits": 4, "block_size": 32, "accuracy_level": 4, **integers} if packed else {}
    return NodeTime(name, operator, ms, (x, weight), (y,), settings, "uint8" if packed else "float32", name, name)


def recorded(nodes: Sequence[NodeTime]) -> Profile:
    return Profile("onnxruntime-cpu", tuple(nodes))


def test_few_bits_in_calls_of_many_rows_are_bound_by_their_products() -> None:
    def compare(rows: int, before_ms: float, after_ms: float) -> Explanation:
        sides = [
            recorded([matrix_node(f"layer{n}", operator, rows, 384, ms) for n in range(4)])
            for operator, ms in (("MatMul", before_ms), ("MatMulNBits", after_ms))
        ]
        return look(sides[1], sides[0])

    (cause,) = compare(2048, 6.0, 5.6).causes  # MiniLM at 16 x 128 tokens
    assert cause.kind == "compute_bound"
    assert "2048 rows in a call" in cause.seen and "reading even the float weights is at most" in cause.why
    assert cause.recipe == "passes:\n  - kind: int8\n" and cause.speedup > 2
    assert compare(1, 0.04, 0.015).causes == ()  # one token at a time: bound by reading, and faster


def conv_side(width: int, gflops: float, shared: str = "Conv") -> Profile:
    """Three recorded convolutions of `width` channels at a rate, as the file has them."""
    weight = Tensor("w", "float32", (width, width, 3, 3), True)
    image = Tensor("i", "float32", (1, width, 32, 32))
    ms = 2 * image.size * width * 9 / gflops / 1e6
    nodes = [
        NodeTime(f"c{n}", shared, ms, (image, weight), (image,), {}, "float32", f"layer{n}.conv", f"node{n}")
        for n in range(3)
    ]
    file = Graph(
        tuple(GraphNode(f"node{n}", "Conv", ("i", f"layer{n}.weight"), ("i",), {}) for n in range(3)),
        {f"layer{n}.weight": ("float32", (width, width, 3, 3)) for n in range(3)},
    )
    return replace(recorded(nodes), file=file)


def test_widths_that_kernels_do_not_like_are_named_by_their_rate_against_their_twins() -> None:
    (cause,) = look(conv_side(61, 50.0, "FusedConv"), conv_side(64, 110.0)).causes
    assert cause.kind == "odd_widths"
    assert "(61 x 61) at 50 GFLOP/s, its twin (64 x 64) at 110" in cause.seen
    assert "round_to: 16" in cause.recipe and cause.speedup == pytest.approx(2.2, abs=0.05)
    assert look(conv_side(56, 100.0), conv_side(64, 110.0)).causes == ()
    assert look(conv_side(61, 95.0), conv_side(64, 110.0)).causes == ()  # odd, but no slower


@pytest.mark.slow
def test_odd_widths_are_named_live(tmp_path: Path) -> None:
    shape = (1, 16, 48, 48)
    before, after = (
        profile_model("onnxruntime-cpu", path, 1, {"x": np.ones(shape, np.float32)}, budget_s=1.0)
        for path in (cnn(tmp_path / f"{width}.onnx", False, width=width, images=shape) for width in (32, 19))
    )
    explanation = look(after, before)
    assert kinds(explanation)[:1] == ["odd_widths"]
    assert explanation.causes[0].layers[0].startswith("layer")


def test_casts_are_named_with_the_share_that_they_take() -> None:
    half, full = Tensor("h", "float16", (4, 4)), Tensor("f", "float32", (4, 4))
    cast = NodeTime("cast", "Cast", 1.0, (half,), (full,))
    (cause,) = look(recorded([matrix_node("layer", "MatMul", 8, 64, 3.0), cast])).causes
    assert cause.kind == "casts" and cause.saves_ms == 1.0 and cause.speedup == 1.33
    whole = replace(cast, inputs=(replace(half, dtype="int64"),))
    assert look(recorded([matrix_node("layer", "MatMul", 8, 64, 3.0), whole])).causes == ()


def test_a_layer_that_is_slower_than_its_twin_is_left_as_it_was() -> None:
    before = recorded([matrix_node("a", "MatMul", 8, 64, 1.0), matrix_node("b", "MatMul", 8, 64, 1.0)])
    slow = replace(matrix_node("b", "MatMulIntegerToFloat", 8, 64, 2.0), computes_in="uint8")
    (cause,) = look(recorded([matrix_node("a", "MatMul", 8, 64, 1.0), slow]), before).causes
    assert cause.kind == "slower_layers" and cause.recipe.startswith("ignore: [b]") and cause.saves_ms == 1.0
    (older,) = look(recorded([matrix_node("a", "MatMul", 8, 64, 1.0), slow]), before, remedies={}).causes
    assert older == replace(cause, recipe=""), "a bundle without remedies shows the cause alone"


def test_zeros_that_are_multiplied_are_named() -> None:
    both = recorded([matrix_node("layer", "MatMul", 8, 64, 1.0)])
    (cause,) = look(both, both, histories={"layer": ["sparsify: sparse 50% by magnitude"]}).causes
    assert cause.kind == "zeros_computed" and cause.saves_ms == 0
    assert look(both, both, histories={"layer": ["distill: distilled"]}).causes == ()


def test_a_call_that_is_mostly_the_runtimes_own_cost_is_named() -> None:
    both = replace(recorded([matrix_node("layer", "MatMul", 8, 64, 0.01)]), call_ms=0.03)
    (cause,) = look(both, both).causes
    assert cause.kind == "fixed_cost" and "0.03 ms, and its 1 nodes 0.01 of that" in cause.seen
    assert look(replace(both, call_ms=0.011), both).causes == ()


def test_operators_that_a_slower_candidate_has_more_of_are_named() -> None:
    product, other = matrix_node("layer", "MatMul", 8, 64, 1.0), NodeTime("s", "Softmax", 0.1)
    quantized_one = NodeTime("s", "QLinearSoftmax", 0.9)
    (cause,) = look(recorded([product, quantized_one]), recorded([product, other])).causes
    assert cause.kind == "other_operators" and "Softmax 0.9 ms (before 0.1)" in cause.seen
    assert cause.saves_ms == pytest.approx(0.8) and "placement: fastest" in cause.recipe
    pair = recorded([product, quantized_one]), recorded([product, other])
    (cause,) = look(*pair, timed_placement=True).causes
    assert cause.recipe == "" and "timed at the build already" in cause.change, "what is in force is not advised"
    fast = replace(product, ms=0.1)
    assert look(recorded([fast, replace(quantized_one, ms=0.3)]), recorded([product, other])).causes == ()


def test_twins_are_matched_by_layer_then_by_node_then_by_order() -> None:
    ours = [replace(matrix_node(f"n{n}", "MatMul", 8, 64, 1.0), layer=layer) for n, layer in enumerate(("one", "n1"))]
    theirs = [replace(matrix_node(f"m{n}", "MatMul", 8, 64, 1.0), layer=layer) for n, layer in enumerate(("m0", "one"))]
    twins = match_twins(recorded(ours), recorded(theirs))
    assert twins["n0"].name == "m1" and twins["n1"].name == "m0"


def test_every_remedy_is_one_that_a_cause_asks_for() -> None:
    source = Path(causes.__file__).read_text()
    asked = re.findall(r'(?:fill_remedy\(|advise_placement\(\s*pair, )"(\w+)"', source)
    assert len(asked) >= 13 and set(asked) == set(REMEDIES)
