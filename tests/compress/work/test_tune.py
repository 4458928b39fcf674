"""Tuning: what is learned is what is stored, it never ends worse than it started, and the pass around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from child_processes import run_in_two_processes
from hosts import Host
from streaming import bert, context, gpt2, llama, nearest, streamed, texts, together
from torch import Tensor, nn

from compress.blocks.sharing import gather_from_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.errors import PassError
from compress.facts import LayerFacts, ModelFacts
from compress.formats.schemes import PRESETS, Scheme, WeightScheme
from compress.formats.targets import TARGETS
from compress.passes.tune import ROUNDING_BYTES, SCALING_BYTES, SPARE, Tune
from compress.rounding.fake import LearnedWeight, ShiftedWeight, level_range, to_level
from compress.rounding.learn import RoundingSchedule, learn
from compress.rounding.learned_batches import (
    NEXT_TOKENS,
    FloatTeacher,
    arrange_batches,
    divergence,
    length,
    mark_next_tokens,
    relative_error,
    soften_logits,
)
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.rounding.tune import student_of, tune_module, vectors
from compress.work import tune as tuning
from compress.work.learning import float_module, samples
from compress.work.tune import END, apply_tune

W2 = Scheme(WeightScheme(2, 16))
GRIDS = [(2, 16, True), (3, -1, True), (4, 8, False), (8, 0, True), (2, 16, False)]
QUICK = RoundingSchedule(30, 0.02, 0.005, 0.005)


def weight_of(rows: int = 6, inputs: int = 32, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, inputs)).astype(np.float32))


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> QuantizedWeight:
    if group:
        return round_to_nearest(weight.numpy(), bits, group, symmetric)
    flat = round_to_nearest(weight.numpy().reshape(1, -1), bits, -1, symmetric)
    return replace(flat, values=flat.values.reshape(weight.shape), group_size=0)


def in_two_bits(model: StreamedModel, scheme: Scheme = W2) -> StreamedModel:
    stream = Stream(model, context(), data=False)
    for block in stream:
        for layer, module in block.layers.items():
            if type(module).__name__ in ("Linear", "Conv1D") and layer != "lm_head":
                block.put(layer, nearest(block.matrix(layer), scheme), scheme)
    return stream.result().model


@pytest.mark.parametrize("size", [0.0, 1e-42, 1.0, 1e30])
@pytest.mark.parametrize("layer", ["model.layers.0.self_attn.v_proj", "model.layers.0.mlp.down_proj"])
def test_a_model_with_a_layer_of_extremes_is_tuned(layer: str, size: float) -> None:
    net = llama(layers=1)
    weight = net.get_submodule(layer).weight.data
    weight.copy_(torch.full_like(weight, size) if size == 1 else weight * size * 10)
    result = apply_tune(Tune(steps=2, block_steps=2, blockwise=True), in_two_bits(streamed(net)), context(texts(3)))
    for name in result.model.quantized_layers():
        found = result.model.store.quantized(name)
        assert found is not None and np.isfinite(found.dequantize()).all() and (found.scales != 0).all()
    for numbers in result.measured.values():
        assert np.isfinite([value for key, value in numbers.items() if key.endswith("loss")]).all()


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)).requires_grad_(False)


class Named(nn.Module):
    """x -> the net's output, by name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pair(bits: int = 2) -> tuple[Named, Named, dict[str, nn.Module], dict[str, QuantizedWeight]]:
    """A float net, its rounded copy, that one's layers and their integers."""
    teacher, student = Named(small_net()), Named(small_net())
    layers = {name: part for name, part in student.named_modules() if isinstance(part, nn.Linear)}
    start = {name: rounded(layer.weight.data, bits, 8, True) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.weight.data = torch.from_numpy(start[name].dequantize())
    return teacher, student, layers, start


def rows(n: int = 8, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(32, 16, generator=generator)} for _ in range(n)]


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    zeros = (a.zero_points is None and b.zero_points is None) or np.array_equal(a.zero_points, b.zero_points)  # type: ignore[arg-type]
    return np.array_equal(a.values, b.values) and np.array_equal(a.scales, b.scales) and zeros


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", [LearnedWeight, ShiftedWeight])
def test_it_starts_as_what_it_was_given(kind: Any, grid: tuple[int, int, bool]) -> None:
    weight = weight_of()
    start = rounded(weight, *grid)
    for before in (weight, None, weight * 10):
        fake = kind(start, before)
        assert same(fake.freeze(), start)
        np.testing.assert_array_equal(fake().detach().numpy(), start.dequantize())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("kind", [LearnedWeight, ShiftedWeight])
def test_what_is_learned_with_is_what_is_stored(kind: Any, grid: tuple[int, int, bool]) -> None:
    """Whatever the parameters are, the forward pass has the values of the integers, and those are on the grid."""
    fake = kind(rounded(weight_of(), *grid), weight_of())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*fake.rounding(), *fake.scaling()]:
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    fake.confine()
    found, (low, high) = fake.freeze(), level_range(fake.start)
    np.testing.assert_array_equal(fake().detach().numpy(), found.dequantize())
    assert found.values.dtype == fake.start.values.dtype and found.values.min() >= low and found.values.max() <= high
    assert found.scales.shape == fake.start.scales.shape and found.scales.dtype == np.float32
    assert not np.array_equal(found.values, fake.start.values)


@pytest.mark.parametrize("kind", [LearnedWeight, ShiftedWeight])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_reach_rounding_and_scales(kind: Any, symmetric: bool) -> None:
    fake = kind(rounded(weight_of(), 3, 16, symmetric), weight_of())
    (fake() ** 2).sum().backward()
    for parameter in [*fake.rounding(), *fake.scaling()]:
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def test_the_gradient_of_a_scale_is_that_of_its_weights() -> None:
    """By hand: d(level * scale * (1 + g)) / dg = level * scale, summed over the group."""
    start = rounded(weight_of(), 4, 16, True)
    fake = LearnedWeight(start, weight_of())
    upstream = weight_of(seed=3)
    (fake() * upstream).sum().backward()
    by_hand = (start.dequantize() * upstream.numpy()).reshape(6, 2, 16).sum(2)
    np.testing.assert_allclose(fake.growth.grad.numpy(), by_hand, rtol=1e-5, atol=1e-5)  # type: ignore[union-attr]
    in_levels = upstream.numpy().reshape(6, 2, 16) * start.scales[:, :, None]
    np.testing.assert_allclose(fake.position.grad.numpy(), in_levels, rtol=1e-6)  # type: ignore[union-attr]


def test_levels_that_kernels_may_negate_stay_so() -> None:
    narrow = QuantizedWeight(np.array([[-1, 1, 0, 1]], np.int8), np.ones((1, 1), np.float32), None, 2, 4)
    assert level_range(narrow) == (-1, 1)
    assert level_range(replace(narrow, scales=-narrow.scales)) == (-2, 1)
    assert level_range(replace(narrow, values=narrow.values * 2)) == (-2, 1)
    assert to_level(torch.tensor([-7.0, 0.6, 9.0]), -1, 1).tolist() == [-1.0, 1.0, 1.0]


def test_what_is_not_made_of_integers_is_refused() -> None:
    weight = rounded(weight_of(), 8, -1, True)
    with pytest.raises(ValueError, match="are not the numbers of its scheme"):
        LearnedWeight(replace(weight, values=weight.values.astype(np.float32)))


def test_the_divergence_is_torchs() -> None:
    logits, other = torch.randn(7, 11, requires_grad=True), torch.randn(7, 11)
    ours = divergence(logits, *soften_logits(other))
    (gradient,) = torch.autograd.grad(ours, logits)
    theirs = nn.functional.kl_div(logits.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="batchmean")
    (expected,) = torch.autograd.grad(theirs, logits)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected)
    assert relative_error(other, other).item() == 0


def test_samples_are_put_together_by_length() -> None:
    lengths = [5, 2, 7, 3, 4]
    taken = samples([{"ids": np.arange(12)[None], "m": (np.arange(12) < n).astype(np.int64)[None]} for n in lengths],
                    {"ids": "input_ids", "m": "attention_mask"})  # fmt: skip
    batches = arrange_batches(taken, 2)
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [[2, 3], [4, 5], [7]]
    assert batches[0]["input_ids"].tolist() == [[0, 1, 0], [0, 1, 2]]
    left = {"input_ids": torch.arange(4)[None], "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    assert arrange_batches([left], 2)[0]["input_ids"].tolist() == [[2, 3]]
    images = [{"x": torch.zeros(1, 3, n)} for n in (4, 4, 5)]
    assert [batch["x"].shape for batch in arrange_batches(images, 4)] == [(2, 3, 4), (1, 3, 5)]


@pytest.mark.parametrize("kind", ["kl", "hidden"])
def test_it_comes_closer_to_the_float_model(kind: Any) -> None:
    teacher, student, layers, start = pair()
    floats = {name: dict(teacher.named_parameters())[f"{name}.weight"] for name in layers}
    held = {name: value.clone() for name, value in student.state_dict().items()}
    weights, values, log = tune_module(
        student,
        layers,
        start,
        rows(),
        teacher,
        replace(QUICK, steps=60),
        kept_aside=rows(4, 9),
        kind=kind,
        floats=floats,
    )
    assert log.end_loss < 0.75 * log.start_loss and log.steps == 60
    assert all(torch.equal(value, held[name]) for name, value in student.state_dict().items())
    assert set(values) == {"net.0.bias", "net.1.weight", "net.1.bias", "net.3.bias"}
    names = dict(student.named_parameters())
    for name, weight in weights.items():
        layers[name].weight.data = torch.from_numpy(weight.dequantize())  # type: ignore[union-attr]
    for name, value in values.items():
        assert not torch.equal(names[name], value)
        names[name].data = value
    again = tune_module(
        student, layers, weights, rows(), teacher, replace(QUICK, steps=0), kept_aside=rows(4, 9), kind=kind
    )
    assert again[2].start_loss == pytest.approx(log.end_loss, rel=1e-5)  # what was learned with is what was stored


def test_no_steps_change_nothing_and_a_model_is_like_itself() -> None:
    teacher, student, layers, start = pair()
    weights, values, log = tune_module(student, layers, start, rows(), teacher, replace(QUICK, steps=0))
    assert all(same(weights[name], start[name]) for name in start) and log.best_step == 0
    assert all(torch.equal(value, dict(student.named_parameters())[name]) for name, value in values.items())
    itself = tune_module(student, layers, start, rows(), student, replace(QUICK, steps=0))
    assert itself[2].start_loss == pytest.approx(0, abs=1e-6)


def test_the_start_is_kept_where_nothing_is_better() -> None:
    """The model is its own teacher, and steps are large: all that is learned is worse."""
    _, student, layers, start = pair()
    schedule = RoundingSchedule(8, 0.4, 0.2, 0.2)
    weights, values, log = tune_module(student, layers, start, rows(), student, schedule, kept_aside=rows(2, 5))
    assert log.best_step == 0 and log.end_loss == log.start_loss and log.steps == 8
    assert all(same(weights[name], start[name]) for name in start)
    assert all(torch.equal(value, dict(student.named_parameters())[name]) for name, value in values.items())


def test_it_is_reproducible_and_leaves_the_random_generators_alone() -> None:
    teacher, student, layers, start = pair()
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    found = [tune_module(student, layers, start, rows(), teacher, replace(QUICK, seed=s))[0] for s in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index]
    assert all(same(found[0][name], found[1][name]) for name in start)
    assert not all(same(found[0][name], found[2][name]) for name in start)


def test_integers_stay_where_scales_alone_are_learned() -> None:
    teacher, student, layers, start = pair()
    weights, _, log = tune_module(student, layers, start, rows(), teacher, QUICK, learn_rounding=False)
    assert log.end_loss < log.start_loss
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight.values, start[name].values)
        assert not np.array_equal(weight.scales, start[name].scales)


def test_time_runs_out() -> None:
    teacher, student, layers, start = pair()
    schedule = replace(QUICK, steps=10**6, max_seconds=0.2)
    log = tune_module(student, layers, start, rows(), teacher, schedule)[2]
    assert 0 < log.steps < 10**6 and log.seconds < 5 and log.end_loss <= log.start_loss


def test_vectors_that_modules_share_are_learned_once() -> None:
    net = small_net()
    net[3].bias = nn.Parameter(torch.zeros(8))
    shared = nn.ModuleDict({"a": net[1], "b": net[1], "c": net[3]})
    assert {name: len(places) for name, places in vectors(shared).items()} == {"a.weight": 1, "a.bias": 1, "c.bias": 1}
    other = nn.LayerNorm(32)
    other.weight = net[1].weight
    student = student_of(nn.ModuleList([net[1], other]), {}, {}, {})
    with student.learning():
        assert net[1].weight is other.weight is student.floats["0.weight"]
    assert learn(student, [], [], replace(QUICK, steps=0)).steps == 0


def test_the_pass_tunes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ROUNDING_RATE", 0.02)  # for few steps
    before = in_two_bits(streamed(llama()))
    result = apply_tune(Tune(kind="tune", steps=20), before, context(texts(16)))
    after = result.model
    numbers = result.measured[END]
    assert numbers["end_loss"] < 0.8 * numbers["start_loss"]
    assert set(after.quantized_layers()) == set(before.quantized_layers())
    assert {d.action for d in result.decisions} == {"tuned"} and after.schemes == before.schemes
    assert not torch.equal(after.store.read("model.norm.weight"), before.store.read("model.norm.weight"))
    assert torch.equal(after.store.read("lm_head.weight"), before.store.read("lm_head.weight"))
    aside = together(texts(16)[14:])
    assert divergence_of(after, before, aside) == pytest.approx(numbers["end_loss"], rel=1e-3)
    assert any("whole" not in note.text and "->" in note.text for note in result.notes)


def divergence_of(model: StreamedModel, origin: StreamedModel, feeds: dict[str, Tensor]) -> float:
    with torch.no_grad():
        ours, theirs = (
            net(**feeds)[feeds["attention_mask"].bool()] for net in (model.materialise(), float_module(origin))
        )
    return nn.functional.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), log_target=True, reduction="batchmean"
    ).item()


@pytest.mark.parametrize("net", [bert, gpt2])
def test_other_architectures(net: Any) -> None:
    before = in_two_bits(streamed(net()))
    result = apply_tune(Tune(kind="tune", steps=12), before, context(texts(8)))
    assert result.measured[END]["end_loss"] < result.measured[END]["start_loss"]
    assert set(result.model.quantized_layers()) == set(before.quantized_layers())


def test_block_by_block_and_then_the_scales() -> None:
    before = in_two_bits(streamed(llama(layers=2)))
    config = Tune(kind="tune", steps=12, block_steps=12, blockwise=True)
    result = apply_tune(config, before, context(texts(8)))
    for name in ("model.layers.0", "model.layers.1", END):
        assert result.measured[name]["end_loss"] < result.measured[name]["start_loss"]
    aside = together(texts(8)[7:])
    assert divergence_of(result.model, before, aside) < 0.9 * divergence_of(before, before, aside)
    assert divergence_of(result.model, before, aside) == pytest.approx(result.measured[END]["end_loss"], rel=1e-3)


def test_memory_decides(host: Host) -> None:
    config = Tune(kind="tune")
    for per_weight, how in ((ROUNDING_BYTES, "whole"), (SCALING_BYTES, "blocks, then scales"), (1, "blocks")):
        host.memory_bytes = (8 * 1000 + per_weight * 1000 + 1) / SPARE
        assert config.how(1000, 1000) == how
    assert Tune(kind="tune", blockwise=False).how(1000, 1000) == "whole"
    host.memory_bytes = 2**30
    assert Tune(kind="tune", blockwise=True).how(1000, 1000) == "blocks, then scales"


def test_nothing_rounded_yet_is_rounded_by_gptq() -> None:
    result = apply_tune(Tune(kind="tune", steps=4, bits=3, group_size=16), streamed(llama(layers=2)), context(texts(8)))
    assert {scheme.name for scheme in result.model.schemes.values()} == {"W3A16"}
    assert "lm_head" not in result.model.quantized_layers() and len(result.model.quantized_layers()) == 14
    assert any("gptq did it first" in note.text for note in result.notes)


def test_some_of_the_layers() -> None:
    before = in_two_bits(streamed(llama(layers=2)))
    config = Tune(kind="tune", steps=6, targets=("re:.*mlp",), ignore=("model.layers.0.mlp.up_proj",))
    result = apply_tune(config, before, context(texts(4)))
    changed = {
        la for la in before.quantized_layers() if not same(before.store.quantized(la), result.model.store.quantized(la))
    }  # type: ignore[arg-type]
    assert changed == {f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down")} - {
        "model.layers.0.mlp.up_proj"
    }
    with pytest.raises(PassError, match="no quantized layer is left to tune; check targets and ignore"):
        apply_tune(Tune(kind="tune", ignore=("Linear",)), before, context(texts(4)))


def test_refusals() -> None:
    before = in_two_bits(streamed(llama(layers=2)))
    with pytest.raises(PassError, match="tune: there is no calibration data; give the recipe a calibration set"):
        apply_tune(Tune(kind="tune"), before, context())


def test_what_only_makes_it_worse_is_not_kept_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ROUNDING_RATE", 10.0)
    eight = in_two_bits(streamed(llama(layers=2)), PRESETS["W8A16"].with_group(16))
    notes = apply_tune(Tune(kind="tune", steps=3), eight, context(texts(8))).notes
    assert any("led to nothing better than the start, which is kept" in note.text for note in notes)


def up(block: int) -> str:
    return f"model.layers.{block}.mlp.up_proj"


def facts(bits: float = 32.0, structured: bool = True) -> ModelFacts:
    layers = tuple(LayerFacts(up(i), "Linear", "MatMul", f"{up(i)}.weight", (8, 32), bits=bits) for i in range(2))
    structure = streamed(llama(layers=2)).structure if structured else None
    return ModelFacts("torch", "Net", "text-generation", (), (), layers, structure=structure)


def test_the_plan() -> None:
    target = TARGETS["onnxruntime-cpu"]
    plan = Tune(kind="tune").check(facts(5.0), target)
    assert not plan.problems and {d.action for d in plan.decisions} == {"tuned"}
    assert any("learned end to end" in note.text for note in plan.notes)
    plan = Tune(kind="tune", bits=3, group_size=32).check(facts(5.0), target)
    assert plan.problems == ("tune: an earlier pass has rounded the layers; leave bits, group_size out",)
    plan = Tune(kind="tune", scheme="W2A16").check(facts(5.0), target)
    assert plan.problems == ("tune: an earlier pass has rounded the layers; leave scheme out",)
    plan = Tune(kind="tune", targets=(up(1),)).check(facts(5.0), target)
    assert [d.action for d in plan.decisions] == ["kept", "tuned"]
    assert "no quantized layer is left" in Tune(kind="tune", ignore=("Linear",)).check(facts(5.0), target).problems[0]
    plan = Tune(kind="tune", blockwise=True).check(facts(), target)
    assert {d.action for d in plan.decisions} == {"w4"} and "(blockwise: true)" in plan.notes[-1].text
    assert "works on torch models" in Tune(kind="tune").check(facts(structured=False), target).problems[0]


def tune_both_ways() -> dict[bool, list[float]]:
    """Return the losses before and after, of tuning block by block or not."""
    before = in_two_bits(streamed(llama(layers=2)))
    found = {}
    for blockwise in (False, True):
        config = Tune(kind="tune", steps=5, block_steps=4, batch_size=3, blockwise=blockwise, held_out=0.3)
        result = apply_tune(config, before, context(texts(7)))
        digest = sum(float(result.model.store.read(name).double().abs().sum()) for name in result.model.store.names())
        assert len(set(gather_from_processes(digest))) == 1
        found[blockwise] = [result.measured[END]["start_loss"], result.measured[END]["end_loss"]]
    return found


@pytest.mark.slow
def test_two_processes_end_with_the_same_and_as_one_does() -> None:
    found, _ = run_in_two_processes(tune_both_ways)
    before = in_two_bits(streamed(llama(layers=2)))
    config = Tune(kind="tune", steps=5, batch_size=3, blockwise=False, held_out=0.3)
    alone = apply_tune(config, before, context(texts(7))).measured[END]
    assert found[False][0] == pytest.approx(alone["start_loss"], rel=1e-3)
    assert found[False][1] == pytest.approx(alone["end_loss"], rel=0.02)
    assert found[True][1] <= found[True][0]


def test_a_step_takes_so_many_samples_as_have_its_tokens() -> None:
    config = Tune(kind="tune")
    assert [config.find_batch_size(tokens) for tokens in (0, 20, 100, 200, 2048)] == [256, 13, 3, 1, 1]
    assert Tune(kind="tune", batch_size=8).find_batch_size(2048) == 8
    masked = {"input_ids": torch.zeros(1, 5, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    assert length(masked) == 3 and length({"pixels": torch.zeros(1, 3, 4, 4)}) == 48


def test_part_of_the_loss_is_the_texts_next_tokens() -> None:
    logits, other = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    rows, feeds = mask.bool(), {"input_ids": ids, "attention_mask": mask}
    teacher = FloatTeacher(lambda **feeds: (logits,), "kl", text_share=0.25)  # type: ignore[arg-type]
    halves = [{name: tensor[i : i + 1] for name, tensor in feeds.items()} for i in range(2)]
    (marked,) = arrange_batches([mark_next_tokens(half, "input_ids") for half in halves][::-1], 2)
    ids, mask, logits, other = (tensor.flip(0) for tensor in (ids, mask, logits, other))  # the shorter text is first
    rows = mask.bool()
    target = teacher.target(0, marked, rows)
    loss = divergence(other[rows], *target)
    apart = nn.functional.kl_div(other.log_softmax(-1), logits.log_softmax(-1), reduction="none", log_target=True).sum(
        -1
    )
    text = nn.functional.cross_entropy(other[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    followed = rows[:, :-1] & rows[:, 1:]
    alone = rows & ~nn.functional.pad(followed, (0, 1))  # the last token of a text
    wanted = 0.75 * apart[:, :-1][followed].sum() + 0.25 * text[followed].sum() + apart[alone].sum()
    assert loss.item() == pytest.approx(wanted.item() / 6, rel=1e-5)


def test_of_a_chat_the_assistants_tokens_alone_are_learned() -> None:
    """Two packed conversations: neither what the user says, nor what separates them, nor padding is a target."""
    ids = np.array([[5, 6, 7, 8, 9, 10, 11, 0, 0]])
    counted = np.array([0, 0, 1, 1, 0, 0, 1], bool)  # 7, 8 and, of the second conversation, 11
    sample = {"tokens": torch.from_numpy(ids), "attention_mask": torch.tensor([[1] * 7 + [0] * 2])}
    marked = mark_next_tokens(sample, "tokens", counted)
    assert marked[NEXT_TOKENS].tolist() == [[-1, 7, 8, -1, -1, 11, -1, -1, -1]]
    (batch,) = arrange_batches([marked], 1)
    probabilities = torch.full((7, 12), 1 / 12).log()
    seen: list[set[str]] = []

    def run(**feeds: Tensor) -> tuple[Tensor]:
        seen.append(set(feeds))
        return (probabilities[None],)

    target, _ = FloatTeacher(run, "kl", text_share=0.5).target(0, batch, batch["attention_mask"].bool())  # type: ignore[arg-type]
    assert seen == [{"tokens", "attention_mask"}], "the module is not called with what is learned from it"
    raised = (target > 0.5).nonzero().tolist()
    assert raised == [[1, 7], [2, 8], [5, 11]]
    assert torch.allclose(target[[0, 3, 4, 6]], torch.full((4, 12), 1 / 12)), "elsewhere the float model teaches alone"


@pytest.mark.parametrize("rows", [None, 8])
def test_tuning_on_chats_reads_the_mask_of_its_context(rows: int | None) -> None:
    """What the masks leave out of the texts changes nothing; the model's own name of its tokens is used."""
    before = in_two_bits(streamed(llama(layers=1)))
    config = Tune(steps=3, batch_size=2, blockwise=False, text_share=0.5, held_out=0.3)
    n_texts, masks = 4, [np.arange(12) >= 6] * 4

    def learn_from(**more: Any) -> dict[str, float]:
        return apply_tune(config, before, context(texts(n_texts, padded=False), rows=rows, **more)).measured[END]

    whole, chats, silent = learn_from(), learn_from(loss_masks=masks), [np.arange(12) < 1] * n_texts
    assert chats["start_loss"] != whole["start_loss"]
    with pytest.raises(PassError, match="text_share: the assistant says nothing"):
        learn_from(loss_masks=silent)
    renamed = replace(before, build=lambda: Renamed(before.build()), parameters={**before.parameters, "input_ids": "t"})
    named = apply_tune(config, renamed, context(texts(n_texts, padded=False), rows=rows, loss_masks=masks))
    assert named.measured[END]["start_loss"] == pytest.approx(chats["start_loss"], rel=1e-6)


class Renamed(nn.Module):
    """A language model whose forward has another name for its tokens."""

    output = "logits"

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped.wrapped

    def forward(self, t: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.wrapped(input_ids=t, attention_mask=attention_mask, return_dict=True).logits  # type: ignore[operator]
        return logits


def test_a_share_of_the_texts_needs_tokens() -> None:
    classifier = replace(facts(5.0), task="text-classification")
    assert "writes no text" in Tune(text_share=0.1).check(classifier, TARGETS["onnxruntime-cpu"]).problems[0]
