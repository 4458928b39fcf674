"""Layers that no engine can exchange, and those that choose what runs, stay float; what stays is told by its share."""

from __future__ import annotations

from typing import Any

import graphs
import pytest
import streaming
import torch
from torch import Tensor, nn

from compress.blocks.layers import has_own_forward
from compress.facts import LayerFacts, ModelFacts
from compress.formats.targets import TARGETS
from compress.models.facts import _describe_layers
from compress.passes import Awq, Gptq, Int8, Rtn
from compress.structure.dataflow import count_work, record
from compress.structure.find import find_structure
from compress.work import apply_pass


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class Plain(nn.Linear):
    """No forward of its own."""


class Spelled(nn.Linear):
    """Falcon's: the same by another formula."""

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias


class Noisy(Spelled):
    """The same only while it is not trained."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (0.1 if self.training else 0)


class Pair(nn.Linear):
    """A router that gives a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return scores, scores.softmax(-1)


class Padded(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(nn.functional.pad(x, (0, 1, 0, 1)), weight, bias)


def test_a_subclass_is_told_by_what_it_computes() -> None:
    own = [Scaled(2, 2), Pair(2, 2), Padded(2, 2, 2), Noisy(2, 2)]
    spelled = [Spelled(2, 2), Spelled(2, 4, bias=False, device="meta")]
    others = [nn.Linear(2, 2), Plain(2, 2), nn.Embedding(2, 2), nn.ConvTranspose1d(2, 2, 1), *spelled]
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert [has_own_forward(layer) for layer in (*own, *others, normed)] == [True] * 4 + [False] * 7


def test_work_of_a_layer_that_gives_several_tensors_is_counted() -> None:
    wrapped = nn.Module()
    wrapped.pair = Pair(4, 6)
    wrapped.forward = lambda x: wrapped.pair(x)[1]  # type: ignore[method-assign]
    assert count_work(record(wrapped, {"x": torch.zeros(3, 4)})) == {"pair": (3 * 4 * 6, "Gemm")}


class Routed(nn.Module):
    """Two experts of which scores choose one; `how` the scores become choices."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.one, self.two = nn.Linear(32, 2, bias=False), nn.Linear(32, 32), nn.Linear(32, 32)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        if self.how == "softmax":
            scores = scores.float().softmax(-1)
        if self.how == "sigmoid":
            scores = scores.sigmoid() + torch.arange(2, device=x.device)
        weights, _ = scores.topk(1, dim=-1)
        return weights * self.one(x) + (1 - weights) * self.two(x)


@pytest.mark.parametrize("how", ["plain", "softmax", "sigmoid"])
def test_a_router_is_found_by_the_top_k_that_reads_it(how: str) -> None:
    structure = find_structure(Routed(how), {"x": torch.zeros(2, 8, 32)})
    assert structure.routers == ("gate",)


def spoil(net: Any) -> None:
    """A mixture without a family of its own in the first block, a subclass in the second."""
    for layer, block in enumerate(net.model.layers):
        block.mlp = Routed("softmax") if layer == 0 else block.mlp
    down = net.model.layers[1].mlp.down_proj
    net.model.layers[1].mlp.down_proj = Scaled(down.in_features, down.out_features, bias=False)


@pytest.mark.parametrize("config", [Gptq(group_size=16), Rtn(group_size=16), Awq(group_size=16, steps=2)], ids=str)
def test_both_stay_float_and_the_decision_says_why(config: Any) -> None:
    net = streaming.llama(layers=2)
    spoil(net)
    model = streaming.streamed(net)
    result = apply_pass(config, model, streaming.context(streaming.texts()))
    rounded = result.model.quantized_layers()
    router, own = "model.layers.0.mlp.gate", "model.layers.1.mlp.down_proj"
    assert router not in rounded and own not in rounded and "model.layers.0.mlp.one" in rounded
    decided = {decision.layer: decision.reason for decision in result.decisions}
    assert "(a router)" in decided[router] and "a forward of its own" in decided[own]


class Mixed(nn.Module):
    """A recurrent layer, a transposed convolution and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(16, 32, batch_first=True), nn.Linear(32, 4)
        self.up = nn.ConvTranspose1d(32, 32, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.up(self.rnn(x)[0].movedim(1, 2)).movedim(1, 2))


def test_what_stays_float_is_told_with_its_share_of_the_bytes() -> None:
    from compress.models.facts import _count_outside, count_other_bytes

    module = Mixed()
    layers = _describe_layers(module, count_work(record(module, {"x": torch.zeros(1, 8, 16)})))
    facts = ModelFacts("torch", "", "generic", (), (), layers, other_bytes=count_other_bytes(module, layers))
    facts = facts.keep_worth_naming(_count_outside(module))
    told = [note.text for note in Int8().check(facts, TARGETS["onnxruntime-cpu"]).notes]
    n_rnn, n_up = sum(p.numel() for p in module.rnn.parameters()), module.up.weight.numel()
    whole = sum(p.numel() for p in module.parameters())
    assert f"int8: {n_up / whole:.0%} of the weights' bytes stay float: up (ConvTranspose has no int8 form)" in told
    assert any(text.startswith(f"int8: {n_rnn / whole:.0%} of the weights' bytes stay float: rnn (") for text in told)


def test_small_parts_are_not_named() -> None:
    layers = (LayerFacts("a", "Linear", "MatMul", "a", (100, 100)), LayerFacts("b", "Odd", "Odd", "b", (2, 2)))
    facts = ModelFacts("onnx", "", "generic", (), (), layers).keep_worth_naming({"c": 4})
    told = [note.text for note in Int8().check(facts, TARGETS["onnxruntime-cpu"]).notes]
    assert not any("stay float" in text for text in told) and not facts.outside


def test_a_pass_that_reaches_little_names_the_one_that_reaches_the_rest() -> None:
    facts, target = graphs.facts_of(graphs.residual_cnn()), TARGETS["onnxruntime-cpu"]
    told = [note.text for note in Gptq(group_size=-1).check(facts, target).notes]
    share = facts.find_layer("fc").n_bytes / facts.n_bytes
    assert f"gptq reaches only layer fc ({share:.0%} of the weights): use int8, which takes stem, " in told[-1]
    assert not any("reaches" in note.text for note in Int8().check(facts, target).notes)
    assert not any("reaches" in note.text for note in Gptq().check(graphs.facts_of(graphs.one_layer()), target).notes)
