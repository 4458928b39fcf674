"""Embeddings and the output layer in few bits: the plan, how they are rounded, that a shared one is one table."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from helpers.streaming import VOCABULARY, context, gpt2, llama, streamed, texts
from onnxruntime import InferenceSession
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from compress.blocks.streamed import StreamedModel
from compress.export.checkpoint import write_checkpoint
from compress.export.checkpoint_rules import checkpoint_notes, checkpoint_problems
from compress.export.onnx import finish, with_integers
from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Structure, assign_roles
from compress.formats.schemes import PRESETS, WeightScheme
from compress.formats.targets import TARGETS, Target
from compress.passes import Gptq, Rtn
from compress.passes.autoround import AutoRound
from compress.passes.awq import Awq
from compress.passes.hqq import Hqq
from compress.passes.tune import Tune
from compress.passes.weight_only import WeightPass
from compress.planning.latency import round_as_planned
from compress.recipe.exports import CheckpointExport
from compress.rounding import quantized_weight
from compress.rounding.gptq import factor_hessian, gptq_round, gptq_round_together
from compress.rounding.grid import round_to_grid
from compress.rounding.quantized_weight import ROWS
from compress.rounding.state import GraphState
from compress.work import apply_pass
from compress.work.contexts import BlockContext

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
EMBED, HEAD = "model.embed_tokens", "lm_head"
ANY, CPU = TARGETS["transformers"], TARGETS["onnxruntime-cpu"]
W4 = {"scheme": "W4A16", "group_size": 16, "embeddings": "W4", "lm_head": "W4"}
PASSES = [
    Rtn(**W4),
    Gptq(**W4),
    Awq(**W4),
    Hqq(**W4),
    AutoRound(**W4, steps=1),
    Tune(**W4, steps=1),
]


def facts(tied: bool = True, positions: int = 4) -> ModelFacts:
    """Tokens, positions, a layer in a block, and a head."""
    weight = f"{EMBED}.weight" if tied else f"{HEAD}.weight"
    layers = (
        LayerFacts(EMBED, "Embedding", "Gather", f"{EMBED}.weight", (128, 64)),
        LayerFacts("positions", "Embedding", "Gather", "positions.weight", (positions, 64)),
        LayerFacts("layers.0.q", "Linear", "MatMul", "layers.0.q.weight", (64, 64)),
        LayerFacts(HEAD, "Linear", "MatMul", weight, (128, 64)),
    )
    structure = Structure((BlockFacts("layers.0", (InputGroup(("layers.0.q",)),)),), after=(InputGroup((HEAD,)),))
    return ModelFacts("torch", "Tiny", "text-generation", (), (), assign_roles(layers, structure), structure=structure)


def rounded(config: WeightPass, tied: bool, folder: Path) -> StreamedModel:
    model = streamed(llama(tied=tied), folder)
    result = apply_pass(config, model, context(texts()))
    done = {decision.layer: decision.action for decision in result.decisions}
    assert done[EMBED] == "w4" and done[HEAD] in ("w4", "learned", "tuned")
    return result.model


def one_table(model: StreamedModel) -> bool:
    return model.tied.get(f"{HEAD}.weight") == f"{EMBED}.weight"


@pytest.mark.parametrize("config", PASSES, ids=lambda config: config.kind)
def test_a_shared_table_is_rounded_once_for_both_uses(config: WeightPass, tmp_path: Path) -> None:
    model = rounded(config, True, tmp_path)
    assert one_table(model) and {EMBED, HEAD} <= set(model.quantized_layers())
    module = model.materialise().wrapped
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert torch.equal(module.lm_head.weight, model.store.read(f"{EMBED}.weight"))
    assert not torch.equal(model.store.read(f"{HEAD}.weight"), model.store.read_float(f"{HEAD}.weight"))


@pytest.mark.parametrize("config", PASSES, ids=lambda config: config.kind)
def test_tables_of_their_own_are_rounded_each(config: WeightPass, tmp_path: Path) -> None:
    model = rounded(config, False, tmp_path)
    assert not model.tied and {EMBED, HEAD} <= set(model.quantized_layers())
    floats = model.store.read_float(f"{EMBED}.weight")
    nearest = round_to_grid(floats, WeightScheme(4, 16))
    assert np.array_equal(model.store.quantized(EMBED).dequantize(), nearest.dequantize())  # type: ignore[union-attr]


OPEN = {"scheme": "W8A16", "group_size": 16, "embeddings": "auto", "lm_head": "auto"}


def block_context(batches: Any, work: Path | None = None, **more: Any) -> BlockContext:
    return BlockContext(**vars(context(batches, work)), **more)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("allowed", "bits"), [(1e9, 4), (0.0, 8)])
def test_open_tables_get_the_fewest_bits_that_cost_next_to_nothing(
    allowed: float, bits: int, tied: bool, tmp_path: Path
) -> None:
    for config in (Gptq(**OPEN), Rtn(**OPEN), Hqq(**OPEN)):
        model = streamed(llama(tied=tied), tmp_path / config.kind)
        result = apply_pass(config, model, block_context(texts(), nats_allowed=allowed))
        assert {result.model.schemes[name].weights.bits for name in (EMBED, HEAD)} == {bits}
        assert result.settled == dict.fromkeys(("embeddings", "lm_head"), f"W{bits}A16")
        assert one_table(result.model) == tied
        said = next(note.text for note in result.notes if "next to nothing" in note.text)
        assert f"embeddings: W{bits}A16, lm_head: W{bits}A16: W4A16 costs" in said


def test_of_two_open_tables_each_has_its_own_bits(tmp_path: Path) -> None:
    """A table of embeddings that four bits hold whole, and an output layer that loses by them."""
    net = llama(tied=False)
    with torch.no_grad():
        exact = round_to_grid(net.model.embed_tokens.weight, WeightScheme(4, 16)).dequantize()
        net.model.embed_tokens.weight.copy_(torch.from_numpy(exact))
        net.lm_head.weight.mul_(10)
    work, model = tmp_path / "work", streamed(net, tmp_path / "model")
    result = apply_pass(Rtn(**OPEN), model, block_context(texts(), work, nats_allowed=1e-3))
    assert result.settled == {"embeddings": "W4A16", "lm_head": "W8A16"}
    for path in work.glob("block-*"):
        path.unlink()
    again = apply_pass(Rtn(**OPEN), model, block_context((), work, nats_allowed=1e-3))
    assert again.settled == result.settled  # what was measured is not measured again


def test_the_plan_counts_open_tables_in_their_most_bits() -> None:
    config = Rtn(**OPEN)
    assert config.needs_calibration and config.uses_gates and not Rtn(**W4).uses_gates
    plan = config.check(facts(tied=False), CPU)
    assert not plan.problems and plan.schemes[EMBED].weights.bits == 8
    assert any("embeddings and lm_head: W4A16 or W8A16, by what they cost" in note.text for note in plan.notes)
    assert "embeddings: auto" in config.check(facts(tied=False), ANY).problems[0]
    fitted = Gptq(scheme="Q4_K", embeddings="auto", indivisible="fit")
    assert fitted.table_choices == ("Q4_K", "Q6_K")


def test_gptq_rounds_the_head_by_what_it_reads(tmp_path: Path) -> None:
    head, plain = (
        rounded(config, False, tmp_path / config.kind).store.quantized(HEAD) for config in (Gptq(**W4), Rtn(**W4))
    )
    assert head is not None and plain is not None and not np.array_equal(head.values, plain.values)
    measured = apply_pass(Gptq(**W4), streamed(llama()), context(texts())).measured[HEAD]
    assert measured["output_error"] < measured["output_error_rtn"]


def test_blocks_behind_see_the_rounded_embeddings(tmp_path: Path) -> None:
    """Rows are looked up in the integers, and each is what the dequantized table holds."""
    keys = {"scheme": "W8A16", "group_size": 16, "embeddings": "W2A16"}
    model = streamed(llama(), tmp_path / "a")
    after = apply_pass(Gptq(**keys), model, context(texts())).model
    net = llama()
    with torch.no_grad():
        net.model.embed_tokens.weight.copy_(after.store.read(f"{EMBED}.weight"))
    keys.pop("embeddings")
    other = apply_pass(Gptq(**keys), streamed(net, tmp_path / "b"), context(texts())).model
    for name in other.quantized_layers():
        assert torch.equal(other.store.read(f"{name}.weight"), after.store.read(f"{name}.weight")), name


def test_a_killed_run_goes_on_with_the_rounded_table(tmp_path: Path) -> None:
    model, work = streamed(llama(tied=True), tmp_path / "a"), tmp_path / "work"
    whole = apply_pass(Gptq(**W4), model, context(texts(), work)).model
    for path in sorted(work.glob("block-*"))[-4:]:
        path.unlink()
    again = apply_pass(Gptq(**W4), model, context(texts(), work)).model
    assert one_table(again)
    assert all(torch.equal(whole.store.read(name), again.store.read(name)) for name in whole.store.names())


def test_positions_are_a_table_where_they_are_as_large(tmp_path: Path) -> None:
    model = apply_pass(Rtn(**W4), streamed(gpt2(), tmp_path), context(target="transformers")).model
    assert {"transformer.wte", "transformer.wpe", HEAD} <= set(model.quantized_layers())


def test_tall_weights_are_rounded_by_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(2 * ROWS + 40, 32, generator=rng), torch.randn(64, 32, generator=rng)
    hessian = factor_hessian(rows.T @ rows / 64, 0.01)
    whole = gptq_round_together([weight], hessian, WeightScheme(4, 16))[0]
    nearest = round_to_grid(weight, WeightScheme(4, 16, symmetric=False))
    parts = gptq_round(weight, hessian, WeightScheme(4, 16))
    # A product of fewer rows may be summed up in another order: a weight half way between two values then
    # goes to the other one, and what follows in its own row with it, but in no other row.
    same = np.isclose(whole.weight.dequantize(), parts.weight.dequantize(), rtol=1e-5, atol=0).all(axis=1)  # [rows]
    assert same.mean() > 0.9
    assert parts.error == pytest.approx(whole.error, rel=0.5)
    by_rows = quantized_weight.by_rows(weight, lambda part: round_to_grid(part, WeightScheme(4, 16, symmetric=False)))
    assert np.array_equal(by_rows.dequantize(), nearest.dequantize())
    chosen = np.array([3, ROWS, 3])
    assert np.array_equal(nearest.rows(chosen).dequantize(), nearest.dequantize()[chosen])


def test_the_plan_counts_a_shared_table_once_and_names_what_stays_float() -> None:
    config = Rtn(scheme="W4A16", group_size=32, lm_head="W8")
    plan = config.check(facts(), ANY)
    assert not plan.problems and plan.schemes[EMBED] == plan.schemes[HEAD] == PRESETS["W8A16"].with_group(32)
    table, layer = 128 * 64 * 9 // 8, 64 * 64 * 5 // 8
    assert plan.facts.n_bytes == table + layer + 4 * 4 * 64
    said = {decision.layer: decision for decision in plan.decisions}
    assert "one table for embeddings and output layer" in said[EMBED].reason
    kept = {d.layer: d.reason for d in Rtn(embeddings="W4").check(facts(), ANY).decisions}
    assert kept["positions"] == "stays float: smaller than a 10th of the largest table"


def test_one_of_two_tables_alone() -> None:
    plan = Rtn(embeddings="W8").check(facts(tied=False), ANY)
    assert plan.schemes[EMBED].name == "W8A16" and HEAD not in plan.schemes
    assert HEAD in Rtn(lm_head="W4A16_ASYM", ignore=()).check(facts(tied=False), ANY).schemes
    override = ({"targets": (HEAD,), "group_size": 64},)
    other = Rtn(lm_head="W8", overrides=override).check(facts(tied=False), ANY)
    assert other.schemes[HEAD] == PRESETS["W8A16"].with_group(64)


def test_what_cannot_be_is_refused_in_the_plan() -> None:
    (text,) = Rtn(embeddings="W8", lm_head="W4").check(facts(), ANY).problems
    assert text == (
        "rtn: one table, stored once, cannot be model.embed_tokens: W8A16, lm_head: W4A16; give embeddings and lm_head "
        "the same, or neither, and ignore: [] for an output layer of its own beside float embeddings"
    )
    (text,) = Rtn(lm_head="W4", ignore=(EMBED,)).check(facts(), ANY).problems
    assert "cannot be model.embed_tokens: float, lm_head: W4A16, group 32" in text
    bare = replace(facts(), layers=facts().layers[2:3], structure=Structure(facts().structure.blocks))  # type: ignore[union-attr]
    found = Rtn(embeddings="W4", lm_head="W4").check(bare, ANY).problems
    assert found == (
        "rtn: embeddings: this model has no table of embeddings; leave it out",
        "rtn: lm_head: this model has no output layer behind its blocks; leave it out",
    )
    graph = replace(facts(), source="onnx")
    assert "need a torch model" in Rtn(embeddings="W4").check(graph, CPU).problems[-1]
    with pytest.raises(
        ValidationError, match="no scheme 'W8A8' for weights alone; did you mean 'W8A16'\\?; there are auto, W8, W4, "
    ):
        Rtn(embeddings="W8A8")


def test_a_head_of_its_own_is_counted_beside_float_embeddings() -> None:
    after = Rtn(scheme="W4A16", group_size=32, ignore=()).check(facts(), ANY).facts
    assert after.n_bytes == 128 * 64 * 5 // 8 + 64 * 64 * 5 // 8 + 4 * 132 * 64
    assert [layer.role for layer in after.layers] == ["table", "", "", "head"]


@pytest.mark.parametrize("tied", [True, False])
def test_tables_that_are_most_of_what_is_left_are_told_with_the_keys_that_round_them(tied: bool) -> None:
    def tell(target: Target, **more: Any) -> list[str]:
        notes = Rtn(scheme="W4A16", group_size=32, **more).check(facts(tied=tied), target).notes
        return [note.text for note in notes if "stay float" in note.text]

    (text,) = tell(CPU)
    given = {"embeddings": "W8"} | ({} if tied else {"lm_head": "W8"})
    assert f"`{', '.join(f'{key}: {scheme}' for key, scheme in given.items())}` makes the weights" in text
    found = [float(each) for each in re.findall(r"([\d.]+)x", text)]
    plans = [Rtn(scheme="W4A16", group_size=32, **more).check(facts(tied=tied), CPU).facts for more in (given, {})]
    assert found == [pytest.approx(facts(tied=tied).n_bytes / after.n_bytes, abs=0.05) for after in plans]
    assert tell(TARGETS["vllm"]) == [] and tell(CPU, **given) == []
    mixed = Rtn(bits={"average": 6.0, "choices": (4, 8)}, group_size=32).check(facts(tied=tied), CPU)
    assert not mixed.problems and not any(
        "makes the weights" in note.text for note in mixed.notes
    )  # what each choice of bits would leave is no plan


def test_what_readers_of_checkpoints_cannot_take_is_refused() -> None:
    shared = Rtn(scheme="W4A16", group_size=32, embeddings="W4", lm_head="W4").check(facts(), ANY)
    export = CheckpointExport()
    assert checkpoint_problems(facts(), shared.schemes, export) == []
    assert "dequantize=True" in checkpoint_notes(facts(), shared.schemes, export)[-1].text
    (text,) = checkpoint_problems(facts(), shared.schemes, export, "vllm")
    assert "vLLM cannot share embeddings in few bits with the output layer" in text
    mixed = Rtn(scheme="W4A16", group_size=32, embeddings="W8").check(facts(tied=False), ANY).schemes
    (text,) = checkpoint_problems(facts(tied=False), mixed, export)
    assert "transformers loads embeddings in few bits by one scheme for all layers" in text
    assert checkpoint_problems(facts(tied=False), mixed, export, "vllm") == []
    (text,) = checkpoint_problems(facts(tied=False), mixed, CheckpointExport(format="gptq"))[:1]
    assert "is an embedding, which the GPTQ format has no layer for" in text


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_what_was_rounded(tied: bool, tmp_path: Path) -> None:
    net = llama(tied=tied)
    model = replace(rounded(Rtn(**W4), tied, tmp_path / "in"), folder=tmp_path / "in")
    write_checkpoint(tmp_path / "out", model, CheckpointExport(dtype="float32"), "name: x\n")
    how = CompressedTensorsConfig(dequantize=True)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=how, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ids = torch.arange(8)[None]
    expected = model.materialise()(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5)
    size, before = ((tmp_path / name).rglob("*.safetensors") for name in ("out", "in"))
    assert sum(p.stat().st_size for p in size) < 0.4 * sum(p.stat().st_size for p in before)
    assert net.lm_head.weight.shape == (VOCABULARY, 32)


def table_graph(table: np.ndarray) -> ir.Model:
    """tokens -> embeddings, times the table's transpose, as torch's exporter writes a shared one."""
    text = f"""
    <ir_version: 10, opset_import: ["" : 20]>
    g (int64[b, t] ids) => (float[b, t, {len(table)}] logits) {{
        rows = Gather (table, ids)
        turned = Transpose <perm = [1, 0]> (table)
        logits = MatMul (rows, turned)
    }}"""
    model = ir.from_onnx_text(text)
    value = ir.Value(name=f"{EMBED}.weight")
    value.const_value = ir.tensor(table, name=value.name)
    value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(table.shape)
    for node in model.graph:
        for index, given in enumerate(node.inputs):
            if given is not None and given.name == "table":
                node.replace_input_with(index, value)
    model.graph.register_initializer(value)
    model.graph.node(2).metadata_props["pkg.torch.onnx.name_scopes"] = f"['', '{HEAD}', 'matmul']"
    return model


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "W3A16"])
@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino", "tensorrt"])
def test_graphs_look_up_and_multiply_by_one_table(scheme: str, target: str) -> None:
    table = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    weight = round_to_grid(torch.from_numpy(table), PRESETS[scheme].with_group(32).weights)
    schemes = dict.fromkeys((EMBED, HEAD), PRESETS[scheme].with_group(32))
    held = streamed(llama(tied=True, hidden_size=64, vocab_size=48))
    held = replace(held, store=held.store.holding({EMBED: _hold(weight)}), schemes=schemes)
    state, notes = with_integers(GraphState(table_graph(table)), held)
    assert not notes
    model, _ = finish(state, TARGETS[target])
    ops = [node.op_type for node in model.graph]
    stored = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    copies = 2 if target == "tensorrt" else 1
    least = weight.values.size * (8 if weight.bits > 4 else 4) // 8 + weight.scales.nbytes
    assert copies * least <= stored < copies * least + 400
    if target == "onnxruntime-cpu":
        assert "GatherBlockQuantized" in ops and "MatMulNBits" in ops and "DequantizeLinear" not in ops
    ids = np.array([[3, 47, 3]])
    (logits,) = InferenceSession(ir.to_proto(model).SerializeToString()).run(None, {"ids": ids})
    expected = weight.dequantize()[ids] @ weight.dequantize().T
    assert np.abs(logits - expected).max() < 0.02 * np.abs(expected).max()  # the product's inputs are rounded to int8


@pytest.mark.parametrize("names", [(EMBED, HEAD), (HEAD,)])
def test_a_plan_times_tables_as_the_bundle_has_them(names: tuple[str, ...]) -> None:
    graph = table_graph(np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32))
    state = round_as_planned(GraphState(graph), dict.fromkeys(names, PRESETS["W4A16"].with_group(32)))
    ops = [node.op_type for node in finish(state, CPU)[0].graph]
    assert {"MatMulNBits", "DequantizeLinear"} & {*ops} and ("GatherBlockQuantized" in ops) == (EMBED in names)


def _hold(weight: quantized_weight.QuantizedWeight):  # type: ignore[no-untyped-def]
    from compress.blocks.store import HeldLayer

    return HeldLayer(weight, False)
