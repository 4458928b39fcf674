"""What a plan says of a checkpoint before any work: every refusal once, by its message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from compress.export.checkpoint_rules import checkpoint_notes, checkpoint_problems
from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Structure
from compress.formats.schemes import PRESETS, Scheme
from compress.recipe.exports import CheckpointExport

ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
QKV = tuple(f"{ATTENTION}.{leaf}_proj" for leaf in "qkv")
CT, GPTQ, AWQ = CheckpointExport(), CheckpointExport(format="gptq"), CheckpointExport(format="awq")
W4, W8 = PRESETS["W4A16"], PRESETS["W8A16"]
SHAPES: dict[str, tuple[int, int]] = {
    **dict.fromkeys((*QKV, f"{ATTENTION}.o_proj"), (256, 256)),
    **dict.fromkeys((f"{MLP}.gate_proj", f"{MLP}.up_proj"), (512, 256)),
    f"{MLP}.down_proj": (256, 512),
}


def facts(shapes: Mapping[str, tuple[int, ...]] = SHAPES, **types: str) -> ModelFacts:
    layers = tuple(
        LayerFacts(name, types.get(name.rpartition(".")[2], "Linear"), "MatMul", f"{name}.weight", shape)
        for name, shape in shapes.items()
    )
    return ModelFacts("torch", "LlamaForCausalLM", "text-generation", (), (), layers)


def every(chosen: Scheme, **others: Scheme) -> dict[str, Scheme]:
    return {name: others.get(name.rpartition(".")[2], chosen) for name in SHAPES}


def one(name: str, scheme: Scheme) -> dict[str, Scheme]:
    return {f"{MLP}.{name}": scheme}


USUAL = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W8A8_STATIC", "W4A8", "FP8", "FP8_DYNAMIC"]
FLOATS = ["FP8_BLOCK", "W4AFP8", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"]


@pytest.mark.parametrize("name", [*USUAL, *FLOATS])
def test_usual_schemes_are_taken_by_both_engines(name: str) -> None:
    for target in ("transformers", "vllm"):
        assert checkpoint_problems(facts(), every(PRESETS[name]), CT, target) == []


def test_what_vllm_fuses_must_end_with_blocks_but_for_the_last() -> None:
    shapes = {**SHAPES, f"{ATTENTION}.k_proj": (192, 256), f"{MLP}.up_proj": (500, 256)}
    found = checkpoint_problems(facts(shapes), every(PRESETS["FP8_BLOCK"]), CT, "vllm")
    assert found == [
        f"{ATTENTION}: vLLM runs these layers as one, and {ATTENTION}.k_proj has 192 outputs, which its blocks of 128 "
        "do not divide; use scheme: FP8_DYNAMIC, or ignore them"
    ]
    assert checkpoint_problems(facts(shapes), every(PRESETS["FP8_BLOCK"]), CT, "transformers") == []


def test_vllm_runs_w4afp8_in_groups_and_sizes_of_128() -> None:
    (first, *_) = checkpoint_problems(facts(), every(PRESETS["W4AFP8"].with_group(64)), CT, "vllm")
    assert first.startswith(
        f"{QKV[0]}: vLLM runs W4AFP8 in groups of 128 and sizes that these divide, not group_size 64"
    )


def test_small_floats_are_loaded_in_bfloat16() -> None:
    notes = checkpoint_notes(facts(), every(PRESETS["NVFP4A16"]), CheckpointExport(dtype="float32"), "vllm")
    assert [(note.level, "dtype=torch.bfloat16" in note.text) for note in notes] == [("warning", True)]


def test_mixed_schemes_outside_fused_layers_are_taken() -> None:
    schemes = every(W4, down_proj=W8, o_proj=PRESETS["FP8_DYNAMIC"])
    assert checkpoint_problems(facts(), schemes, CT, "vllm") == []
    (note,) = checkpoint_notes(facts(), schemes, CT, "vllm")
    assert note.level == "warning" and "layers have 3 schemes; load it as it is" in note.text


def test_fused_members_need_one_scheme_in_vllm() -> None:
    schemes = every(W4, v_proj=W8, gate_proj=W4.with_group(64))
    del schemes[f"{ATTENTION}.q_proj"]
    found = checkpoint_problems(facts(), schemes, CT, "vllm")
    assert found == [
        f"{ATTENTION}: vLLM runs these layers as one, with one scheme (q_proj: float; k_proj: W4A16, group 128; "
        "v_proj: W8A16, per row); give them the same",
        f"{MLP}: vLLM runs these layers as one, with one scheme (gate_proj: W4A16, group 64; up_proj: W4A16, group "
        "128); give them the same",
    ]
    assert checkpoint_problems(facts(), schemes, CT, "transformers") == []
    assert "vLLM would not load this checkpoint" in checkpoint_notes(facts(), schemes, CT)[0].text


def test_layers_that_read_different_tensors_are_not_fused() -> None:
    block = BlockFacts("model.layers.0", (InputGroup(QKV[:1]), InputGroup(QKV[1:])))
    found = facts()
    crossed = ModelFacts(**{**found.__dict__, "structure": Structure((block,))})
    assert checkpoint_problems(crossed, every(W4, q_proj=W8), CT, "vllm") == []


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (PRESETS["W3A16"], "no kernel for 3-bit weights; 4 and 8 bits are run"),
        (W4.with_group(16), r"no kernel for group_size 16; use 32, 64, 128 or -1"),
        (PRESETS["FP8"].with_group(128), "takes FP8 weights with a scale for each row or one for the tensor"),
        (PRESETS["W8A8"].with_group(128), "takes W8A8 weights with a scale for each row"),
        (Scheme(PRESETS["W8A16_ASYM"].weights, PRESETS["W8A8"].activations), "symmetric weights alone where inputs"),
        (Scheme(PRESETS["W2A16"].weights, PRESETS["W8A8"].activations), "no kernel for W2A8; W8A8 and W4A8 are run"),
    ],
)
def test_what_vllm_has_no_kernel_for(scheme: Scheme, message: str) -> None:
    (found,) = checkpoint_problems(facts(), one("down_proj", scheme), CT, "vllm")
    assert message in found and found.startswith(f"{MLP}.down_proj: vLLM ")
    assert checkpoint_problems(facts(), one("down_proj", scheme), CT) == []


def test_odd_sizes_and_an_int8_cache_are_not_for_vllm() -> None:
    (found,) = checkpoint_problems(facts({"a": (6, 128)}), {"a": W4}, CT, "vllm")
    assert found == "a: vLLM needs sizes that fill 32-bit words, and it is [6, 128]; ignore it"
    assert checkpoint_problems(facts(), {}, CT, "vllm", "fp8") == []
    (found,) = checkpoint_problems(facts(), {}, CT, "vllm", "int8")
    assert "an fp8 cache and no int8 one" in found


def test_layers_that_a_format_has_no_place_for() -> None:
    (found,) = checkpoint_problems(facts(up_proj="Conv1D"), one("up_proj", W4), CT)
    assert found.endswith("is a Conv1D, which compressed-tensors has no layer for; ignore it, or use format: gptq")
    assert checkpoint_problems(facts(up_proj="Conv1D"), one("up_proj", W4), GPTQ) == []
    (found,) = checkpoint_problems(facts(up_proj="Conv2d"), one("up_proj", W4), GPTQ)
    assert found.endswith("is a Conv2d, which the GPTQ format has no layer for; ignore it")
    (found,) = checkpoint_problems(facts({"a": (8, 100)}), {"a": W4}, CT)
    assert found == "a has 100 inputs, which group_size 128 does not divide"
    (found,) = checkpoint_problems(facts(), one("up_proj", PRESETS["W4A16_ASYM"].with_group(0)), CT)
    assert "packs no zero point for a whole tensor; use group_size: -1" in found


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (PRESETS["W5A16"], "W5A16, and the GPTQ format holds weights alone, in 2, 3, 4 or 8 bits"),
        (PRESETS["W8A8"], "W8A8, and the GPTQ format holds weights alone"),
        (W4.with_group(0), "one scale for the whole tensor"),
    ],
)
def test_what_gptq_cannot_hold(scheme: Scheme, message: str) -> None:
    (found,) = checkpoint_problems(facts(), one("down_proj", scheme), GPTQ)
    assert message in found and found.endswith("use format: compressed-tensors")


def test_gptq_has_one_scheme_and_no_cache() -> None:
    (found,) = checkpoint_problems(facts(), every(W4, down_proj=W8), GPTQ)
    assert "layers have different schemes (W4A16, group 128; W8A16, per row), and the GPTQ format has one" in found
    (found,) = checkpoint_problems(facts(), every(W4), GPTQ, kv_cache="fp8")
    assert "no place for an fp8 KV cache" in found
    (found,) = checkpoint_problems(facts(), {}, GPTQ)
    assert found.startswith("nothing is quantized")
    (found,) = checkpoint_problems(facts({"a": (20, 128)}), {"a": PRESETS["W3A16"]}, GPTQ)
    assert "3-bit rows and columns do not fill 32-bit words" in found
    (found,) = checkpoint_problems(facts(), one("down_proj", PRESETS["W4A16_ASYM"]), GPTQ, "vllm")
    assert "runs symmetric GPTQ weights alone" in found
    assert "gptqmodel" in checkpoint_notes(facts(), every(W4), GPTQ)[-1].text


@pytest.mark.parametrize(
    ("layers", "schemes", "says"),
    [
        ({"a": (8, 128)}, {"a": W8}, "a is W8A16, and the AWQ format holds weights alone, in 4 bits; use format"),
        ({"a": (12, 128)}, {"a": W4}, "a has 12 outputs, which do not fill words of eight; ignore it"),
        ({"a": (8, 100)}, {"a": W4}, "a has 100 inputs, which group_size 128 does not divide"),
        ({"a": (8, 128)}, {"a": W4.with_group(0)}, "a has one scale for the whole tensor, and the AWQ format has"),
        ({"m.gate": (8, 128), "m.gate_proj": (8, 128)}, {"m.gate_proj": W4}, "m.gate stays float, and readers of"),
        ({"a": (8, 128)}, {}, "nothing is quantized, and the AWQ format is for quantized weights"),
    ],
)
def test_what_awq_cannot_hold(layers: Any, schemes: Any, says: str) -> None:
    (found,) = checkpoint_problems(facts(layers), schemes, AWQ)
    assert found.startswith(says)


def test_awq_takes_what_vllm_does() -> None:
    assert checkpoint_problems(facts(), every(PRESETS["W4A16_ASYM"]), AWQ, "vllm") == []
    (found,) = checkpoint_problems(facts(up_proj="Conv1D"), one("up_proj", W4), AWQ)
    assert found.endswith("is a Conv1D, which the AWQ format has no layer for; ignore it")
    assert "transformers loads AWQ checkpoints where gptqmodel is" in checkpoint_notes(facts(), every(W4), AWQ)[-1].text


def test_a_quantized_embedding_may_not_be_shared_with_a_float_layer() -> None:
    embedding = LayerFacts("embed", "Linear", "MatMul", "embed.weight", (64, 128))
    head = LayerFacts("lm_head", "Linear", "MatMul", "embed.weight", (64, 128))
    tied = ModelFacts("torch", "X", "text-generation", (), (), (embedding, head))
    (found,) = checkpoint_problems(tied, {"embed": W4}, CT)
    assert found.startswith("embed is quantized and shares its weight with lm_head, which is not")
    assert checkpoint_problems(tied, {"lm_head": W4}, CT) == []
    assert checkpoint_problems(tied, {"embed": W4, "lm_head": W4}, CT) == []


def test_experts_share_a_scheme_that_can_be_stacked() -> None:
    names = [f"m.{i}.experts.{e}.{leaf}" for i in range(2) for e in range(2) for leaf in ("up_proj", "down_proj")]
    mixture = facts(dict.fromkeys(names, (128, 128)))
    assert checkpoint_problems(mixture, dict.fromkeys(names, W4), CT, "vllm") == []
    assert "stored one by one" in checkpoint_notes(mixture, dict.fromkeys(names, W4), CT)[0].text
    (found,) = checkpoint_problems(mixture, dict.fromkeys(names[:-1], W4), CT)
    assert found == (
        "m.1.experts: engines run all experts as one, with one scheme (0.up_proj, 0.down_proj, 1.up_proj: W4A16, group "
        "128; 1.down_proj: float); give them the same"
    )
    (found,) = checkpoint_problems(mixture, {n: W4 if n.startswith("m.0") else W8 for n in names}, CT)
    assert found.startswith("experts of 2 schemes")
    for name in ("W4A16_ASYM", "W8A8"):
        (found,) = checkpoint_problems(mixture, dict.fromkeys(names, PRESETS[name]), CT)
        assert f"is {name}, which transformers cannot stack" in found


def test_what_readers_must_know_is_said() -> None:
    asymmetric = PRESETS["W4A16_ASYM"]
    (note,) = checkpoint_notes(facts(), every(asymmetric), CT)
    assert note.level == "warning" and "CompressedTensorsConfig(dequantize=True)" in note.text
    (found,) = checkpoint_problems(facts(), every(asymmetric, down_proj=W8), CT)
    assert "in a model of several schemes, which transformers cannot load" in found
    assert checkpoint_problems(facts(), every(asymmetric, down_proj=W8), CT, "vllm") == []
    texts = [note.text for note in checkpoint_notes(facts(), every(PRESETS["W3A16"]), CT)]
    assert any("weights of 3 bits are read by compressed-tensors 0.18 and later" in text for text in texts)
