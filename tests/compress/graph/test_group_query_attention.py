"""Attention as one operator with one buffer: the numbers of the plain graph, in every form that models have it in."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from decoder_graphs import CONFIGS, LENGTH, Decoder, build, exported, kinds, relative, stepwise, tokens

from compress.errors import ExportError
from compress.export.decoder import export_decoder
from compress.export.onnx import finish, save_graph
from compress.formats.targets import TARGETS
from compress.graph.attention import to_group_query_attention
from compress.graph.attention_parts import evaluate, find_attention
from compress.graph.edit import append, reroute, uses_of
from compress.graph.fast_forms import divide_by_root, merge_products
from compress.graph.layers import constant, find_layers
from compress.graph.run import clone, open_session
from compress.graph.specs import ATTENTION, MAX_LENGTH, attention_layers, cache_of
from compress.rounding.qdq import in_kernel_blocks, write_state
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.rounding.state import GraphState

pytestmark = pytest.mark.slow
CPU = TARGETS["onnxruntime-cpu"]
MATCHED = [kind for kind in CONFIGS if kind not in ("mamba", "bloom")]
LENGTHS = (14, 9, 11)
"""Tokens of three prompts."""


def counted(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def rewritten(kind: str) -> ir.Model:
    model, notes = to_group_query_attention(exported(kind))
    assert notes == [] and counted(model)[ATTENTION] == len(attention_layers(model))
    return model


@pytest.mark.parametrize("kind", kinds(MATCHED))
@pytest.mark.parametrize("buffer", [0, 32])
def test_prompts_of_unlike_length_give_what_each_gives_alone(kind: str, buffer: int) -> None:
    """Padding stands on the right; a buffer of 0 is one that grows."""
    plain, ours, steps = Decoder(exported(kind)), Decoder(rewritten(kind), buffer), 5
    ids = tokens(3, max(LENGTHS) + steps)
    alone = []
    for row, length in enumerate(LENGTHS):
        plain.start(1)
        alone.append(plain(ids[row : row + 1, : length + steps], np.ones((1, length + steps), np.int64))[0])
    ours.start(3)
    width = np.arange(max(LENGTHS) + steps)
    for step in range(steps + 1):
        mask = np.array([width[: max(LENGTHS) + step] < length + step for length in LENGTHS]).astype(np.int64)
        read = (
            ids[:, : max(LENGTHS)] * mask
            if step == 0
            else np.array([[ids[r, n + step - 1]] for r, n in enumerate(LENGTHS)])
        )
        logits = ours(read, mask)
        for row, length in enumerate(LENGTHS):
            seen = slice(0, length) if step == 0 else slice(length + step - 1, length + step)
            assert relative(alone[row][seen], logits[row, : seen.stop - seen.start]) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prompt_may_be_read_in_parts(kind: str) -> None:
    plain, ours, ids = Decoder(exported(kind)), Decoder(rewritten(kind), 32), tokens(1, 14)
    plain.start(1), ours.start(1)
    whole = plain(ids, np.ones((1, 14), np.int64))
    parts = [ours(ids[:, :5], np.ones((1, 5), np.int64)), ours(ids[:, 5:], np.ones((1, 14), np.int64))]
    assert relative(whole, np.concatenate(parts, axis=1)) < 1e-5


def test_the_attributes_are_what_the_nodes_did() -> None:
    nodes = [node for node in rewritten("gemma3").graph if node.op_type == ATTENTION]
    windows = [
        node.attributes["local_window_size"].as_int() if "local_window_size" in node.attributes else 0 for node in nodes
    ]
    assert windows == [6, 0], "the sliding layer, the full one"
    assert all(
        node.attributes["do_rotary"].as_int() == 1 and node.attributes["scale"].as_float() == 0.25 for node in nodes
    )
    assert cache_of(rewritten("llama")) == cache_of_shared(exported("llama"))
    gpt2 = next(node for node in rewritten("gpt2").graph if node.op_type == ATTENTION)
    assert "do_rotary" not in gpt2.attributes and len(gpt2.inputs) == 7


def test_a_window_is_seen_whose_model_does_not_say_its_length() -> None:
    import transformers

    name, _, fields = CONFIGS["gemma3"]
    sliding = {**fields, "sliding_window": 20, "layer_types": ["sliding_attention"], "num_hidden_layers": 1}
    model = export_decoder(build(getattr(transformers, name)(**sliding)))
    del model.metadata_props[MAX_LENGTH]
    (node,) = (node for node in to_group_query_attention(model)[0].graph if node.op_type == ATTENTION)
    assert node.attributes["local_window_size"].as_int() == 20


def test_code_that_counts_positions_itself_gives_the_same_numbers() -> None:
    import transformers

    class Counting(transformers.LlamaForCausalLM):
        def forward(self, input_ids, attention_mask=None, past_key_values=None, **more):  # type: ignore[no-untyped-def]
            return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **more)

    net = build(transformers.LlamaConfig(**CONFIGS["llama"][2], num_hidden_layers=1))
    net.__class__ = Counting
    plain = export_decoder(net)
    ours, _ = to_group_query_attention(clone(plain))
    ids, mask = tokens(1, 12), np.ones((1, 12), np.int64)
    assert relative(stepwise(Decoder(plain), ids, mask, 8), stepwise(Decoder(ours, 16), ids, mask, 8)) < 1e-5


def cache_of_shared(model: ir.Model) -> object:
    from dataclasses import replace

    cache = cache_of(model)
    assert cache is not None
    return replace(cache, shared_buffer=True)


def test_capped_scores() -> None:
    """tanh(scores / 5) x 5 between the scale and the mask, put into a graph that has none."""
    model = exported("llama")
    for layer in range(2):
        scaled = next(n for n in model.graph if n.op_type == "Mul" and n.outputs[0] in _added_to_masks(model, layer))
        readers = [(use.node, use.idx) for use in scaled.outputs[0].uses()]
        cap = ir.Value(
            name=f"cap{layer}", const_value=ir.tensor(np.float32(5), name=f"cap{layer}"), type=scaled.outputs[0].type
        )
        model.graph.register_initializer(cap)
        nodes = [ir.node("Div", [scaled.outputs[0], cap])]
        nodes += [ir.node("Tanh", nodes[-1].outputs)]
        nodes += [ir.node("Mul", [nodes[-1].outputs[0], cap])]
        for index, node in enumerate(nodes):
            node.name = node.outputs[0].name = f"capped{layer}.{index}"
            model.graph.append(node)
        for node, index in readers:
            node.replace_input_with(index, nodes[-1].outputs[0])
    model.graph.sort()
    ours, notes = to_group_query_attention(model)
    found = next(node for node in ours.graph if node.op_type == ATTENTION)
    assert notes == [] and found.attributes["softcap"].as_float() == 5.0
    assert abs(found.attributes["scale"].as_float() - 0.25) < 1e-7
    assert relative(_prefill(model), _prefill(ours)) < 1e-5
    assert relative(_prefill(exported("llama")), _prefill(ours)) > 1e-4, "the cap matters"


def _added_to_masks(model: ir.Model, layer: int) -> set[ir.Value | None]:
    mask = find_attention(model, layer).mask
    return {value for use in mask.uses() for value in use.node.inputs}


def _prefill(model: ir.Model, length: int = 12) -> np.ndarray:
    decoder = Decoder(model)
    decoder.start(1)
    return decoder(tokens(1, length), np.ones((1, length), np.int64))


def test_a_layer_that_is_no_attention_keeps_its_form_beside_one_with_a_buffer() -> None:
    """Texts are padded on the left; what the second layer keeps goes on growing."""
    model = exported("llama")
    first, second = (node for node in model.graph if node.op_type == "Softmax")
    _put_behind(model, second)
    mixed, notes = to_group_query_attention(model)
    assert len(notes) == 1 and notes[0].startswith("attention of layer 1 keeps its plain form: Identity ")
    cache = cache_of(mixed)
    assert cache is not None and not cache.shared_buffer
    assert cache.buffers() == ("past_key_values.0.key", "past_key_values.0.value")
    ids = tokens(3, 14)
    mask = np.array([np.arange(14) >= 14 - length for length in LENGTHS]).astype(np.int64)
    plain, ours = (stepwise(Decoder(each, LENGTH), ids, mask, 10)[:, 9:] for each in (model, mixed))
    assert relative(plain, ours) < 1e-5
    _put_behind(model, first)
    same, notes = to_group_query_attention(model)
    assert same is model and len(notes) == 2


def _put_behind(model: ir.Model, node: ir.Node) -> None:
    """Put a node that does nothing behind another."""
    uses = uses_of(node.outputs[0])
    reroute(uses, append(model, "Identity", [node.outputs[0]], f"{node.name}/same"))
    model.graph.sort()


def test_a_mask_that_is_not_causal_keeps_its_form() -> None:
    model = exported("gpt2")
    compare = next(node for node in model.graph if node.op_type == "LessOrEqual")
    compare.op_type = "GreaterOrEqual"
    same, notes = to_group_query_attention(model)
    assert same is model and "is not that of tokens that look back" in notes[0]


def test_a_second_reader_of_the_mask_keeps_its_form() -> None:
    model = exported("gpt2")
    mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
    node = ir.node("Identity", [mask], name="stray")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "seen", mask.type, mask.shape
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    same, notes = to_group_query_attention(model)
    assert same is model and notes == ["attention keeps its plain form: stray reads the mask or the past too"]


def test_angles_that_depend_on_more_than_the_position_are_turned_outside() -> None:
    model = exported("llama")
    cos = next(node for node in model.graph if node.op_type == "Cos")
    largest = ir.node("ReduceMax", [cos.inputs[0]], {"keepdims": 1}, name="largest")
    total = ir.node("Mul", [cos.inputs[0], largest.outputs[0]], name="longer")
    for node in (largest, total):
        node.outputs[0].name, node.outputs[0].type = node.name, cos.inputs[0].type
        model.graph.append(node)
    cos.replace_input_with(0, total.outputs[0])
    model.graph.sort()
    ours, notes = to_group_query_attention(model)
    nodes = [node for node in ours.graph if node.op_type == ATTENTION]
    assert notes == [] and len(nodes) == 2 and all("do_rotary" not in node.attributes for node in nodes)
    assert relative(_prefill(model), _prefill(ours)) < 1e-5


def test_a_model_of_unknown_length_keeps_its_angles_outside() -> None:
    model = exported("llama")
    del model.metadata_props[MAX_LENGTH]
    ours, notes = to_group_query_attention(model)
    assert notes == [] and not [v for v in ours.graph.initializers if v.startswith("rotary/")]
    assert "rotary/0" in to_group_query_attention(model, max_length=128)[0].graph.initializers
    assert constant(to_group_query_attention(model, 128)[0].graph.initializers["rotary/0"]).shape == (128, 8)
    assert relative(_prefill(model), _prefill(ours)) < 1e-5


def test_a_cache_of_int8_holds_rounded_keys() -> None:
    model, ids = exported("llama"), tokens(1, 12)
    plain = Decoder(model)
    plain.start(1)
    logits = plain(ids, np.ones_like(ids))
    peak = {name: float(np.abs(value).max()) for name, value in plain.past.items()}
    scales = {
        find_attention(model, i).name: tuple(peak[f"past_key_values.{i}.{k}"] / 127 for k in ("key", "value"))
        for i in range(2)
    }
    assert list(scales) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    state = GraphState(model, kv_cache="int8", kv_scales=scales)
    graph, notes = finish(state, CPU)
    assert notes == [] and cache_of(graph).dtype == "int8"
    ours = Decoder(graph, LENGTH)
    ours.start(1)
    assert 1e-5 < relative(logits, ours(ids, np.ones_like(ids))) < 0.03
    kept, scale = ours.past["past_key_values.0.key"], scales["model.layers.0.self_attn"][0]
    difference = kept[:, :, :12] * scale - plain.past["past_key_values.0.key"]
    assert kept.dtype == np.int8 and np.abs(difference).max() <= 0.501 * scale


@pytest.mark.parametrize(
    ("kind", "target", "scales", "said"),
    [
        ("fp8", "onnxruntime-cpu", {}, "onnxruntime-cpu has no ONNX operator for a key-value cache of fp8"),
        ("int8", "openvino", {}, "openvino has no ONNX operator for a key-value cache of int8"),
        (
            "int8",
            "onnxruntime-cpu",
            {"other": (1.0, 1.0)},
            "the key-value cache is int8, but 'model.layers.0.self_attn' has no",
        ),
    ],
)
def test_a_cache_that_cannot_be_kept_is_refused(
    kind: str, target: str, scales: dict[str, tuple[float, float]], said: str
) -> None:
    state = GraphState(exported("llama"), kv_cache=kind, kv_scales=scales)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=said):
        finish(state, TARGETS[target])


def test_integers_in_a_graph_that_keeps_its_plain_form_are_refused() -> None:
    model = exported("llama")
    next(node for node in model.graph if node.op_type == "Softmax").op_type = "LogSoftmax"
    with pytest.raises(ExportError, match="a key-value cache of int8 needs GroupQueryAttention in every layer"):
        finish(GraphState(model, kv_cache="int8"), CPU)


def state_of(kind: str, bits: int, group: int, symmetric: bool = True, flip: bool = False) -> GraphState:
    """Every product rounded; `flip`: half of the scales negative, the integers with them."""
    state, rng = GraphState(exported(kind)), np.random.default_rng(0)
    for layer in find_layers(state.model):
        if layer.op == "Gather":
            continue
        weight = round_to_nearest(np.asarray(layer.matrix()), bits, group, symmetric)
        if flip:
            sign = rng.choice([-1, 1], weight.scales.shape).astype(np.int8)
            values = (weight.values.reshape(*sign.shape, -1) * sign[:, :, None]).reshape(weight.values.shape)
            weight = QuantizedWeight(values, weight.scales * sign, None, bits, group)
        state.weights[layer.name] = weight
        state.weight_only.append(layer.name)
    return state


def dequantized(state: GraphState) -> ir.Model:
    model = clone(state.model)
    for layer in find_layers(model):
        if layer.name in state.weights:
            matrix = state.weights[layer.name].dequantize()
            layer.weight.const_value = ir.tensor(np.ascontiguousarray(matrix.T if layer.axis == 1 else matrix))
    return model


@pytest.mark.parametrize(
    ("kind", "bits", "group", "symmetric", "flip"),
    [
        ("llama", 4, 32, True, False),
        ("llama", 4, 32, True, True),
        ("llama", 3, 16, True, True),
        ("llama", 2, 32, True, True),
        ("llama", 2, 32, False, False),
        ("llama", 4, -1, True, False),
        ("llama", 6, 32, True, False),
        ("llama", 8, -1, True, True),
        ("llama", 4, 32, False, False),
        ("gpt2", 4, 32, True, False),
        ("gemma3", 4, 32, True, False),
    ],
)
def test_a_finished_decoder_multiplies_packed_weights(
    kind: str, bits: int, group: int, symmetric: bool, flip: bool
) -> None:
    """Inputs are rounded to int8 inside the kernel, which costs a per cent or two on weights as random as these."""
    state = state_of(kind, bits, group, symmetric, flip)
    model, notes = finish(state, CPU)
    ops = counted(model)
    assert notes == [] and ops["MatMul"] + ops["Gemm"] <= ops["DequantizeLinear"], "no product keeps a float weight"
    assert (ops["MatMulNBits"] > 0) == (bits == 2)
    assert relative(_prefill(dequantized(state)), _prefill(model)) < 0.05


def test_products_of_one_input_are_one_and_give_the_same_bits() -> None:
    """Rounding each row once or three times is the same; query, key and value go into attention as they come."""
    plain = to_group_query_attention(write_state(state_of("llama", 4, 32), "u8s8"))[0]
    merged = clone(plain)
    assert merge_products(merged) == 6, "q, k and v; gate and up; of both layers"
    attention = next(node for node in merged.graph if node.op_type == ATTENTION)
    assert attention.inputs[0] is not None and attention.inputs[1] is None and attention.inputs[2] is None
    assert counted(merged)["Split"] == 2
    np.testing.assert_array_equal(_prefill(plain), _prefill(merged))


def test_products_with_unlike_weights_stay_apart() -> None:
    state = state_of("llama", 4, 32)
    for index, name in enumerate(name for name in state.weights if name.endswith(("q_proj", "up_proj"))):
        layer = next(layer for layer in find_layers(state.model) if layer.name == name)
        state.weights[name] = round_to_nearest(layer.matrix(), 8 if index % 2 else 4, 16)
    model = to_group_query_attention(write_state(state, "u8s8"))[0]
    assert merge_products(model) == 2, "key and value of both layers"


def test_norms_are_divided_by_their_root() -> None:
    plain = exported("gemma3")
    model = clone(plain)
    assert divide_by_root(model) == 13 and counted(model)["Reciprocal"] == 0
    assert relative(_prefill(plain), _prefill(model)) < 1e-5


@pytest.mark.parametrize(
    ("group", "inputs", "block"),
    [
        (-1, 512, 256),
        (0, 96, 32),
        (512, 512, 256),
        (48, 96, 16),
        (128, 256, 128),
        (43, 172, 43),
        (-1, 172, -1),
        (4, 172, 4),
    ],
)
def test_scales_are_repeated_over_blocks_that_kernels_have(group: int, inputs: int, block: int) -> None:
    values = np.random.default_rng(0).integers(-8, 8, (3, inputs)).astype(np.int8)
    groups = 1 if group < 1 else inputs // group
    scales = np.random.default_rng(1).normal(size=(1 if group == 0 else 3, groups)).astype(np.float32)
    weight = QuantizedWeight(values, scales, None, 4, group)
    written = in_kernel_blocks(weight, "u8s8")
    assert written.group_size == block
    expected = (values.reshape(3, groups, -1) * scales[:, :, None]).reshape(3, inputs)
    np.testing.assert_array_equal(written.dequantize() if group or block else expected, expected)


def test_groups_without_a_kernel_run_all_the_same() -> None:
    state = GraphState(exported("llama"))
    layer = next(layer for layer in find_layers(state.model) if layer.name.endswith("1.mlp.down_proj"))
    state.weights[layer.name] = round_to_nearest(layer.matrix(), 4, 12)
    state.weight_only.append(layer.name)
    assert relative(_prefill(dequantized(state)), _prefill(finish(state, CPU)[0])) < 1e-5


def test_fp8_weights_are_stored_as_such() -> None:
    import ml_dtypes

    state = GraphState(exported("llama"))
    layer = next(layer for layer in find_layers(state.model) if layer.name == "lm_head")
    matrix = np.asarray(layer.matrix())
    scales = (np.abs(matrix).max(axis=1, keepdims=True) / 448).astype(np.float32)
    values = (matrix / scales).astype(ml_dtypes.float8_e4m3fn)
    state.weights["lm_head"] = QuantizedWeight(values, scales, None, 8, -1)
    state.weight_only.append("lm_head")
    model, _ = finish(state, CPU)
    kinds_of = {value.dtype for value in model.graph.initializers.values()}
    assert ir.DataType.FLOAT8E4M3FN in kinds_of
    reference = clone(state.model)
    head = next(layer for layer in find_layers(reference) if layer.name == "lm_head")
    head.weight.const_value = ir.tensor(np.ascontiguousarray((values.astype(np.float32) * scales).T))
    assert relative(_prefill(reference), _prefill(model)) < 1e-5


def test_a_finished_decoder_is_saved_and_checked(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_graph(finish(state_of("llama", 2, 32), CPU)[0], tmp_path / "model.onnx")
    assert open_session(tmp_path / "model.onnx").get_inputs()[2].shape == ["batch", 2, "length", 16]


def test_parts_of_a_graph_that_need_more_than_they_are_fed() -> None:
    model = exported("llama")
    assert evaluate(model, ["logits"], {"attention_mask": np.ones((1, 3), np.int64)}) is None
    wrong = {"input_ids": np.zeros((1, 2), np.int64), "attention_mask": np.zeros((1, 2, 7), np.int64)}
    assert evaluate(model, ["position_ids"], wrong) is None
    found = evaluate(
        model, ["position_ids"], {"input_ids": wrong["input_ids"], "attention_mask": np.ones((1, 5), np.int64)}
    )
    assert found is not None and found[0].tolist() == [[3, 4]]
