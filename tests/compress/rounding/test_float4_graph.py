"""NVFP4 and MXFP8 in an ONNX graph for TensorRT: the numbers that were rounded, inputs scaled as they run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import graphs
import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_ir.passes.common import ShapeInferencePass

from compress.export.onnx import save_graph
from compress.formats.schemes import PRESETS
from compress.graph.half import to_half
from compress.graph.layers import find_layers
from compress.graph.run import clone
from compress.passes import Rtn
from compress.planning.judging import explain_not_run
from compress.recipe.schema import Recipe
from compress.rounding.activations import round_inputs
from compress.rounding.grid import round_to_grid
from compress.rounding.qdq import write_state
from compress.rounding.state import GraphState, restore_state
from compress.specs import ModelSpec

INPUT_SCALE = 0.003
ROUNDING = ("DequantizeLinear", "Reshape")


class FP4DynamicQuantize(OpRun):
    """As TensorRT's documentation has it: each block's scale in E4M3, below one float."""

    op_domain = "trt"

    def _run(self, x: Any, scale: Any, axis: int, block_size: int, scale_type: int) -> Any:  # type: ignore[override]
        assert (axis, block_size, scale_type) == (-1, 16, onnx.TensorProto.FLOAT8E4M3FN)
        blocks = x.reshape(*x.shape[:-1], -1, block_size)
        scales = (np.abs(blocks).max(-1) / 6 / scale).astype(ml_dtypes.float8_e4m3fn)
        spread = scales.astype(np.float32)[..., None] * scale
        return (blocks / spread).astype(ml_dtypes.float4_e2m1fn).reshape(x.shape), scales


class MXFP8DynamicQuantize(OpRun):
    """As TensorRT's documentation has it: the least power of two below which no number of a block is cut off."""

    op_domain = "trt"

    def _run(self, x: Any, axis: int, block_size: int, output_dtype: int) -> Any:  # type: ignore[override]
        assert (axis, block_size, output_dtype) == (-1, 32, onnx.TensorProto.FLOAT8E4M3FN)
        blocks = x.reshape(*x.shape[:-1], -1, block_size)
        exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 448))
        numbers = (blocks / np.exp2(exponents)[..., None]).astype(ml_dtypes.float8_e4m3fn)
        return numbers.reshape(x.shape), (exponents + 127).astype(np.uint8)


class MXFP8DequantizeLinear(OpRun):
    op_domain = "trt"

    def _run(self, x: Any, exponents: Any, axis: int, block_size: int, output_dtype: int) -> Any:  # type: ignore[override]
        assert output_dtype == onnx.TensorProto.FLOAT
        return (x.astype(np.float32) * np.repeat(np.exp2(exponents.astype(np.float32) - 127), block_size, axis),)


OPERATORS = [
    type(f"TRT_{made.__name__}", (made,), {})
    for made in (FP4DynamicQuantize, MXFP8DynamicQuantize, MXFP8DequantizeLinear)
]


def state(scheme: str = "NVFP4A16") -> GraphState:
    model = graphs.transformer()
    layers = {layer.name: layer for layer in find_layers(model) if layer.op != "Gather"}
    numbers = PRESETS[scheme].weights
    weights = {n: round_to_grid(torch.from_numpy(layer.matrix().copy()), numbers) for n, layer in layers.items()}
    scales = dict.fromkeys(weights, INPUT_SCALE) if PRESETS[scheme].activations else {}
    return GraphState(model, weight_only=list(weights), weights=weights, input_scales=scales)


def float_twin(given: GraphState) -> ir.Model:
    """The graph with the floats that the numbers stand for."""
    return write_state(given, "u8s8")


def test_the_graph_is_standard_and_computes_with_the_rounded_weights(tmp_path: Path) -> None:
    given = state()
    model = ir.to_proto(write_state(given, "s8s8"))
    onnx.checker.check_model(model, full_check=True)
    kinds = {tensor.data_type for tensor in model.graph.initializer}
    assert {onnx.TensorProto.FLOAT4E2M1, onnx.TensorProto.FLOAT8E4M3FN} <= kinds
    dequantized = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
    assert len(dequantized) == 2 * len(given.weight_only)
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for layer in find_layers(clone(given.model)):
        if layer.name not in given.weights:
            continue
        blocks = dequantized[f"{layer.name}/weight/float"]
        part = onnx.helper.make_model(
            onnx.helper.make_graph(
                [dequantized[blocks.input[1]], blocks],
                "weight",
                [],
                [onnx.helper.make_tensor_value_info(blocks.output[0], onnx.TensorProto.FLOAT, None)],
                [t for t in model.graph.initializer if t.name in {*blocks.input, *dequantized[blocks.input[1]].input}],
            ),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )
        (found,) = ReferenceEvaluator(part).run(None, {})
        exact = given.weights[layer.name].dequantize()
        assert tensors[blocks.input[0]].size == exact.size
        np.testing.assert_allclose(
            found, exact.T if found.shape != exact.shape or layer.axis == 1 else exact, rtol=3e-7
        )


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP8", "MXFP8A16"])
def test_products_read_what_the_scheme_rounds(scheme: str) -> None:
    """TensorRT's own operators are computed here as its documentation has them."""
    given = state(scheme)
    model = ir.to_proto(write_state(given, "s8s8"))
    onnx.checker.check_model(model)
    assert {entry.domain: entry.version for entry in model.opset_import}["trt"] == 1
    inputs = PRESETS[scheme].activations
    makers = {output: node for node in model.graph.node for output in node.output}
    products = {node.output[0]: node for node in model.graph.node if node.op_type == "MatMul"}
    seen = 0
    for layer in find_layers(clone(given.model)):
        if layer.name not in given.weights:
            continue
        reads, weight = makers[f"{layer.name}/weight/float"], given.weights[layer.name]
        (product,) = (node for node in products.values() if node.input[1] == reads.output[0])
        np.testing.assert_allclose(compute(model, reads.output[0]), weight.dequantize().T, rtol=3e-7)
        if inputs is None:
            assert product.input[0] not in makers or not makers[product.input[0]].domain
            continue
        rank = len(layer.data_input.shape or ()) - 1
        x = np.random.default_rng(0).standard_normal((*[3] * rank, weight.values.shape[1])).astype(np.float32)
        (source,) = (part for part in walk_back(makers, product.input[0]) if part == layer.data_input.name)
        found = compute(model, product.input[0], {source: x})
        stored = INPUT_SCALE if inputs.has_stored_scale else None
        ours = round_inputs(torch.from_numpy(x), inputs, stored).numpy()
        if scheme == "NVFP4":
            np.testing.assert_allclose(found, ours, rtol=1e-6)
        else:  # the library's power of two may be the next smaller one
            assert np.abs(found - x).max() <= 2**-4 * np.abs(x).max() and np.abs(found - ours).max() < 0.1
        seen += 1
    assert seen == (0 if inputs is None else len(given.weights))


def walk_back(makers: dict[str, Any], name: str) -> list[str]:
    """The names from which a rounded input is made, itself first."""
    names = [name]
    while names[-1] in makers and (makers[names[-1]].domain or makers[names[-1]].op_type in ROUNDING):
        names.append(makers[names[-1]].input[0])
    return names


def compute(model: onnx.ModelProto, output: str, feeds: dict[str, np.ndarray] | None = None) -> np.ndarray:
    """A tensor of the graph, of `feeds` in place of what makes these."""
    feeds = feeds or {}
    nodes, wanted = [], {output}
    for node in reversed(model.graph.node):
        if wanted & set(node.output) and not set(node.output) & set(feeds):
            nodes.insert(0, node)
            wanted |= set(node.input)
    part = onnx.helper.make_model(
        onnx.helper.make_graph(
            nodes,
            "part",
            [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in feeds],
            [onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None)],
            [tensor for tensor in model.graph.initializer if tensor.name in wanted],
        ),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    (found,) = ReferenceEvaluator(part, new_ops=OPERATORS).run(None, feeds)
    return np.asarray(found)


def test_layers_that_read_one_tensor_share_its_rounding() -> None:
    given = state("NVFP4")
    model = write_state(given, "s8s8")
    tensors = [n.inputs[0].name for n in model.graph if n.domain == "trt" and n.inputs[0] is not None]
    assert len(tensors) == len(set(tensors)) < len(given.weights)
    other = next(iter(given.weights))
    apart = write_state(replace(given, input_scales={**given.input_scales, other: 2 * INPUT_SCALE}), "s8s8")
    assert sum(n.domain == "trt" for n in apart.graph) == len(tensors) + 1


def test_half_precision_leaves_the_scales_of_blocks_in_floats() -> None:
    model = write_state(state("NVFP4"), "s8s8")
    ShapeInferencePass()(model)
    to_half(model, "float16", ())
    for node in model.graph:
        if node.op_type == "DequantizeLinear" or node.domain == "trt":
            assert all(v is None or v.dtype != ir.DataType.FLOAT16 for v in (*node.inputs, *node.outputs)), node.name
        elif node.op_type == "MatMul":
            assert node.inputs[1] is not None and node.inputs[1].dtype == ir.DataType.FLOAT16


def test_a_state_with_float4_is_kept_and_has_a_float_twin_for_cpus() -> None:
    given = state()
    again = restore_state(given.model, given.record(), given.arrays())
    for name, weight in given.weights.items():
        kept = again.weights[name]
        np.testing.assert_array_equal(kept.dequantize(), weight.dequantize())
        np.testing.assert_array_equal(kept.stored["scales"], weight.stored["scales"])
    twin = float_twin(replace(given))
    assert all(value.dtype != ir.DataType.FLOAT4E2M1 for value in twin.graph.initializers.values())


def test_a_file_that_nothing_here_runs_is_checked_and_written(tmp_path: Path) -> None:
    save_graph(write_state(state(), "s8s8"), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").is_file()


def test_the_plan_says_that_a_verdict_waits_for_the_engine() -> None:
    def explain(scheme: str) -> str | None:
        model = ModelSpec(source="onnx:m.onnx", task="text-classification")
        passes = (Rtn(scheme=scheme),)  # type: ignore[arg-type]
        return explain_not_run(Recipe(version=1, name="r", model=model, target="tensorrt-rtx", passes=passes))

    text = explain("NVFP4A16")
    assert text is not None and "tensorrt-rtx does not work here (" in text and "target: vllm" in text
    assert explain("W4A16") is None


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["NVFP4A16", "NVFP4", "MXFP8", "MXFP8A16"])
def test_tensorrt_for_rtx_compiles_it(scheme: str, tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    path = tmp_path / "model.onnx"
    ir.save(write_state(state(scheme), "s8s8"), path)
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(path.read_bytes()), [str(parser.get_error(i)) for i in range(parser.num_errors)]
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM120, 0)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        sizes = tuple(4 if size == -1 else size for size in tensor.shape)
        profile.set_shape(tensor.name, sizes, sizes, sizes)
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
