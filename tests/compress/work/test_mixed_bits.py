"""Bits under a budget: what is measured is what happens, fused layers get equal bits, killed runs choose the same."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child_processes import run_in_two_processes
from pydantic import ValidationError
from streaming import bert, context, gpt2, llama, streamed, texts, together
from torch import Tensor, nn

from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.errors import PassError
from compress.export.checkpoint_rules import checkpoint_problems
from compress.export.compressed_tensors import entries
from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Structure, assign_roles
from compress.formats.schemes import Scheme
from compress.formats.targets import TARGETS
from compress.passes import Gptq, Rtn
from compress.passes.hqq import Hqq
from compress.passes.mixed_bits import BitBudget
from compress.passes.tune import Tune
from compress.passes.weight_only import WeightPass
from compress.recipe.exports import CheckpointExport
from compress.work import apply_pass, mixed_bits
from compress.work.block_layers import list_layers
from compress.work.confirm_bits import BitsComparison, measure_loss
from compress.work.contexts import BlockContext, WeightTrials

pytestmark = pytest.mark.usefixtures("one_thread")
ANY, VLLM = TARGETS["transformers"], TARGETS["vllm"]
MIX = {"average": 3.0, "choices": (2, 3, 4)}
DOWN = ("lm_head", "re:.*down_proj")
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


def uneven(layers: int = 1) -> nn.Module:
    """A Llama whose blocks matter unequally, with logits that are none of all tokens alike."""
    net = llama(layers=layers)
    with torch.no_grad():
        for number, block in enumerate(net.model.layers):
            for name, parameter in block.named_parameters():
                parameter.mul_((6.0 if "v_proj" in name or "o_proj" in name else 3.0) if number == 0 else 1.0)
        net.lm_head.weight.mul_(20)
    return net


def bits_of(model: StreamedModel) -> dict[str, int]:
    return {layer: scheme.weights.bits for layer, scheme in model.schemes.items()}


def average(model: StreamedModel) -> float:
    sizes = {layer: int(np.prod(model.store.shape(f"{layer}.weight"))) for layer in model.schemes}
    return sum(bits * sizes[layer] for layer, bits in bits_of(model).items()) / sum(sizes.values())


def facts(model: StreamedModel) -> ModelFacts:
    layers = assign_roles(list_layers(model), model.structure)
    return ModelFacts("torch", "Tiny", "text-generation", (), (), layers, structure=model.structure)


@pytest.mark.parametrize("config", [Gptq(bits=MIX, group_size=16), Rtn(bits=MIX, group_size=16)])
def test_the_average_is_kept_and_what_reads_one_tensor_has_equal_bits(config: WeightPass) -> None:
    model = streamed(uneven())
    result = apply_pass(config, model, context(texts(8), target="transformers"))
    bits = bits_of(result.model)
    assert len(set(bits.values())) > 1 and set(bits.values()) <= {2, 3, 4}
    assert 2.8 < average(result.model) <= 3.0
    for input_group in model.structure.input_groups:
        assert len({bits[name] for name in input_group.layers if name in bits}) <= 1
    for layer, number in bits.items():
        told = result.measured[layer]
        assert told["bits"] == number and told["sensitivity"] == told[f"sensitivity_{number}_bits"] > 0
        assert result.model.store.quantized(layer).bits == number  # type: ignore[union-attr]
    said = {decision.layer: decision for decision in result.decisions}
    assert said[Q].action == f"w{bits[Q]}" and "bits, in nats" in said[Q].reason
    assert "nats, " in result.notes[0].text and "3 bits everywhere" in result.notes[0].text


@pytest.mark.parametrize("bits", [3, 5])
def test_what_is_predicted_is_about_the_divergence_of_the_outputs(bits: int) -> None:
    """Each layer alone rounded: the sum over layers is within a third, and the order of layers nearly theirs."""
    model, data = streamed(uneven()), texts(24)
    told = apply_pass(
        Rtn(bits={"average": bits, "choices": (bits - 1, bits)}, group_size=16), model, context(data)
    ).measured
    feeds = together(data)
    kept = feeds["attention_mask"].bool()

    def predict(some: StreamedModel) -> Tensor:
        with torch.no_grad():
            return some.materialise()(**feeds)[kept].double().log_softmax(-1)

    floats, seen, predicted = predict(model), [], []
    for layer in [
        name for input_group in model.structure.input_groups for name in input_group.layers if name != "lm_head"
    ]:
        alone = apply_pass(Rtn(bits=bits, group_size=16, targets=(layer,)), model, context()).model
        seen.append(float((floats.exp() * (floats - predict(alone))).sum(-1).mean()))
        predicted.append(told[layer][f"sensitivity_{bits}_bits"])
    assert sum(predicted) == pytest.approx(sum(seen), rel=0.35)
    ranks = [np.argsort(np.argsort(values)) for values in (seen, predicted)]
    assert np.corrcoef(*ranks)[0, 1] > 0.85


def test_a_model_with_layers_of_another_kind() -> None:
    net: Any = gpt2()
    with torch.no_grad():
        net.transformer.h[0].mlp.c_proj.weight.mul_(20)
    result = apply_pass(Gptq(bits=MIX, group_size=16), streamed(net), context(texts(8), target="transformers"))
    assert average(result.model) <= 3.0 and len(set(bits_of(result.model).values())) > 1


def test_of_outputs_that_are_no_logits_the_relative_error_is_predicted() -> None:
    model, data = streamed(bert()), texts(24)
    config = Rtn(bits={"average": 3.0, "choices": (3, 4)}, group_size=16)
    result = apply_pass(config, model, context(data))
    feeds = together(data)
    kept = feeds["attention_mask"].bool()
    with torch.no_grad():
        floats, rounded = (some.materialise()(**feeds)[kept] for some in (model, result.model))
    seen = float((rounded - floats).square().sum() / floats.square().sum())
    predicted = sum(told["sensitivity"] for told in result.measured.values() if "bits" in told)
    assert predicted == pytest.approx(seen, rel=0.35)
    assert "parts of the outputs' energy" in result.notes[0].text


@pytest.mark.parametrize(
    ("comparison", "least"),
    [
        (BitsComparison((0.1, 0.2)), 2),
        (BitsComparison((0.2, 0.1)), 3),
        (BitsComparison((0.1, 0.2), (3.02, 3.0), noise=0.005), 3),  # the texts' own tokens say it, beyond noise
        (BitsComparison((0.1, 0.2), (3.02, 3.0), noise=0.02), 2),
        (BitsComparison((np.nan, 0.2), (np.nan, 3.0), noise=np.nan), 3),  # outputs that broke
    ],
)
def test_a_choice_below_equal_bits_is_taken_only_where_it_loses_less(
    comparison: BitsComparison, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model, data = Gptq(bits=MIX, group_size=16), streamed(uneven()), context(texts(8), target="transformers")
    monkeypatch.setattr(mixed_bits, "compare_rounded", lambda *args: comparison)
    result = apply_pass(config, model, data)
    assert min(bits_of(result.model).values()) == least
    told = "{} with 2 bits and more, {} with 3 bits and more (nats)".format(*comparison.outputs)
    assert told in result.notes[0].text
    assert ("texts' own tokens" in result.notes[0].text) == bool(comparison.texts)


COMPARED = "gptq: two choices of bits are rounded to be compared"


def no_measuring(items: Sequence[Any], text: str, /, most_s: float | None = None) -> Sequence[Any]:
    """Progress of a pass that must not measure what bits cost."""
    assert "cost of bits" not in text, "losses were measured"
    return items


def test_a_choice_that_goes_below_equal_bits_nowhere_is_not_compared() -> None:
    config, lines = Gptq(bits={"average": 3.5, "choices": (3, 4)}, group_size=16), list[str]()
    apply_pass(config, streamed(uneven()), context(texts(8), log=lines.append, target="transformers"))
    assert lines and COMPARED not in lines


def test_of_choices_that_lose_alike_the_one_without_fewest_bits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_bits, "ALIKE", np.inf)
    given = context(texts(8), log=(lines := list[str]()).append, target="transformers")
    result = apply_pass(Gptq(bits=MIX, group_size=16), streamed(uneven()), given)
    assert min(bits_of(result.model).values()) == 3 and COMPARED not in lines


@pytest.mark.parametrize("make", [uneven, bert])
def test_what_a_rounded_model_loses_is_measured_as_it_is(make: Any) -> None:
    model, data = streamed(make()), texts(24)
    rounded = apply_pass(Rtn(bits=3, group_size=16), model, context()).model
    feeds = together(data)
    kept = feeds["attention_mask"].bool()
    with torch.no_grad():
        before, after = (some.materialise()(**feeds).double() for some in (model, rounded))
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    writes_text = make is uneven
    lost = measure_loss(rounded, as_block_context(context(data), writes_text=writes_text), "float32")
    if not writes_text:
        expected = (after - before)[kept].square().sum() / before[kept].square().sum()
        assert not len(lost.tokens)
    else:
        expected = (p.exp() * (p - q)).sum(-1)[kept].mean()
        following = feeds["input_ids"][:, 1:, None]
        nats = -q[:, :-1].gather(-1, following)[..., 0][kept[:, 1:]]
        assert len(lost.tokens) == len(nats) and float(lost.tokens.mean()) == pytest.approx(
            float(nats.mean()), rel=1e-4
        )
    assert lost.outputs == pytest.approx(float(expected), rel=1e-3)


def test_twice_the_same_and_a_killed_run_does_not_measure_again(tmp_path: Path) -> None:
    config, model, lines = Gptq(bits=MIX, group_size=16), streamed(uneven(layers=2)), list[str]()
    first = apply_pass(config, model, context(texts(8), tmp_path / "a", lines.append, target="transformers"))
    again = apply_pass(config, model, context(texts(8), tmp_path / "b", target="transformers"))
    costs = [(tmp_path / name / mixed_bits.FILE).read_bytes() for name in "ab"]
    assert costs[0] == costs[1] and bits_of(first.model) == bits_of(again.model)
    assert any("blocks are done already" in line for line in lines)  # what was rounded to be compared is the result

    (tmp_path / "b" / "block-00001.json").unlink()
    assert lines.count(COMPARED) == 1
    given = replace(context(texts(8), tmp_path / "b", lines.append, target="transformers"), progress=no_measuring)
    resumed = apply_pass(config, model, given)
    assert resumed.decisions == first.decisions and resumed.notes == first.notes and lines.count(COMPARED) == 1
    damaged = bytearray(costs[0])
    damaged[20] ^= 1
    (tmp_path / "b" / mixed_bits.FILE).write_bytes(damaged)
    with pytest.raises(AssertionError, match="losses were measured"):
        apply_pass(config, model, given)


def choose_in_a_share(work: Path) -> list[dict[str, Any]]:
    """What a process of a launch chooses, and what it measured: in several micro-batches, and in one."""
    chosen = []
    for rows in (24, 10**6):
        given = context(texts(8), work / str(rows), rows=rows)
        result = apply_pass(Gptq(bits=MIX, group_size=16), streamed(uneven()), given)
        costs = {layer: told["sensitivity"] for layer, told in result.measured.items() if "bits" in told}
        chosen.append({"bits": bits_of(result.model), "costs": costs})
    return chosen


@pytest.mark.slow
def test_two_processes_choose_what_one_chooses(tmp_path: Path) -> None:
    """Each sends back its share of the micro-batches; of one there is nothing for the second to do."""
    alone = choose_in_a_share(tmp_path / "one")
    first, second = run_in_two_processes(choose_in_a_share, tmp_path / "two")
    assert first == second
    for one, two in zip(alone, first, strict=True):
        assert two["bits"] == one["bits"]
        assert two["costs"] == pytest.approx(one["costs"], rel=1e-5)


def test_tune_alone_lets_gptq_choose(tmp_path: Path) -> None:
    config = Tune(bits=MIX, group_size=16, steps=2)
    result = apply_pass(config, streamed(uneven()), context(texts(8), tmp_path, target="transformers"))
    bits = bits_of(result.model)
    assert len(set(bits.values())) > 1 and result.measured[Q]["bits"] == bits[Q]


def test_experts_of_a_mixture_get_equal_bits(tmp_path: Path) -> None:
    expert = tuple((f"m.experts.{i}.up", f"m.experts.{i}.down") for i in range(2))
    input_groups = (InputGroup(("m.q", "m.k")), *(InputGroup((name,)) for names in expert for name in names))
    layers = [LayerFacts(n, "Linear", "MatMul", f"{n}.weight", (32, 32)) for r in input_groups for n in r.layers]
    structure = Structure((BlockFacts("m", input_groups, expert),))
    allocation = Gptq(bits=MIX).find_allocation(layers, structure, ANY)
    assert allocation.groups == (("m.q", "m.k"), tuple(name for names in expert for name in names))
    assert allocation.sizes == (2048, 4096)
    apart = Gptq(bits=MIX).find_allocation(layers, structure, TARGETS["llama.cpp"]).groups
    assert apart == (("m.q",), ("m.k",), *(tuple(f"m.experts.{i}.{part}" for i in range(2)) for part in ("up", "down")))


def test_the_plan_foretells_the_size_by_the_average() -> None:
    model = streamed(llama(layers=2))
    plan = Gptq(bits={"average": 3.5, "choices": (2, 3, 4, 8)}, group_size=16).check(facts(model), ANY)
    assert not plan.problems
    rounded = [layer for layer in plan.facts.layers if layer.bits < 16]
    stored = sum(layer.bits * layer.n_weights for layer in rounded) / sum(layer.n_weights for layer in rounded)
    assert stored == pytest.approx(3.5 + 32 / 16)  # a scale for 16 weights on top
    assert {decision.action for decision in plan.decisions if decision.action != "kept"} == {"w2-w8"}
    assert "2, 3, 4 or 8 bits for each of 8 groups" in plan.notes[0].text
    assert len(set(plan.schemes.values())) == 2  # so that an export that holds one scheme refuses it now
    refused = checkpoint_problems(facts(model), plan.schemes, CheckpointExport(format="gptq"), "transformers")
    assert any("the GPTQ format has one" in text for text in refused)


def test_given_bits_count_in_the_average() -> None:
    model = streamed(llama(layers=2))
    down = {"targets": ("re:.*down_proj",), "bits": 8}
    config = Gptq(bits={"average": 4.0, "choices": (2, 3, 4)}, group_size=16, overrides=(down,))
    result = apply_pass(config, model, context(texts(8), target="transformers"))
    bits = bits_of(result.model)
    assert bits["model.layers.0.mlp.down_proj"] == 8 and average(result.model) <= 4.0


REFUSALS = [
    ({"average": 4.5, "choices": (2, 3, 4)}, "average 4.5 is outside of the choices, 2 to 4; give one between them"),
    ({"average": 3.0, "choices": (3,)}, "choices are 3; give two or more that differ, or bits: a number"),
    ({"average": 3.0, "choices": (3, 3)}, "choices are 3, 3; give two or more that differ"),
]


@pytest.mark.parametrize(("bits", "text"), REFUSALS)
def test_a_budget_that_is_none_is_refused(bits: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Gptq(bits=bits)


def test_what_contradicts_an_average_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme W4A16 stands for bits: 4; leave one of the two out"):
        Gptq(bits=MIX, scheme="W4A16")
    with pytest.raises(ValueError, match="bits are not chosen by hqq; give a number, or use gptq, rtn or tune"):
        Hqq(bits=MIX)


@pytest.mark.parametrize(
    ("overrides", "target", "text"),
    [
        ([{"targets": (Q,), "bits": 4}], ANY, f"overrides give {Q} bits of its own, and {K}, which engines compute"),
        ([{"targets": ("re:.*mlp",), "bits": 8}], ANY, r"average 3 leaves -\d+\.\d+ bits for what is to be chosen"),
        ([{"targets": ("re:.*_proj",), "bits": 3}], ANY, "every layer has bits that the recipe gives"),
        ([], VLLM, "has kernels for weights of 4 and 8 bits"),
    ],
)
def test_the_plan_refuses(overrides: list[dict[str, Any]], target: Any, text: str) -> None:
    config = Gptq(bits=MIX, group_size=16, overrides=tuple(overrides))
    (problem, *_) = [p for p in config.check(facts(streamed(llama())), target).problems if "kernels for group" not in p]
    assert re.search(text, problem), problem


def test_an_onnx_file_and_two_chains_are_refused() -> None:
    known = facts(streamed(llama()))
    onnx = replace(known, source="onnx", structure=None)
    assert "a budget needs a torch model" in Gptq(bits=MIX).check(onnx, ANY).problems[0]
    two = replace(known, task="text2text-generation")
    assert "along one chain of blocks" in Gptq(bits=MIX).check(two, ANY).problems[0]


def test_layers_that_no_gradient_reaches_are_an_error() -> None:
    net = llama()
    nn.init.zeros_(net.lm_head.weight)
    with pytest.raises(PassError, match=f"{Q}, {K}, {V}: no gradient .* give them bits under overrides, or ignore"):
        apply_pass(Rtn(bits=MIX, group_size=16), streamed(net), context(texts(2)))


def test_without_data_nothing_is_chosen() -> None:
    with pytest.raises(PassError, match="rtn: there is no calibration data; give the recipe a calibration set"):
        apply_pass(Rtn(bits=MIX, group_size=16), streamed(llama()), context())
    assert Rtn(bits=MIX).needs_calibration and not Rtn(bits=4).needs_calibration


def count_checkpoint(model: StreamedModel, schemes: dict[str, Scheme]) -> tuple[int, int]:
    """Bytes of the numbers of a float32 checkpoint, and of one with layers in these schemes, as the exporter has it."""
    whole = left = 0
    names = [name for name in model.store.names() if name not in model.tied]
    for name in names:
        shape = model.store.shape(name)
        whole += 4 * int(np.prod(shape))
        layer = name.removesuffix(".weight")
        if layer not in schemes:
            left += 4 * int(np.prod(shape))
            continue
        for entry in entries(layer, (shape[0], shape[1]), schemes[layer], torch.float32):
            left += entry.n_bytes
        left += len(json.dumps({f"{layer}.weight_scale": [0, 0]})) * 2
    return whole, left


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_size_is_kept_with_all_that_a_checkpoint_holds(symmetric: bool) -> None:
    model = streamed(uneven(layers=2))
    budget = {"size_ratio": 3.1, "choices": (2, 3, 4)}
    config = Rtn(bits=budget, group_size=16, symmetric=symmetric, embeddings="W8")
    result = apply_pass(config, model, context(texts(8), target="transformers"))
    whole, left = count_checkpoint(model, dict(result.model.schemes))
    assert 3.1 <= whole / left < 3.4
    bits = bits_of(result.model)
    assert len({bits[name] for name in (Q, K, V)}) == 1 and len(set(bits.values()) - {8}) > 1
    plan = config.check(facts(model), ANY)
    assert not plan.problems and "at least 3.1 times smaller" in plan.notes[0].text


def test_formats_of_llama_cpp_are_chosen_under_the_bytes_of_their_file() -> None:
    model, target = streamed(uneven(layers=2)), TARGETS["llama.cpp"]
    names = ("Q3_K", "Q5_K", "iq4_nl", 8)
    config = Gptq(bits={"size_ratio": 9.0, "choices": names}, indivisible="fit", embeddings="W8", ignore=DOWN)
    (problem,) = config.check(facts(model), target).problems
    assert "with Q3_K in every group" in problem
    nearest = float(re.search(r"ask for at most (\d+\.\d+)", problem).group(1))  # type: ignore[union-attr]
    config = config.with_bits(BitBudget(size_ratio=0.93 * nearest, choices=names))
    plan = config.check(facts(model), target)
    assert not plan.problems and "Q3_K, IQ4_NL, Q5_K or 8 bits for each of" in plan.notes[0].text
    given = as_block_context(context(texts(8), target="llama.cpp"))
    result = apply_pass(config, model, given)
    chosen = {layer: scheme.name for layer, scheme in result.model.schemes.items()}
    assert len(set(chosen.values()) - {"W8A16"}) > 1
    assert set(chosen.values()) <= {"W4A16", "IQ4_NL", "W5A16_ASYM", "W8A16"}  # 256 divides no layer
    told = result.measured[Q]
    assert {"sensitivity_Q3_K", "sensitivity_8_bits"} <= told.keys() and told["sensitivity"] > 0
    with pytest.raises(ValidationError, match="Q3_K is a format of GGUF files, whose bytes size_ratio counts"):
        Gptq(bits={"average": 4.0, "choices": ("Q3_K", 8)})
    with pytest.raises(ValidationError, match="there is no format 'Q9_K'"):
        Gptq(bits={"size_ratio": 4.0, "choices": ("Q9_K", 8)})
    assert "does not round to" in Tune(bits=config.bits).check(facts(model), target).problems[0]


def test_a_size_out_of_reach_is_refused_by_the_plan_with_the_nearest() -> None:
    known = facts(streamed(uneven()))
    config = Gptq(bits={"size_ratio": 8.0, "choices": (2, 4)}, group_size=16)
    (problem,) = config.check(known, ANY).problems
    assert "bits: size_ratio 8 is out of reach: with 2 bits in every group the file is" in problem
    nearest = float(re.search(r"ask for at most (\d+\.\d+)", problem).group(1))  # type: ignore[union-attr]
    for ratio, fits in ((nearest, True), (nearest + 0.02, False)):
        bits = {"size_ratio": ratio, "choices": (2, 4)}
        assert bool(Gptq(bits=bits, group_size=16).check(known, ANY).problems) != fits
    half = replace(known, float_bytes=2)  # of a source in bfloat16 less is won
    (problem,) = Gptq(bits={"size_ratio": nearest, "choices": (2, 4)}, group_size=16).check(half, ANY).problems
    assert "out of reach" in problem


def test_a_file_that_comes_out_larger_than_was_counted_is_corrected() -> None:
    model, sizes = streamed(uneven(layers=2)), []

    def count(choices: Sequence[dict[str, Scheme]]) -> list[int]:
        whole, left = count_checkpoint(model, choices[0])
        sizes.append((whole, left + 4000))
        return [*sizes[-1]]

    given = as_block_context(context(texts(8), target="transformers"), trials=WeightTrials(count_bytes=count))
    config = Rtn(bits={"size_ratio": 2.3, "choices": (2, 3, 4)}, group_size=16)
    result = apply_pass(config, model, given)
    whole, left = count_checkpoint(model, dict(result.model.schemes))
    assert whole / (left + 4000) >= 2.3 and len(sizes) > 1 and sizes[0][0] / sizes[0][1] < 2.3
    assert "times smaller; " in result.notes[0].text


def as_block_context(given: PassContext, **more: Any) -> BlockContext:
    return BlockContext(**vars(given) | more)


def time_schemes(schemes: Mapping[str, Scheme]) -> float:
    """A model of which a layer takes its bits in milliseconds, and all else 10."""
    return 10.0 + sum(scheme.weights.bits for scheme in schemes.values())


def test_a_speedup_is_kept_as_timed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(uneven())
    layers = [name for input_group in model.structure.input_groups for name in input_group.layers if name != "lm_head"]
    floats = 10.0 + 32 * len(layers)

    def time_layers(schemes: Mapping[str, Sequence[Scheme]]) -> dict[str, list[float]]:
        return {
            name: [0.5 * scheme.weights.bits for scheme in each] for name, each in schemes.items()
        }  # half the truth

    trials = WeightTrials(
        time=lambda choices: [floats, *map(time_schemes, choices)], time_layers=time_layers, float_bytes=4
    )
    given = as_block_context(context(texts(8), target="onnxruntime-cpu"), trials=trials)
    wanted = floats / (10.0 + 5 * len(layers))
    result = apply_pass(Rtn(bits={"speedup": wanted, "choices": (4, 8)}, group_size=16), model, given)
    assert floats / time_schemes(result.model.schemes) >= wanted
    assert set(bits_of(result.model).values()) == {4, 8}
    assert "times as fast as in float here" in result.notes[0].text

    given = replace(given, progress=no_measuring)
    with pytest.raises(PassError, match=r"speedup 9 is out of reach: with the fastest .* is \d\.\d\d times as fast"):
        apply_pass(Rtn(bits={"speedup": 9.0, "choices": (4, 8)}, group_size=16), model, given)
    with pytest.raises(PassError, match="speedup needs a target that is timed here; use average or size_ratio"):
        apply_pass(Rtn(bits={"speedup": 2.0, "choices": (4, 8)}, group_size=16), model, context(texts(2)))


def test_one_budget_is_given_and_a_speedup_only_where_something_is_timed() -> None:
    with pytest.raises(ValueError, match="give exactly one of average, size_ratio, speedup; average and speedup are"):
        Gptq(bits={"average": 3.0, "speedup": 2.0, "choices": (2, 4)})
    with pytest.raises(ValueError, match="give exactly one of average, size_ratio, speedup; none is given"):
        Gptq(bits={"choices": (2, 4)})
    config = Gptq(bits={"speedup": 2.0, "choices": (2, 4)}, group_size=16)
    (problem,) = config.check(facts(streamed(llama())), ANY).problems
    assert "transformers reads no ONNX file that is run here; use average or size_ratio" in problem
    assert config.time_budget == "graph" and Gptq(bits=MIX).time_budget is None
