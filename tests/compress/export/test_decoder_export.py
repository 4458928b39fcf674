"""One graph for prefill, decoding, batches and padding: the model's own logits, and layers by their own names."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from decoder_graphs import CONFIGS, Decoder, exported, kinds, make, relative, stepwise, tokens, torch_logits
from safetensors.numpy import load, save

from compress.export.onnx import finish, float_graph, save_graph
from compress.formats.targets import TARGETS
from compress.graph.layers import find_layers
from compress.graph.specs import MAX_LENGTH, cache_of
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.rounding.state import GraphState, restore_state
from runtime.bundle.manifest import KvCacheSpec

pytestmark = pytest.mark.slow
KINDS = [kind for kind in CONFIGS if kind not in ("mamba", "phi", "bloom")]


@pytest.mark.parametrize("kind", kinds(KINDS))
def test_the_graph_is_the_model(kind: str) -> None:
    decoder = Decoder(exported(kind))
    ids = tokens(1, 14)
    mask = np.ones_like(ids)
    assert relative(torch_logits(kind, ids, mask), stepwise(decoder, ids, mask, 8)) < 1e-5
    ids = tokens(3, 13, seed=1)
    mask = np.ones_like(ids)
    mask[0, :3] = mask[2, :5] = 0  # padding on the left
    got, kept = stepwise(decoder, ids, mask, 9), mask.astype(bool)
    assert relative(torch_logits(kind, ids, mask)[kept], got[kept]) < 1e-5


@pytest.mark.parametrize("kind", kinds(["llama", "gpt2", "gemma3"]))
def test_layers_have_the_names_of_their_modules(kind: str) -> None:
    graph, module = exported(kind), make(kind)
    weights = {name: layer for name, layer in module.named_modules() if getattr(layer, "weight", None) is not None}
    layers = find_layers(graph)
    assert {layer.name for layer in layers} == {name for name, layer in weights.items() if layer.weight.ndim == 2}, (
        "every matrix is a layer, and every layer a module"
    )
    for layer in layers:
        weight = weights[layer.name].weight.numpy()
        np.testing.assert_array_equal(layer.matrix(), weight.T if "Conv1D" in str(weights[layer.name]) else weight)


def test_what_the_graph_says_of_itself() -> None:
    graph = exported("llama")
    assert [value.name for value in graph.graph.inputs][:3] == ["input_ids", "attention_mask", "past_key_values.0.key"]
    assert [value.name for value in graph.graph.outputs] == [
        "logits",
        *(f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")),
    ]
    assert cache_of(graph) == KvCacheSpec(2, 2, 16, "float32", shared_buffer=False)
    assert graph.metadata_props[MAX_LENGTH] == "64" and graph.opset_imports[""] == 21


def test_a_tied_table_is_one_until_either_is_quantized(tmp_path: Path) -> None:
    graph = exported("gemma3")
    tables = [v for v in float_graph(graph).graph.initializers.values() if v.const_value and 101 in v.const_value.shape]
    assert [value.name for value in tables] == ["wrapped.model.embed_tokens.weight"]
    save_graph(float_graph(graph), tmp_path / "float.onnx")
    ids = tokens(1, 9)
    mask = np.ones_like(ids)
    got = stepwise(Decoder(ir.load(tmp_path / "float.onnx")), ids, mask, 9)
    assert relative(torch_logits("gemma3", ids, mask), got) < 1e-5
    head = next(layer for layer in find_layers(graph) if layer.name == "lm_head")
    state = GraphState(graph, weight_only=["lm_head"], weights={"lm_head": round_to_nearest(head.matrix(), 8, 32)})
    finished, _ = finish(state, TARGETS["openvino"])
    kinds = [
        v.const_value.dtype
        for v in finished.graph.initializers.values()
        if v.const_value and 101 in v.const_value.shape
    ]
    assert sorted(kind.name for kind in kinds) == ["FLOAT", "FLOAT", "INT8", "INT8"], "table, scales, integers, zeros"


def test_a_state_remembers_how_its_cache_and_its_floats_are_kept() -> None:
    scales = {"model.layers.0.self_attn": (0.5, 0.25)}
    values = np.linspace(-400, 400, 64, dtype=np.float32).reshape(2, 32).astype(ml_dtypes.float8_e4m3fn)
    weight = QuantizedWeight(values, np.ones((2, 1), np.float32), None, 8, -1)
    state = GraphState(exported("llama"), weights={"fc": weight}, kv_cache="int8", kv_scales=scales)
    again = restore_state(state.model, state.record(), load(save(state.arrays())))
    assert again.kv_cache == "int8" and again.kv_scales == scales
    np.testing.assert_array_equal(again.weights["fc"].dequantize(), weight.dequantize())
