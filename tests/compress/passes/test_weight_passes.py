"""What all weight-rounding passes share: schemes by name, groups that do not divide, members that a target fuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graphs
import pytest
from graphs import facts_of
from pydantic import ValidationError

from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Structure, assign_roles
from compress.formats.schemes import BLOCK_BITS, PRESETS
from compress.formats.targets import TARGETS
from compress.passes import Gptq, Rtn
from compress.passes.autoround import AutoRound
from compress.passes.awq import Awq
from compress.passes.hqq import Hqq
from compress.passes.layer_schemes import describe_scheme, fit_group_size, format_of
from compress.passes.weight_numbers import WeightOverride

CPU, VLLM, ANY = TARGETS["onnxruntime-cpu"], TARGETS["vllm"], TARGETS["transformers"]
ATTENTION, MLP = "layers.0.attention", "layers.0.mlp"


def layer(name: str, inputs: int = 128, out: int = 128, bits: float = 32) -> LayerFacts:
    return LayerFacts(name, "Linear", "MatMul", f"{name}.weight", (out, inputs), bits=bits)


def decoder(ffn: int = 172, **bits: float) -> ModelFacts:
    """One block of attention and a gated feed-forward, and a head."""
    qkv = tuple(f"{ATTENTION}.{name}" for name in "qkv")
    gated = (f"{MLP}.gate", f"{MLP}.up")
    input_groups = (InputGroup(qkv, "norm", "norm"), InputGroup((f"{ATTENTION}.o",), f"{ATTENTION}.v", "value", 1, 8))
    input_groups += (InputGroup(gated, "norm2", "norm"), InputGroup((f"{MLP}.down",), f"{MLP}.up", "linear"))
    layers = [layer(name, bits=bits.get(name[-1], 32)) for name in (*qkv, f"{ATTENTION}.o")]
    layers += [*(layer(name, out=ffn) for name in gated), layer(f"{MLP}.down", ffn), layer("lm_head", out=512)]
    structure = Structure((BlockFacts("layers.0", input_groups),))
    return ModelFacts("torch", "Tiny", "text-generation", (), (), tuple(layers), structure=structure)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_taken_by_its_name_in_any_case(name: str) -> None:
    assert Rtn(scheme=name.lower()).find_scheme(layer("a")) == PRESETS[name]
    assert format_of(PRESETS[name]) in ANY.formats
    target, targets = (TARGETS["llama.cpp"], ("re:.*down",)) if name in BLOCK_BITS else (ANY, ())
    assert not Rtn(scheme=name, targets=targets).check(decoder(256), target).problems


def test_k_formats_have_groups_of_their_own_and_fall_back_where_256_does_not_divide() -> None:
    with pytest.raises(ValidationError, match="scheme Q4_K has groups of its own; leave group_size out"):
        Rtn(scheme="Q4_K", group_size=64)
    target = TARGETS["llama.cpp"]
    refused = Rtn(scheme="Q4_K").check(decoder(256), target).problems
    assert "has 128 inputs, which the 256 of Q4_K do not divide; set indivisible: fit" in refused[0]
    fitted = Gptq(scheme="Q4_K", indivisible="fit").check(decoder(256), target)
    assert not fitted.problems
    names = {layer: scheme.name for layer, scheme in fitted.schemes.items()}
    assert names["layers.0.mlp.down"] == "Q4_K" and names["layers.0.mlp.up"] == "W5A16"
    assert any(
        "layers.0.mlp.up has 128 inputs" in note.text and "W5A16, group 32" in note.text for note in fitted.notes
    )
    assert "awq: does not round to Q4_K; use gptq or rtn" in Awq(scheme="Q4_K").check(decoder(256), target).problems


def test_iq4_xs_falls_back_to_the_same_numbers_in_blocks_of_32() -> None:
    fitted = Gptq(scheme="IQ4_XS", indivisible="fit").check(decoder(256), TARGETS["llama.cpp"])
    names = {layer: scheme.name for layer, scheme in fitted.schemes.items()}
    assert names["layers.0.mlp.down"] == "IQ4_XS" and names["layers.0.mlp.up"] == "IQ4_NL"
    other = WeightOverride(targets=("re:.*down",), bits=8)
    mixed = Gptq(scheme="IQ4_XS", indivisible="fit", overrides=(other,)).check(decoder(256), TARGETS["llama.cpp"])
    assert describe_scheme(mixed.schemes["layers.0.mlp.down"]) == "W8A16, group 32"


def test_without_a_scheme_groups_are_of_32() -> None:
    assert describe_scheme(Rtn(bits=3, symmetric=False).find_scheme(layer("a"))) == "W3A16_ASYM, group 32"
    assert describe_scheme(Rtn(scheme="W4A16").find_scheme(layer("a"))) == "W4A16, group 128"
    assert describe_scheme(Rtn(scheme="W4A16", group_size=64).find_scheme(layer("a"))) == "W4A16, group 64"
    assert describe_scheme(Rtn(scheme="W8A8").find_scheme(layer("a"))) == "W8A8, per channel"
    assert describe_scheme(Rtn(scheme="FP8").find_scheme(layer("a"))) == "FP8, one scale"


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"there is no scheme 'W4'; did you mean 'W4A16'\?; there are W2A16, "):
        Rtn(scheme="W4")


def test_overrides_have_schemes_and_signs_of_their_own() -> None:
    first = {"targets": ("re:.*mlp",), "scheme": "w8a16_asym"}
    second = {"targets": ("re:.*down",), "group_size": 16}
    one = Rtn(scheme="W4A16", group_size=32, overrides=(first, second, {"targets": ("lm_head",), "symmetric": False}))
    said = {name: describe_scheme(one.find_scheme(layer(name))) for name in ("q", "mlp.up", "mlp.down", "lm_head")}
    assert said == {
        "q": "W4A16, group 32",
        "mlp.up": "W8A16_ASYM, per channel",
        "mlp.down": "W8A16_ASYM, group 16",
        "lm_head": "W4A16_ASYM, group 32",
    }
    with pytest.raises(ValidationError, match="scheme W4A16 stands for bits: 4"):
        Rtn(overrides=({"targets": ("a",), "scheme": "W4A16", "bits": 8},))


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_of_another_name_is_the_head(tied: bool) -> None:
    """What comes last and makes as many outputs as there are words; another layer of that size is not."""
    facts = decoder(256)
    structure = replace(facts.structure or Structure(()), after=(InputGroup(("out",)),))
    table = LayerFacts("tokens", "Embedding", "Gather", "out.weight" if tied else "tokens.weight", (512, 128))
    body = [one for one in facts.layers if one.name != "lm_head"]
    layers = assign_roles([*body, layer("middle", out=512), layer("out", out=512), table], structure)
    decisions = Rtn(bits=4).check(replace(facts, layers=layers, structure=structure), ANY).decisions
    assert [one.layer for one in decisions if one.reason == "ignore: lm_head"] == ["out"]


def test_the_head_stays_float_unless_the_recipe_takes_it() -> None:
    def kept(**config: Any) -> list[str]:
        return [one.layer for one in Rtn(bits=4, **config).check(decoder(256), ANY).decisions if one.action == "kept"]

    assert kept() == ["lm_head"]
    assert kept(ignore=()) == []
    assert not Rtn().check(facts_of(graphs.transformer()), CPU).problems  # which has no lm_head


def test_ignoring_every_layer_is_refused() -> None:
    problems = Rtn(ignore=("Linear",)).check(decoder(256), ANY).problems
    assert problems == ("rtn: no matrix product is left to round",)


@pytest.mark.parametrize(
    ("size", "inputs", "kernels", "expected"),
    [(32, 128, (), 32), (32, 172, (), 43), (128, 172, (), 86), (32, 172, (32, 64), -1), (128, 96, (32, 64, 128), 32)],
)
def test_a_fitted_group_divides(size: int, inputs: int, kernels: tuple[int, ...], expected: int) -> None:
    assert fit_group_size(size, inputs, kernels) == expected


def test_a_group_that_does_not_divide_is_fitted_and_named() -> None:
    one = Rtn(bits=4, indivisible="fit")
    for target, how in ((ANY, "group_size 43"), (VLLM, "one scale for each output channel")):
        plan = one.check(decoder(), target)
        assert not plan.problems
        down = {decision.layer: decision for decision in plan.decisions}[f"{MLP}.down"]
        assert "172 inputs, which 32 does not divide" in down.reason
        assert [note.text for note in plan.notes if note.level == "warning"] == [
            f"rtn: {MLP}.down has 172 inputs, which group_size 32 does not divide: {how}"
        ]
    (note,) = [note for note in one.check(decoder(), CPU).notes if note.level == "warning"]
    assert note.text.endswith("one scale for each output channel, slower than float32 on onnxruntime-cpu")


def test_a_group_that_does_not_divide_is_refused_with_the_ways_out() -> None:
    (problem,) = Rtn(bits=4).check(decoder(), VLLM).problems
    assert problem == (
        f"rtn: {MLP}.down has 172 inputs, which group_size 32 does not divide; use group_size: -1, set indivisible: "
        "fit, or ignore it"
    )


def test_narrow_layers_stay_float_with_one_note() -> None:
    narrow = (layer(f"{MLP}.dt_proj", inputs=4), layer(f"{MLP}.shared_gate", out=1))
    facts = replace(decoder(256), layers=(*decoder(256).layers, *narrow))
    plan = Rtn(bits=4).check(facts, VLLM)
    assert not plan.problems and not {each.name for each in narrow} & plan.schemes.keys()
    (note,) = [note.text for note in plan.notes if "stay float" in note.text]
    assert note.startswith(f"rtn: {MLP}.dt_proj, {MLP}.shared_gate stay float: fewer inputs than a group")
    (problem,) = Rtn(bits=4, indivisible="refuse").check(facts, ANY).problems
    assert problem.startswith(f"rtn: {MLP}.dt_proj has 4 inputs, which group_size 32 does not divide")
    problems = Rtn(bits=4, group_size=256).check(decoder(256), ANY).problems
    assert any(f"{ATTENTION}.q has 128 inputs, which group_size 256 does not divide" in text for text in problems), (
        "no exception where it would be most of the model"
    )


def test_a_group_size_that_a_target_lacks_is_refused() -> None:
    problems = Rtn(bits=4, group_size=16).check(decoder(256), VLLM).problems
    assert problems[0] == (
        f"rtn: {ATTENTION}.q: target vllm has 4-bit kernels for group_size 32, 64, 128, -1, not 16; it would run "
        "slower than float32"
    )


def test_one_scale_for_each_channel_has_no_groups() -> None:
    for name in ("W8A8", "FP8_DYNAMIC", "FP8"):
        problems = Rtn(scheme=name, group_size=128).check(decoder(256), ANY).problems
        text = f"rtn: {ATTENTION}.q: {name} has one scale for each output channel; leave group_size out"
        assert problems[0] == text


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_vllm_has_no_kernel_for_odd_widths(bits: int) -> None:
    (problem,) = Rtn(bits=bits).check(decoder(256), VLLM).problems
    assert problem.startswith("rtn: target vllm has kernels for weights of 4 and 8 bits; use scheme: W4A16")
    assert not Rtn(bits=bits).check(decoder(256), ANY).problems


def test_a_plan_says_how_a_checkpoint_stores_each_layer() -> None:
    plan = Gptq(bits=4, overrides=({"targets": ("re:.*down",), "bits": 8},)).check(decoder(256), ANY)
    assert plan.schemes[f"{MLP}.down"].name == "W8A16"
    assert plan.schemes[f"{ATTENTION}.q"].name == "W4A16"
    assert "lm_head" not in plan.schemes
    assert {la.name: la.bits for la in plan.facts.layers}[f"{MLP}.down"] == 8 + 32 / 32


def test_a_layer_that_no_forward_pass_calls_stays_float_where_data_is_needed() -> None:
    facts = decoder(256)
    facts = replace(facts, layers=(*facts.layers, layer("pooler")))
    reasons = {one.layer: one.reason for one in Gptq(bits=4).check(facts, ANY).decisions}
    assert reasons["pooler"] == "no forward pass calls it"
    reasons = {one.layer: one.reason for one in Rtn(bits=4).check(facts, ANY).decisions}
    assert reasons["pooler"] == "W4A16, group 32"


def test_only_stored_input_scales_need_data() -> None:
    assert Rtn(scheme="FP8").needs_calibration
    assert Rtn(overrides=({"targets": ("a",), "scheme": "W8A8_STATIC"},)).needs_calibration
    assert not Rtn(scheme="W8A8").needs_calibration
    assert not Rtn(scheme="FP8_DYNAMIC").needs_calibration


def test_where_a_pass_works_depends_on_the_source() -> None:
    facts = decoder()
    for one in (Rtn(), Gptq()):
        assert one.stage_on(facts) == "blocks"
        assert one.stage_on(replace(facts, source="onnx", structure=None)) == "graph"
    assert {one.stage_on(facts) for one in (Awq(), Hqq())} == {"blocks"}


@pytest.mark.parametrize("one", [Awq(scheme="W8A8"), Hqq(scheme="FP8")])
def test_integers_of_their_own_alone(one: Any) -> None:
    problems = one.check(decoder(256), ANY).problems
    assert any(text.startswith(f"{one.kind}: {one.scheme}: ") for text in problems)


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4A16", "NVFP4", "MXFP4", "MXFP8A16", "FP8_BLOCK", "W4AFP8"])
def test_floats_are_taken_in_their_own_groups(scheme: str) -> None:
    own = "blocks of 128 x 128" if scheme == "FP8_BLOCK" else None
    for one in (Rtn, Gptq, AutoRound):
        plan = one(scheme=scheme).check(decoder(256), ANY)
        assert not plan.problems
        reasons = {decision.reason for decision in plan.decisions if decision.action != "kept"}
        assert own is None or reasons == {f"{scheme}, {own}"}
    if scheme not in ("FP8_DYNAMIC", "W4AFP8"):
        problems = Gptq(scheme=scheme, group_size=64).check(decoder(256), ANY).problems
        assert all("a format of floats has its own bits and groups" in text for text in problems) and problems


def test_groups_of_floats_must_divide_and_the_way_out_is_told() -> None:
    (first, *_) = Rtn(scheme="NVFP4", indivisible="fit").check(decoder(40), ANY).problems
    assert first.endswith(
        "has 40 inputs, which the groups of NVFP4, 16, do not divide; ignore it, or give it another "
        "scheme under overrides"
    )


def test_awq_cannot_know_the_inputs_that_it_will_leave() -> None:
    (problem,) = Awq(scheme="NVFP4").check(decoder(256), ANY).problems
    assert "{kind: awq, round: false, scheme: NVFP4}, then {kind: gptq, scheme: NVFP4}" in problem
    assert not Awq(scheme="NVFP4", round=False).check(decoder(256), ANY).problems
    assert not Awq(scheme="MXFP4").check(decoder(256), ANY).problems


def test_awq_needs_a_module_that_takes_a_scale_and_may_leave_weights_float() -> None:
    facts = decoder(256)
    bare = replace(facts, structure=Structure((BlockFacts("", (InputGroup(("a",)),)),)))
    (problem,) = Awq(bits=4).check(bare, ANY).problems
    assert problem == "awq: no layer's inputs come from a module that can take a scale; use rtn or gptq"
    plan = Awq(bits=4, round=False).check(facts, ANY)
    assert {la.bits for la in plan.facts.layers} == {32}
    assert not plan.schemes
    assert {(one.action, one.reason) for one in plan.decisions if one.layer != "lm_head"} == {
        ("scaled", "for W4A16, group 32")
    }
