"""ONNX files as strangers write them: cleaned, compared with themselves, quantized; or refused, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hub_double import cache_as_hub
from onnx import TensorProto, helper, numpy_helper

from compress.errors import SourceError
from compress.export.parity import HALF_TOLERANCE, check_parity
from compress.facts import ModelFacts
from compress.formats.targets import TARGETS
from compress.graph.cleanup import clean_graph, describe_clean_up
from compress.graph.layers import find_layers
from compress.graph.run import open_session, run_batches
from compress.models.load import OnnxModel, load_model
from compress.models.onnx_facts import onnx_facts
from compress.models.onnx_graph import open_onnx
from compress.models.source import locate
from compress.passes import Int8, Rtn
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState
from compress.specs import ModelSpec
from compress.work import apply_pass

CPU = TARGETS["onnxruntime-cpu"]
RNG = np.random.default_rng(5)
make = helper.make_node
SHAPES = {"x": ((3, 8, 8), "float32")}


def weights(dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Of CONVOLUTIONS: a kernel [8, 3, 3, 3], its norm, a matrix [5, 8]."""
    arrays = {"kernel": RNG.normal(size=(8, 3, 3, 3)), "bias": RNG.normal(size=5), "matrix": RNG.normal(size=(5, 8))}
    arrays |= {name: RNG.uniform(0.5, 2, 8) for name in ("gain", "shift", "mean", "variance")}
    return {name: array.astype(dtype) for name, array in arrays.items()}


def layers(kernel: str = "kernel", matrix: str = "matrix") -> list[onnx.NodeProto]:
    """x [n, 3, 8, 8] -> convolution, norm, Relu, mean -> y [n, 5]; no node is named."""
    return [
        make("Conv", ["x", kernel], ["c"], pads=[1, 1, 1, 1]),
        make("BatchNormalization", ["c", "gain", "shift", "mean", "variance"], ["b"]),
        make("Relu", ["b"], ["r"]),
        make("GlobalAveragePool", ["r"], ["g"]),
        make("Flatten", ["g"], ["f"]),
        make("Gemm", ["f", matrix, "bias"], ["y"], transB=1),
    ]


def model(
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    opset: int = 17,
    batch: int | str = "n",
    float_type: int = TensorProto.FLOAT,
    ir_version: int = 8,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "stranger",
        [helper.make_tensor_value_info("x", float_type, [batch, 3, 8, 8])],
        [helper.make_tensor_value_info("y", float_type, [batch, 5])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    if ir_version < 4:  # then initializers had to be inputs, too
        graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)


def plain() -> onnx.ModelProto:
    return model(layers(), weights())


def old() -> onnx.ModelProto:
    return model(layers(), weights(), opset=9, ir_version=3)


def fixed() -> onnx.ModelProto:
    return model(layers(), weights(), batch=1)


def made_by_nodes() -> onnx.ModelProto:
    """The kernel is cast, transposed and scaled by nodes, the matrix one value in a shape."""
    constants = weights()
    kernel = numpy_helper.from_array(constants.pop("kernel").transpose(3, 2, 1, 0).astype(np.float64))
    constants |= {"half": np.array(0.5, np.float32), "shape": np.array([5, 8])}
    del constants["matrix"]
    value = numpy_helper.from_array(np.array([0.02], np.float32))
    nodes = [
        make("Constant", [], ["k0"], value=kernel),
        make("Cast", ["k0"], ["k1"], to=TensorProto.FLOAT),
        make("Transpose", ["k1"], ["k2"]),
        make("Identity", ["k2"], ["k3"]),
        make("Mul", ["k3", "half"], ["k4"]),
        make("ConstantOfShape", ["shape"], ["m"], value=value),
    ]
    return model([*nodes, *layers("k4", "m")], constants)


def shape_arithmetic() -> onnx.ModelProto:
    """Flatten as exporters wrote it: Shape, Gather, Unsqueeze, Concat, Reshape."""
    constants = weights() | {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])}
    nodes = layers()
    nodes[4:5] = [
        make("Shape", ["g"], ["s"]),
        make("Gather", ["s", "zero"], ["first"], axis=0),
        make("Unsqueeze", ["first", "axis"], ["row"]),
        make("Concat", ["row", "rest"], ["sizes"], axis=0),
        make("Reshape", ["g", "sizes"], ["f"]),
    ]
    return model(nodes, constants, batch=1)


def half() -> onnx.ModelProto:
    return model(layers(), weights(np.float16), float_type=TensorProto.FLOAT16)


def with_functions() -> onnx.ModelProto:
    """The convolution, its norm and Relu are a function that holds another."""
    arguments = ["x", "kernel", "gain", "shift", "mean", "variance"]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("of.mine", 1)]
    inner = helper.make_function("of.mine", "Rectify", ["b"], ["r"], [make("Relu", ["b"], ["r"])], imports[:1])
    body = [*layers()[:2], make("Rectify", ["b"], ["r"], domain="of.mine")]
    outer = helper.make_function("of.mine", "Stage", arguments, ["r"], body, imports)
    proto = model([make("Stage", arguments, ["r"], domain="of.mine"), *layers()[3:]], weights())
    proto.functions.extend([inner, outer])
    proto.opset_import.append(imports[1])
    return proto


def with_branches() -> onnx.ModelProto:
    """A branch that is known, and a loop that doubles twice, with a product in its body."""
    constants = weights() | {"known": np.array(True), "twice": np.array(2), "eye": np.eye(5, dtype=np.float32)}
    info = helper.make_tensor_value_info
    yes = helper.make_graph([make("Relu", ["b"], ["r1"])], "yes", [], [info("r1", TensorProto.FLOAT, None)])
    no = helper.make_graph([make("Neg", ["b"], ["r2"])], "no", [], [info("r2", TensorProto.FLOAT, None)])
    steps = [make("MatMul", ["v", "eye"], ["p"]), make("Add", ["p", "p"], ["w"]), make("Identity", ["go"], ["on"])]
    body = helper.make_graph(
        steps,
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, ["n", 5])],
        [info("on", TensorProto.BOOL, []), info("w", TensorProto.FLOAT, ["n", 5])],
    )
    nodes = layers()
    nodes[2] = make("If", ["known"], ["r"], then_branch=yes, else_branch=no)
    nodes[5].output[0] = "once"
    return model([*nodes, make("Loop", ["twice", "known", "once"], ["y"], body=body)], constants)


def scaled_gemm() -> onnx.ModelProto:
    nodes, constants = layers(), weights()
    nodes[5].attribute.extend([helper.make_attribute("alpha", 0.5), helper.make_attribute("beta", 2.0)])
    constants["bias"] = constants["bias"].reshape(1, 5)
    return model(nodes, constants)


FILES = [plain, old, fixed, made_by_nodes, shape_arithmetic, half, with_functions, with_branches, scaled_gemm]
DONE = {
    old: ("initializers no longer inputs", "opset 9 raised to 20"),
    made_by_nodes: ("Cast folded", "Transpose folded", "Identity folded", "Mul folded", "ConstantOfShape folded"),
    shape_arithmetic: ("Shape folded", "Gather folded", "Unsqueeze folded", "Concat folded"),
    half: ("half-precision weights made float32",),
    with_functions: ("functions inlined",),
    with_branches: ("If folded",),
    scaled_gemm: ("factors and biases of Gemm made plain",),
}


def write(make_file: Callable[[], onnx.ModelProto], folder: Path) -> Path:
    """Weights lie beside the file, but where ONNX Runtime 1.31 finds none: axes, and what the body of a loop reads.

    Both are links, as in a hub's cache.
    """
    (snapshot := folder / "snapshot").mkdir()
    path, beside = snapshot / "model.onnx", make_file is not with_branches
    onnx.save(make_file(), path, save_as_external_data=beside, location="weights", size_threshold=64)
    cache_as_hub(snapshot)
    return path


def load(path: Path, dtype: str = "float32") -> tuple[ModelFacts, OnnxModel]:
    shapes = {"x": (SHAPES["x"][0], dtype)}
    loaded = load_model(locate(ModelSpec(source=f"onnx:{path}", task="generic"), Path()), shapes)
    assert isinstance(loaded, OnnxModel)
    return onnx_facts(path, "generic", shapes), loaded


def batches(loaded: OnnxModel) -> list[dict[str, np.ndarray]]:
    (spec,) = loaded.inputs
    n = spec.shape[0] if isinstance(spec.shape[0], int) else 16
    return [{"x": RNG.normal(size=(n, 3, 8, 8)).astype(spec.dtype)} for _ in range(4)]


@pytest.mark.parametrize("make_file", FILES, ids=lambda make_file: make_file.__name__)
def test_a_file_is_cleaned_computes_the_same_and_goes_through_int8_and_rtn(
    make_file: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    path = write(make_file, tmp_path)
    facts, loaded = load(path, "float16" if make_file is half else "float32")
    assert set(DONE.get(make_file, ())) <= facts.clean_up.keys(), describe_clean_up(facts.clean_up)
    assert facts.clean_up["batch norms and channel scales folded"] == 1
    assert [(layer.op, layer.shape) for layer in facts.layers] == [("Conv", (8, 3, 3, 3)), ("Gemm", (5, 8))]
    assert [layer.name for layer in find_layers(loaded.graph)] == [layer.name for layer in facts.layers]
    assert facts.opset == 20 and all(layer.macs for layer in facts.layers)
    feeds = batches(loaded)
    parity = check_parity(loaded, loaded.graph, feeds)
    assert parity is not None and parity < (HALF_TOLERANCE if make_file is half else 1e-5)
    before = np.concatenate(graphs.run(loaded.graph, feeds)).astype(np.float32)
    for config in (Int8(), Rtn(bits=8, group_size=8, ignore=())):
        assert not config.check(facts, CPU).problems
        state = apply_pass(config, GraphState(loaded.graph), graphs.context(feeds)).model
        outputs = run_batches(open_session(write_state(state, "u8s8")), feeds)
        after = np.concatenate([out["y"] for out in outputs]).astype(np.float32)
        assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.99, config.kind


def test_what_lies_in_a_loop_stays_and_the_plan_says_so(tmp_path: Path) -> None:
    facts, _ = load(write(with_branches, tmp_path))
    assert any("1 products lie within the body" in note for note in facts.notes)


def test_operators_of_nobody_are_refused(tmp_path: Path) -> None:
    proto = plain()
    proto.graph.node[2].domain = "of.nobody"
    proto.opset_import.append(helper.make_opsetid("of.nobody", 1))
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(SourceError, match=r"ONNX Runtime has no operator of\.nobody\.Relu"):
        open_onnx(tmp_path / "m.onnx")


def test_double_precision_is_said_to_stay(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    nodes = [  # ONNX Runtime has no convolution of doubles
        make("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        make("Gemm", ["m", "matrix", "bias"], ["y"], transB=1),
    ]
    doubles = {"matrix": RNG.normal(size=(5, 3)), "bias": RNG.normal(size=5)}
    onnx.save(model(nodes, doubles, float_type=TensorProto.DOUBLE), path)
    facts = onnx_facts(path, "generic", {"x": ((3, 8, 8), "float64")})
    (problem,) = Int8().check(facts, CPU).problems
    assert "computed in 64 bits, which nothing rounds; convert the model to float32" in problem


def test_a_half_that_is_input_and_output_stays_what_it_is() -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2]) for name in "xy")
    graph = helper.make_graph([make("Relu", ["x"], ["y"])], "through", [x], [y, x])
    opened = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))
    clean_graph(opened)
    kinds = [(value.name, value.dtype) for value in opened.graph.outputs]
    assert kinds == [("y", ir.DataType.FLOAT16), ("x", ir.DataType.FLOAT16)]
    feeds = {"x": np.array([-1, 2], np.float16)}
    assert [out.tolist() for out in open_session(opened).run(None, feeds)] == [[0, 2], [-1, 2]]
