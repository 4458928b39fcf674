"""NVFP4 weights in an ONNX graph for TensorRT: standard operators, the numbers that were rounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import graphs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from compress.export.onnx import save_graph
from compress.formats.schemes import PRESETS
from compress.graph.layers import find_layers
from compress.graph.run import clone
from compress.passes import Rtn
from compress.quantize.grid import round_to_grid
from compress.quantize.qdq import write_state
from compress.quantize.state import GraphState, restore_state

NVFP4 = PRESETS["NVFP4A16"].weights


def state() -> GraphState:
    model = graphs.transformer()
    layers = {layer.name: layer for layer in find_layers(model) if layer.op != "Gather"}
    weights = {n: round_to_grid(torch.from_numpy(layer.matrix().copy()), NVFP4) for n, layer in layers.items()}
    return GraphState(model, weight_only=list(weights), weights=weights)


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
    text = Rtn(scheme="NVFP4A16").explain_unjudged("tensorrt-rtx", "no GPU")
    assert text is not None and "tensorrt-rtx does not work here (no GPU)" in text and "target: vllm" in text
    assert Rtn(scheme="W4A16").explain_unjudged("tensorrt-rtx", "no GPU") is None


@pytest.mark.slow
def test_tensorrt_for_rtx_compiles_it(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    path = tmp_path / "model.onnx"
    ir.save(write_state(state(), "s8s8"), path)
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
