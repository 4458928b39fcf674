"""`qat` for weights alone: what is simulated is what is stored, training wins back what rounding costs, refusals."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from distilling import Arrays, Interrupted, broken_off
from streaming import context, gpt2, llama, texts
from test_distill_pass import FACTS, LAYERS, TARGET, TOKENS, options, text_model, token_set
from torch import Tensor, nn

from compress.blocks.rounded import Rounded, read_rounded, with_rounded, write_rounded
from compress.blocks.streamed import StreamedModel
from compress.context import PassResult
from compress.distill import train as loop
from compress.distill.attention import use_fused_attention
from compress.distill.objective import next_token_term
from compress.distill.watch import Seen
from compress.errors import ExportError, PassError
from compress.export.decoder import export_decoder
from compress.export.onnx import finish, with_rounded_layers
from compress.facts import LayerFacts
from compress.formats.schemes import PRESETS, WeightScheme
from compress.graph.layers import find_layers
from compress.graph.run import clone, open_session
from compress.models.load import TorchModel
from compress.models.open_streamed import open_streamed_module
from compress.passes.gptq import Gptq
from compress.passes.qat import Qat
from compress.passes.training import LabelsTerm
from compress.passes.tune import Tune
from compress.rounding.fake import ScaledWeight
from compress.rounding.grid import round_to_grid
from compress.rounding.qdq import write_state
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import GraphState
from compress.structure.find import find_structure
from compress.work import apply_pass
from compress.work.qat_weights import _round_layers, rounding
from compress.work.training import batches_of
from runtime.progress import Progress, no_progress

LM = replace(FACTS, task="text-generation", inputs=TOKENS)


pytestmark = pytest.mark.usefixtures("one_thread")


def peaked(net: nn.Module) -> nn.Module:
    """With logits that differ, so that rounding costs something."""
    with torch.no_grad():
        net.lm_head.weight *= 20  # type: ignore[union-attr, operator]
    return net


def model(net: nn.Module | None = None) -> TorchModel:
    return text_model(peaked(llama(layers=2)) if net is None else net)


def small(**more: Any) -> Qat:
    common = {
        "scheme": "W2A16",
        "group_size": 16,
        "steps": 12,
        "batch_size": 8,
        "held_out": 0.25,
    }
    return Qat(**{**common, **more})


def qat(
    loaded: TorchModel,
    config: Qat,
    trainset: Arrays | None = None,
    work: Path | None = None,
    progress: Progress = no_progress,
) -> PassResult:
    teacher = copy.deepcopy(loaded)
    given = options(trainset or token_set(32), lambda: copy.deepcopy(teacher), work)
    return apply_pass(config, loaded, replace(given, progress=progress))


def logits(loaded: TorchModel, n: int = 4) -> Tensor:
    feeds = {name: torch.from_numpy(values) for name, values in token_set(n).columns.items()}
    with torch.no_grad():
        return loaded.module(**feeds)


@pytest.mark.parametrize("scheme", ["W2A16", "W3A16", "W4A16_ASYM", "W8A16"])
def test_what_is_simulated_is_what_the_integers_stand_for(scheme: str) -> None:
    """To the last bit, whatever was learned; number by number, as DequantizeLinear reads them."""
    loaded = model()
    module = loaded.module
    begun, _ = _round_layers(small(scheme=scheme), module, options(None, None))
    torch.manual_seed(0)
    for one in begun.weights.values():
        with torch.no_grad():
            one.position.add_(torch.randn_like(one.position))
            one.growth.add_(0.2 * torch.randn_like(one.growth))
        one.confine()
        simulated, stored = one().detach(), one.freeze()
        assert torch.equal(simulated, torch.from_numpy(stored.dequantize()))
        low, high = PRESETS[scheme].weights.integer_range
        assert low <= stored.values.min() <= stored.values.max() <= high
    zeros = 0 if stored.zero_points is None else int(stored.zero_points[3, 1])
    alone = np.float32(int(stored.values[3, 17]) - zeros) * np.float32(stored.scales[3, 1])
    assert float(simulated[3, 17]) == float(alone)


@pytest.mark.parametrize("scheme", [WeightScheme(2, 8), WeightScheme(4, 8, symmetric=False)], ids=str)
def test_gradients_are_those_of_lsq(scheme: WeightScheme) -> None:
    """Inside the range a weight gets the gradient of its rounded value, outside none; the scale's is equation 3."""
    torch.manual_seed(0)
    weight, upstream = 1.5 * torch.randn(6, 32), torch.randn(6, 32)
    start = round_to_grid(weight, scheme)
    found = ScaledWeight(start, weight)
    assert np.array_equal(found.freeze().values, start.values)  # where training begins
    with torch.no_grad():
        found.growth.uniform_(-0.3, 0.3)
    (found() * upstream).sum().backward()
    begun = torch.from_numpy(start.scales).repeat_interleave(8, 1)
    scales = begun * (1 + found.growth.detach().repeat_interleave(8, 1))
    zeros = torch.zeros(()) if found.zeros is None else found.zeros.repeat_interleave(8, 1)
    level = (weight / scales).round() + zeros
    inside = (level >= found.low) & (level <= found.high)
    assert 0.5 < inside.float().mean() < 1
    assert found.position.grad is not None and found.growth.grad is not None
    torch.testing.assert_close(found.position.grad.reshape(6, 32), upstream * inside * begun)
    slope = level.clamp(found.low, found.high) - zeros - torch.where(inside, weight / scales, 0.0)
    torch.testing.assert_close(found.growth.grad, (upstream * slope * begun).reshape(6, -1, 8).sum(2))


def test_training_wins_back_and_leaves_exactly_what_it_simulated() -> None:
    loaded = model()
    before, float_head = logits(loaded), loaded.module.wrapped.lm_head.weight.clone()  # type: ignore[union-attr]
    result = qat(loaded, small(steps=40))
    numbers = result.measured["qat"]
    assert numbers["loss_after"] < 0.7 * numbers["loss_before"]
    modules = dict(result.model.module.wrapped.named_modules())
    assert set(result.model.rounded) == {name for name, part in modules.items() if _is_taken(name, part)}
    for name, one in result.model.rounded.items():
        assert torch.equal(modules[name].weight, torch.from_numpy(one.weight.dequantize()))
        assert one.scheme.name == "W2A16" and one.weight.group_size == 16 and one.weight.bits == 2
        assert len(np.unique(one.weight.values)) <= 4
        assert result.measured[name]["changed"] > 0
    assert not torch.equal(modules["lm_head"].weight, float_head)  # what stays float is trained, too
    assert not torch.equal(logits(result.model), before)
    actions = {decision.layer: decision.action for decision in result.decisions}
    assert actions["model.layers.0.mlp.up_proj"] == "w2" and actions["lm_head"] == "kept"


def _is_taken(name: str, part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) and name != "lm_head"


def test_the_loss_held_out_is_that_of_the_model_that_is_left() -> None:
    """Simulated and stored are one: to the last bit, so is the loss, where attention is computed alike."""
    loaded, trainset = model(), token_set(32)
    config = small(labels=LabelsTerm(), held_out=0.25)
    result = qat(loaded, config, trainset)
    rows = loop.split_rows(trainset.n, 0.25, 0)[1]
    batch = batches_of(config, trainset, loaded)(rows, None)
    assert len(rows) == config.batch_size
    with torch.no_grad(), use_fused_attention(loaded.module):
        seen = Seen({"logits": loaded.module(**batch.feeds)})
        loss = (next_token_term(batch, seen, seen) * batch.weights).sum() / batch.weights.sum()
    assert float(loss) == result.measured["qat"]["loss_after"]


def test_attention_is_fused_while_training_alone() -> None:
    """The same to rounding; afterwards as it was."""
    one, other = text_model(llama()), text_model(gpt2())
    expected = [logits(one), logits(other)]
    with use_fused_attention(one.module, other.module):  # type: ignore[arg-type]
        assert [config_of(model)._attn_implementation for model in (one, other)] == ["sdpa", "sdpa"]
        for model, before in zip((one, other), expected, strict=True):
            torch.testing.assert_close(logits(model), before)
    assert [config_of(model)._attn_implementation for model in (one, other)] == ["eager", "eager"]
    with use_fused_attention(nn.Linear(2, 2)):
        pass


def config_of(loaded: TorchModel) -> Any:
    return loaded.module.wrapped.config  # type: ignore[union-attr]


def test_without_a_teacher_labels_are_learned() -> None:
    result = apply_pass(small(labels=LabelsTerm(), steps=20), model(), options(token_set(32), None))
    assert result.measured["qat"]["loss_after"] < result.measured["qat"]["loss_before"]


def test_conv1d_holds_its_weight_the_other_way_round() -> None:
    result = qat(text_model(gpt2()), small(steps=2, group_size=8))
    modules = dict(result.model.module.wrapped.named_modules())
    name = "transformer.h.0.mlp.c_fc"
    assert result.model.rounded[name].weight.values.shape == (128, 32)
    stands_for = torch.from_numpy(result.model.rounded[name].weight.dequantize())
    assert torch.equal(modules[name].weight, stands_for.t())


def test_zeros_of_a_sparse_model_stay() -> None:
    loaded = model()
    layer = loaded.module.wrapped.model.layers[0].mlp.up_proj  # type: ignore[union-attr]
    zero_mask = torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    layer.weight.masked_fill_(zero_mask, 0.0)
    result = qat(loaded, small(scheme="W4A16_ASYM", steps=6))
    weight = result.model.rounded["model.layers.0.mlp.up_proj"].weight
    assert (weight.dequantize()[zero_mask.numpy()] == 0).all() and (weight.dequantize()[~zero_mask.numpy()] != 0).any()


def test_few_zeros_stay_too_and_an_average_is_saved(tmp_path: Path) -> None:
    loaded = text_model(gpt2())
    layer = loaded.module.wrapped.transformer.h[0].mlp.c_fc  # type: ignore[union-attr]
    layer.weight[::16, ::8] = 0.0  # less than 5 %
    zero_mask = (layer.weight == 0).t().numpy()
    result = qat(loaded, small(steps=2, group_size=8, ema_decay=0.9), work=tmp_path)
    weight = result.model.rounded["transformer.h.0.mlp.c_fc"].weight.dequantize()
    assert 0 < zero_mask.mean() < 0.05 and (weight[zero_mask] == 0).all()


def test_a_forward_pass_that_fails_leaves_the_weights_in_place() -> None:
    loaded = model()
    module = loaded.module
    begun, _ = _round_layers(small(), module, options(None, None))
    with rounding(module, begun), pytest.raises(ValueError, match="specify exactly one"):
        module.wrapped()  # type: ignore[operator]
    with rounding(module, begun), pytest.raises(TypeError):
        module(nothing=1)
    assert all(isinstance(layer.weight, nn.Parameter) for layer in begun.layers.values())


@pytest.mark.usefixtures("saved_after_every_step")
def test_killed_and_run_again_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    config = small(steps=7)
    whole = qat(model(), config, work=tmp_path / "whole").model
    with pytest.raises(Interrupted):
        qat(model(), config, work=tmp_path / "broken", progress=broken_off(4))
    again = qat(model(), config, work=tmp_path / "broken").model
    assert _bytes(whole.rounded) == _bytes(again.rounded)
    pairs = zip(whole.module.state_dict().values(), again.module.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def _bytes(layers: dict[str, Rounded]) -> dict[str, tuple[bytes, bytes]]:
    return {name: (one.weight.values.tobytes(), one.weight.scales.tobytes()) for name, one in layers.items()}


@pytest.fixture(scope="module")
def trained() -> TorchModel:
    """A model in 4 bits, unsigned in one layer."""
    override = {"targets": ("model.layers.0.mlp.down_proj",), "symmetric": False}
    loaded = model(peaked(llama(layers=2, intermediate_size=64)))
    config = Qat.model_validate({"group_size": 32, "steps": 3, "batch_size": 8, "overrides": (override,)})
    return qat(loaded, config).model


@pytest.fixture(scope="module")
def graph(trained: TorchModel) -> ir.Model:
    """Its float graph. Not to be changed."""
    return export_decoder(trained.module.wrapped, 21)  # type: ignore[union-attr, arg-type]


def test_integers_are_kept_as_they_are(trained: TorchModel, tmp_path: Path) -> None:
    write_rounded(tmp_path, trained.rounded)
    found = read_rounded(tmp_path)
    assert found.keys() == trained.rounded.keys()
    for name, one in found.items():
        _same(one.weight, trained.rounded[name].weight)
        assert one.scheme == trained.rounded[name].scheme


def _same(one: QuantizedWeight, other: QuantizedWeight) -> None:
    assert np.array_equal(one.values, other.values) and one.values.dtype == other.values.dtype
    assert np.array_equal(one.scales, other.scales) and (one.bits, one.group_size) == (other.bits, other.group_size)
    assert (one.zero_points is None) == (other.zero_points is None)
    assert one.zero_points is None or np.array_equal(one.zero_points, other.zero_points)


def taken_up(trained: TorchModel) -> StreamedModel:
    """A stream of a copy of the module, with the integers."""
    module = copy.deepcopy(trained.module)
    feeds = {name: torch.from_numpy(values) for name, values in token_set(2).columns.items()}
    streamed = open_streamed_module(module, find_structure(module, feeds, compute=True), trained.parameters)
    return with_rounded(streamed, trained.rounded)


def test_a_stream_takes_the_integers_up(trained: TorchModel) -> None:
    found = taken_up(trained)
    assert set(found.quantized_layers()) == set(trained.rounded)
    for name, one in trained.rounded.items():
        stored = found.store.quantized(name)
        assert stored is one.weight and found.schemes[name] == one.scheme
        assert found.store.shape(f"{name}.weight") == one.weight.values.shape
    whole, left = (dict(one.named_parameters()) for one in (found.materialise(), trained.module))
    assert whole.keys() == left.keys() and all(torch.equal(whole[name], left[name]) for name in left)


def test_passes_over_blocks_go_on_from_the_integers(trained: TorchModel) -> None:
    """Tuning that changes nothing hands them on as they are, and nothing is left for gptq."""
    before = taken_up(trained)
    after = apply_pass(Tune(steps=0), before, context(texts())).model
    for name, one in trained.rounded.items():
        _same(after.store.quantized(name), one.weight)
    left = apply_pass(Gptq(group_size=32), before, context(texts())).model
    assert all(left.store.quantized(name) is one.weight for name, one in trained.rounded.items())


@pytest.mark.slow
def test_the_graph_holds_the_integers_and_gives_what_training_gave(trained: TorchModel, graph: ir.Model) -> None:
    state = with_rounded_layers(GraphState(clone(graph)), trained.rounded)
    layers = {layer.name: layer.matrix() for layer in find_layers(state.model)}
    for name, one in trained.rounded.items():
        assert np.array_equal(layers[name], one.weight.dequantize())  # the float graph has what was simulated
    _find_all(trained.rounded, write_state(state, "u8s8"))
    finished, _ = finish(state, TARGET)
    session = open_session(finished, optimize=False)  # a fused kernel rounds its inputs to 8 bits
    feeds = token_set(1).feeds(np.arange(1))
    got = session.run(["logits"], _decoder_feeds(session, feeds))[0]
    expected = logits(trained, 1).numpy()[:, : got.shape[1]]
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()  # sums alone differ


def _find_all(layers: Any, written: ir.Model) -> None:
    """Every layer's integers and scales stand before its product, [in, out] and [groups, out], bit for bit."""
    found = {}
    for node in written.graph:
        if node.op_type == "DequantizeLinear" and node.attributes["block_size"].as_int() == 32:
            arrays = [value.const_value.numpy() for value in node.inputs if value is not None and value.const_value]
            found[arrays[1].tobytes()] = arrays
    assert len(found) == len(layers)
    for one in layers.values():
        values, scales, *zeros = found[np.ascontiguousarray(one.weight.scales.T).tobytes()]
        assert np.array_equal(values.astype(np.int64), one.weight.values.T) and scales.dtype == np.float32
        if one.weight.zero_points is not None:
            assert np.array_equal(zeros[0].astype(np.int64), one.weight.zero_points.T)


def _decoder_feeds(session: Any, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With an empty cache."""
    found = {}
    for one in session.get_inputs():
        shape = [1 if size == "batch" else 0 if isinstance(size, str) else size for size in one.shape]
        found[one.name] = feeds[one.name] if one.name in feeds else np.zeros(shape, np.float32)
    return found


@pytest.mark.slow
def test_a_layer_that_the_graph_lacks_is_named(trained: TorchModel, graph: ir.Model) -> None:
    lost = {"model.layers.9.mlp": trained.rounded["model.layers.0.mlp.up_proj"]}
    with pytest.raises(ExportError, match=r"model\.layers\.9\.mlp: is rounded, but not a layer of the exported graph"):
        with_rounded_layers(GraphState(graph), lost)


def test_what_is_wrong_is_said_by_the_plan() -> None:
    def problems(config: Qat, layers: tuple[LayerFacts, ...] = LAYERS, **more: Any) -> tuple[str, ...]:
        return config.check(replace(LM, layers=layers, **more), TARGET).problems

    w4 = Qat(group_size=8, ignore=())
    assert "has 4-bit kernels for group_size" not in " ".join(problems(w4))
    assert problems(w4) == ()
    assert problems(w4, (replace(LAYERS[0], bits=4), *LAYERS[1:])) == (
        "qat: body.0.fc is in 4 bits already, and qat rounds by itself; put it before the pass that rounds, or leave "
        "that one out",
    )
    tied = replace(LAYERS[2], weight="body.0.fc.weight")
    assert "qat: head and body.0.fc share one weight; ignore head" in problems(w4, (*LAYERS[:2], tied))
    assert problems(w4, source="onnx")[0] == "qat: trains a torch model, and an onnx: source is none"
    assert problems(Qat(scheme="FP8"))[0].startswith("qat: FP8 cannot be trained for; give one scheme for weights")
    assert problems(Qat(group_size=8, ignore=(), placement="all"))[0].startswith("qat: placement: for scheme: W8A8")
    assert problems(Qat(group_size=8, ignore=(), optimizer="sgd")) == (
        "qat: weights alone are learned as positions between levels, by adamw and without weight_decay; leave both out",
    )
    assert problems(Qat(scheme="W8A8", group_size=32))[0] == "qat: W8A8 has no group_size; leave it out"
    alone = Qat(group_size=8, labels=LabelsTerm(), ignore=())
    assert problems(alone, task="feature-extraction") == (
        "qat: an embedding has neither logits nor classes; use output and hidden",
    )
    assert alone.train_problems("image-classification", 40, False)[0].startswith("qat: labels: the train")
    assert alone.train_problems("text-generation", 40, False) == []


def test_the_plan_says_what_becomes_of_the_layers() -> None:
    plan = Qat(scheme="W2A16", group_size=8, ignore=("head",)).check(LM, TARGET)
    assert [(one.layer, one.action) for one in plan.decisions] == [
        ("body.0.fc", "w2"), ("body.1.fc", "w2"), ("head", "kept"),
    ]  # fmt: skip
    assert plan.facts.layers[0].bits == 4 + 32 / 8, "groups of 8 are stored in 4 bits"
    assert plan.facts.layers[2].bits == 32
    assert set(plan.schemes) == {"body.0.fc", "body.1.fc"}
    assert plan.notes[0].text == "qat: learns by KL of the logits at temperature 1"
    alone = Qat(group_size=8, labels=LabelsTerm(weight=2.0), ignore=("head",)).check(LM, TARGET)
    assert alone.notes[0].text == "qat: learns by the next tokens"


def test_what_is_wrong_at_run_time() -> None:
    with pytest.raises(PassError, match=r"qat: there is no training set; give the recipe data\.train"):
        apply_pass(small(), model(), options(None, None))
    with pytest.raises(PassError, match="qat: there is no teacher: an onnx: source has no torch model"):
        apply_pass(small(), model(), options(token_set(), None))
    broken = model()
    broken.module.wrapped.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(PassError, match=r"qat: model\.layers\.1\.mlp\.up_proj: the weight holds NaN or Inf"):
        apply_pass(small(labels=LabelsTerm()), broken, options(token_set(), None))
    other = text_model(llama(vocab_size=80))
    with pytest.raises(PassError, match=r"qat: the student gives .*64\], the teacher .*80\]"):
        apply_pass(small(), model(), options(token_set(), lambda: other))
