"""The `sparsify` pass on tiny transformers and convolutional networks: what it takes, refuses, says and leaves."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
import torch
from pydantic import ValidationError
from streaming import bert, context, gpt2, llama, streamed, texts
from torch import Tensor, nn

from compress.blocks.streamed import StreamedModel
from compress.context import PassResult
from compress.errors import SourceError
from compress.facts import LayerFacts, ModelFacts, Structure
from compress.formats.targets import TARGETS
from compress.models.open_streamed import open_streamed_module
from compress.passes import Awq, Hqq, Rtn
from compress.passes.sparsify import Sparsify
from compress.pruning.masks import choose_zeros
from compress.pruning.sparsity import Sparsity
from compress.structure.find import find_structure
from compress.work import apply_pass

METHODS = ("magnitude", "wanda", "sparsegpt")


pytestmark = pytest.mark.usefixtures("one_thread", "small_micro_batches")


class ConvNet(nn.Module):
    """float32 [N, 3, 8, 8] -> [N, 5]: plain, depthwise, strided and transposed convolutions, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(16, 5)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.down = nn.Conv2d(8, 16, 3, stride=2)
        self.up = nn.ConvTranspose2d(16, 16, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.depthwise(self.stem(image).relu()).relu()
        return self.tail(self.up(self.down(x).relu()).mean((2, 3)))


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return ConvNet().eval().requires_grad_(False)


def streamed_images(net: nn.Module) -> StreamedModel:
    structure = find_structure(copy.deepcopy(net).to("meta"), {"image": torch.zeros(2, 3, 8, 8, device="meta")})
    return open_streamed_module(copy.deepcopy(net), structure, {"image": "image"})


def images(n: int = 4) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"image": rng.normal(size=(6, 3, 8, 8)).astype(np.float32)} for _ in range(n)]


def run(model: StreamedModel, work: Path | None = None, batches: Any = None, **config: Any) -> PassResult:
    return apply_pass(Sparsify(**config), model, context(texts() if batches is None else batches, work))


def on_images(**config: Any) -> PassResult:
    return run(streamed_images(conv_net()), batches=images(), **config)


def weight(result: PassResult, layer: str) -> Tensor:
    return result.model.store.read(f"{layer}.weight")


def touched(result: PassResult) -> list[str]:
    return [one.layer for one in result.decisions if one.action == "sparse"]


def zeros(result: PassResult, layers: list[str]) -> float:
    weights = [weight(result, layer) for layer in layers]
    return sum(int((one == 0).sum()) for one in weights) / sum(one.numel() for one in weights)


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, bert, gpt2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("amount", [{"sparsity": 0.25}, {"pattern": "2:4"}], ids=str)
def test_every_product_of_the_blocks_becomes_sparse(make: Any, method: str, amount: dict[str, Any]) -> None:
    result = run(streamed(make()), method=method, **amount)
    layers = touched(result)
    assert len(layers) == {"llama": 14, "bert": 12, "gpt2": 8}[make.__name__]
    share = 0.5 if "pattern" in amount else 0.25
    for layer in layers:
        found = weight(result, layer)
        found = found.T if make is gpt2 else found  # Conv1D holds [in, out]
        assert result.measured[layer]["sparsity"] == pytest.approx(float((found == 0).float().mean()))
        assert (found == 0).float().mean() == pytest.approx(share, abs=0.01)
        if "pattern" in amount:
            assert ((found != 0).reshape(-1, 4).sum(1) == 2).all()
    assert not result.notes


def test_methods_are_ordered_in_what_they_lose() -> None:
    """Each layer against the inputs that its own run gives it, where those differ in size."""
    net = llama()
    for name, parameter in net.named_parameters():
        if "layernorm" in name:
            parameter.data = torch.linspace(0.2, 3, 32)
    columns = {}
    for method in METHODS[1:]:
        measured = run(streamed(net), method=method).measured
        told = [numbers for numbers in measured.values() if "sparsity" in numbers]
        assert len(told) == 14
        columns[method] = [np.array([one[key] for one in told]) for key in ("output_error", "output_error_magnitude")]
    assert (columns["sparsegpt"][0] < columns["sparsegpt"][1]).all()
    assert columns["wanda"][0].mean() < 0.9 * columns["wanda"][1].mean()
    assert columns["sparsegpt"][0].mean() < 0.9 * columns["wanda"][0].mean()


def test_errors_are_those_of_the_outputs() -> None:
    """The first block's first layers, whose inputs no pass has changed; inputs taken by a hook on the whole model."""
    net = llama()
    result = run(streamed(llama()), method="wanda")
    feeds, seen = streaming.together(texts()), list[Tensor]()
    layer = net.get_submodule("model.layers.0.self_attn.q_proj")
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        net(**feeds)
        x = seen[0][feeds["attention_mask"].bool()]
        before: Any = layer.weight
        change = before - weight(result, "model.layers.0.self_attn.q_proj")
        scores = before.abs() * x.square().sum(0).sqrt()
        assert torch.equal(change != 0, choose_zeros(scores[None], Sparsity(0.5), "row")[0])
        expected = (x @ change.T).square().sum() / (x @ before.T).square().sum()
    told = result.measured["model.layers.0.self_attn.q_proj"]
    assert told["output_error"] == pytest.approx(float(expected), rel=1e-4)


def test_the_last_override_wins_and_what_is_ignored_stays() -> None:
    overrides = [{"targets": ["Linear"], "sparsity": 0.75}, {"targets": ["re:.*mlp"], "pattern": "1:4"}]
    given = {"pattern": "2:4", "method": "wanda", "ignore": ["re:.*layers.0"], "overrides": overrides}
    result = apply_pass(Sparsify.model_validate_json(json.dumps(given)), streamed(llama()), context(texts()))
    how = {one.layer: (one.action, one.reason) for one in result.decisions}
    assert how["model.layers.0.self_attn.q_proj"] == ("kept", "ignore: re:.*layers.0")
    assert how["model.layers.1.self_attn.q_proj"] == ("sparse", "0.75 by wanda")
    assert how["model.layers.1.mlp.up_proj"] == ("sparse", "1:4 by wanda")
    assert torch.equal(
        weight(result, "model.layers.0.mlp.up_proj"), streamed(llama()).store.read("model.layers.0.mlp.up_proj.weight")
    )


def test_a_sparse_model_stays_as_it_is() -> None:
    """Zeros go first, and refitting what is not changed changes nothing."""
    once = run(streamed(llama()), method="magnitude", sparsity=0.5)
    twice = apply_pass(Sparsify(method="magnitude", sparsity=0.5), once.model, context())
    for name in once.model.store.names():
        assert torch.equal(once.model.store.read(name), twice.model.store.read(name))


def test_a_layer_that_no_row_reaches_goes_by_magnitude_and_is_named() -> None:
    def with_idle() -> nn.Module:
        net = llama(layers=2)
        net.get_submodule("model.layers.0.mlp").expert = nn.Linear(32, 16)
        return net

    name = "model.layers.0.mlp.expert"
    result = run(streamed(with_idle()))
    assert [note.text for note in result.notes] == [f"sparsify: {name}: no calibration data reaches it; by magnitude"]
    idle: Any = with_idle().get_submodule(name)
    gone = choose_zeros(idle.weight.detach().abs()[None], Sparsity(0.5), "layer")[0]
    assert torch.equal(weight(result, name), idle.weight.detach().masked_fill(gone, 0.0))


# --- convolutions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_convolutional_network(method: str) -> None:
    result = on_images(method=method, sparsity=0.5)
    assert sorted(touched(result)) == ["depthwise", "down", "stem", "tail"]
    for layer in touched(result):
        assert zeros(result, [layer]) == pytest.approx(0.5, abs=0.06)  # a row of 9 has no half
    kept = {one.layer: one.reason for one in result.decisions if one.action == "kept"}
    assert kept == {"up": "not a matrix product or convolution"}
    module = result.model.materialise()
    assert torch.isfinite(module(torch.from_numpy(images()[0]["image"]))).all()


def test_each_convolution_sees_what_the_sparse_ones_before_it_give() -> None:
    """The reference: the layers one after the other, each one's outputs on its inputs before and after."""
    result = on_images(sparsity=0.5)
    net, x = conv_net(), torch.from_numpy(np.concatenate([one["image"] for one in images()]))
    for name in ("stem", "depthwise", "down", "tail"):
        layer: Any = net.get_submodule(name)
        seen: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0]))
        net(x)
        handle.remove()
        dense = copy.deepcopy(layer)
        layer.weight.copy_(weight(result, name))
        bias = layer.bias.reshape(-1, *[1] * (seen[0].dim() - 2))
        before, after = dense(seen[0]) - bias, layer(seen[0]) - bias
        expected = (before - after).square().sum() / before.square().sum()
        told = result.measured[name]
        assert told["output_error"] == pytest.approx(float(expected), rel=1e-3)
        assert told["output_error"] < told["output_error_magnitude"]


def test_patterns_go_along_channels() -> None:
    result = on_images(pattern="2:4", targets=("down", "tail"))
    assert ((weight(result, "down") != 0).reshape(16, 2, 4, 9).sum(2) == 2).all()
    assert ((weight(result, "tail") != 0).reshape(5, 4, 4).sum(2) == 2).all()


# --- what later passes leave ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("later", [Rtn, Hqq, Awq], ids=lambda kind: kind.__name__)
@pytest.mark.slow
def test_zeros_stay_where_weights_are_rounded_one_by_one(later: Any, symmetric: bool) -> None:
    result = run(streamed(llama()), pattern="2:4")
    rounded = apply_pass(later(group_size=16, symmetric=symmetric), result.model, context(texts()))
    layers = touched(result)
    assert set(rounded.model.quantized_layers()) == set(layers)
    for layer in layers:
        assert (weight(rounded, layer)[weight(result, layer) == 0] == 0).all()


# --- streams ----------------------------------------------------------------------------------------------------------


def files(work: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(work.glob("*.safetensors"))}


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole = run(streamed(llama()), tmp_path / "whole")
    for done in (1, 2):

        def stopping(blocks: Sequence[Any], *about: object, done: int = done) -> Iterator[Any]:
            for block in blocks:
                if len(files(tmp_path / "broken")) == done:
                    raise KeyboardInterrupt
                yield block

        about = replace(context(texts(), tmp_path / "broken"), progress=stopping)
        with pytest.raises(KeyboardInterrupt):
            apply_pass(Sparsify(), streamed(llama()), about)
        assert len(files(tmp_path / "broken")) == done
    result = run(streamed(llama()), tmp_path / "broken")
    assert files(tmp_path / "broken") == files(tmp_path / "whole") and len(files(tmp_path / "whole")) > 2
    assert result.decisions == whole.decisions


# --- the plan ---------------------------------------------------------------------------------------------------------


def facts(*layers: LayerFacts, structure: Structure | None = None) -> ModelFacts:
    return ModelFacts("torch", "Net", "text-generation", (), (), layers, structure=structure)


LINEAR = LayerFacts("fc", "Linear", "MatMul", "fc.weight", (8, 6))
CONV = LayerFacts("conv", "Conv2d", "Conv", "conv.weight", (16, 3, 3, 3))
TABLE = LayerFacts("table", "Embedding", "Gather", "table.weight", (64, 8))


def problems(*layers: LayerFacts, **config: Any) -> list[str]:
    return list(Sparsify(**config).check(facts(*layers), TARGETS["onnxruntime-cpu"]).problems)


def test_the_plan_says_what_each_layer_gets_and_changes_no_size() -> None:
    plan = Sparsify(sparsity=0.5).check(facts(LINEAR, CONV, TABLE), TARGETS["onnxruntime-cpu"])
    assert [(one.layer, one.action, one.reason) for one in plan.decisions] == [
        ("fc", "sparse", "0.5 by sparsegpt"),
        ("conv", "sparse", "0.5 by sparsegpt"),
        ("table", "kept", "not a matrix product or convolution"),
    ]
    assert [layer.name for layer in plan.facts.layers if layer.sparse] == ["fc", "conv"]
    assert plan.problems == () and plan.facts.n_bytes == facts(LINEAR, CONV, TABLE).n_bytes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("config", [{"pattern": "2:4"}, {"sparsity": 0.5}, {"pattern": "1:4"}], ids=str)
def test_the_plan_says_what_the_target_gains(target: str, config: dict[str, Any]) -> None:
    wide = replace(LINEAR, shape=(8, 8))
    (note,) = Sparsify(**config).check(facts(wide), TARGETS[target]).notes
    gains = target == "tensorrt" and config == {"pattern": "2:4"}
    assert note.level == "info" and note.text.startswith(
        f"{target}: {config.get('pattern', 'unstructured')} sparsity: "
    )
    assert ("no faster and no smaller" in note.text) != gains and ("sparse tensor cores" in note.text) == gains


def test_layers_where_no_inputs_are_gathered_stay_dense() -> None:
    structure = find_structure(copy.deepcopy(llama()).to("meta"), streaming.probe())
    outside = facts(replace(CONV, name="patches"), replace(LINEAR, name="head"), structure=structure)
    kept = {one.layer: one.reason for one in Sparsify().check(outside, TARGETS["openvino"]).decisions}
    assert kept == {
        "patches": "outside the blocks, where no inputs are gathered; magnitude takes it",
        "head": "no forward pass calls it",
    }
    assert not Sparsify(method="magnitude").check(outside, TARGETS["openvino"]).problems


def test_a_pattern_that_does_not_divide_is_refused() -> None:
    assert problems(LINEAR, CONV, pattern="2:4") == [
        "sparsify: fc has 6 inputs, which 2:4 does not divide into groups of 4; ignore it, or give it a sparsity under "
        "overrides",
        "sparsify: conv has 3 input channels, which 2:4 does not divide into groups of 4; ignore it, or give it a "
        "sparsity under overrides",
    ]


def test_a_share_that_leaves_nothing_is_refused() -> None:
    assert problems(LINEAR, method="wanda", sparsity=0.95) == [
        "sparsify: fc: sparsity 0.95 leaves none of the 6 weights of each output; take less"
    ]
    assert problems(LINEAR, sparsity=0.999) == [
        "sparsify: fc: sparsity 0.999 leaves none of the 48 weights of the layer; take less"
    ]


def test_an_empty_selection_is_refused() -> None:
    assert problems(TABLE) == ["sparsify: no layer is left to make sparse"]
    assert problems(replace(LINEAR, bits=4.5)) == [
        "sparsify: no layer is left to make sparse; fc is rounded already: put sparsify before that"
    ]
    assert problems(LINEAR, targets=("fc1",))[0] == "sparsify: targets: 'fc1' matches no layer (this model has fc, ...)"


def test_a_weight_that_an_untouched_layer_shares_is_refused() -> None:
    head = LayerFacts("lm_head", "Linear", "MatMul", "table.weight", (64, 8))
    assert problems(TABLE, LINEAR, head) == []
    assert problems(TABLE, LINEAR, head, ignore=()) == [
        "sparsify: lm_head shares its weight with table, which keeps its own; ignore lm_head"
    ]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"sparsity": 0.0}, "greater than 0"),
        ({"sparsity": 1.0}, "less than 1"),
        ({"sparsity": float("nan")}, "finite number"),
        ({"sparsity": 0.5, "pattern": "2:4"}, "pattern 2:4 says how many weights stay; leave sparsity or pattern out"),
        ({"pattern": "4:2"}, "'4:2' is no pattern: N:M keeps N of each M inputs"),
    ],
    ids=str,
)
def test_knobs_that_cannot_be_meant_are_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Sparsify(**config)


@pytest.mark.parametrize("method", METHODS[1:])
def test_inputs_that_are_not_finite_cost_their_layer_and_weights_stop_it(method: str) -> None:
    batches = images()
    batches[1]["image"][0, 0, 0, 0] = np.nan
    told = [note.text for note in run(streamed_images(conv_net()), batches=batches, method=method).notes]
    assert "sparsify: stem: NaN or Inf among its inputs on the calibration data; by magnitude" in told
    net: Any = conv_net()
    net.down.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(SourceError, match=r"NaN or infinity in 'down\.weight'"):
        run(streamed_images(net), batches=images(), method=method)
