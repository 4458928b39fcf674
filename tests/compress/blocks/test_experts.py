"""Stacked experts made into layers: the same results, names and back."""

from __future__ import annotations

import architectures
import pytest
import torch
from torch import Tensor, nn

from compress.blocks.experts import (
    Experts,
    find_stacked_parts,
    first_expert_only,
    restack,
    unstack_experts,
)
from compress.blocks.folding import fold_scales
from compress.facts import InputGroup
from compress.structure.dataflow import record, spread_over_experts
from compress.structure.find import find_structure
from compress.structure.sources import n_inputs

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize("name", MIXTURES)
def test_unstacked_experts_compute_the_same(name: str) -> None:
    module = architectures.build(name)
    before = architectures.run(module, name)
    n_weights = sum(parameter.numel() for parameter in module.parameters())
    assert unstack_experts(module) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    torch.testing.assert_close(architectures.run(module, name), before, rtol=1e-12, atol=1e-12)
    assert sum(parameter.numel() for parameter in module.parameters()) == n_weights
    assert isinstance(module.get_submodule("model.layers.0.mlp.experts.3.down_proj"), nn.Linear)
    assert unstack_experts(module) == []


def test_dense_and_routed_are_the_same() -> None:
    module = architectures.build("mixtral")
    unstack_experts(module)
    experts = module.get_submodule("model.layers.0.mlp.experts")
    assert isinstance(experts, Experts)
    hidden, weights = torch.randn(6, 32).double(), torch.rand(6, 2).double()
    chosen = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0], [2, 1]])
    dense = experts._run_dense(experts.experts(), hidden, chosen, weights)
    torch.testing.assert_close(experts(hidden, chosen, weights), dense)
    torch.testing.assert_close(experts(hidden, top_k_index=chosen, top_k_weights=weights), dense)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_is_read_and_folds(name: str) -> None:
    module = architectures.build(name)
    unstack_experts(module)
    before = architectures.run(module, name)
    found = find_structure(module, architectures.feeds(name))
    experts = [f"model.layers.1.mlp.experts.{e}" for e in range(4)]
    assert found.blocks[1].experts == tuple(
        (f"{one}.gate_proj", f"{one}.up_proj", f"{one}.down_proj") for one in experts
    )
    for one in experts:
        assert InputGroup((f"{one}.gate_proj", f"{one}.up_proj")) in found.blocks[1].input_groups
        source = () if name == "gpt_oss" else (f"{one}.up_proj", "linear")
        assert InputGroup((f"{one}.down_proj",), *source) in found.blocks[1].input_groups
    for input_group in found.input_groups:
        if input_group.source and input_group.how != "value":
            scales = torch.rand(n_inputs(module.get_submodule(input_group.layers[0]))).double() + 0.3
            fold_scales(input_group, scales, module.get_submodule)
    torch.testing.assert_close(architectures.run(module, name), before, rtol=1e-12, atol=1e-12)


def test_on_meta_the_structure_is_the_same() -> None:
    module = architectures.build("qwen3_moe")
    stacked = architectures.build("qwen3_moe").to("meta")
    unstack_experts(module)
    unstack_experts(stacked)
    assert all(parameter.device.type == "meta" for parameter in stacked.parameters())
    feeds = architectures.feeds("qwen3_moe")
    assert find_structure(stacked, {k: v.to("meta") for k, v in feeds.items()}) == find_structure(module, feeds)


def test_experts_left_stacked_are_named() -> None:
    found = find_structure(architectures.build("mixtral"), architectures.feeds("mixtral"), compute=True)
    assert "model.layers.0.mlp.experts holds stacked experts, which are no layers" in found.notes[0]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_stacking_again_gives_the_same_tensors(name: str) -> None:
    module = architectures.build(name)
    path = "model.layers.0.mlp.experts"
    stacked = module.get_submodule(path)
    parts = find_stacked_parts(stacked, path)
    own = {f"{path}.{key}": value.clone() for key, value in stacked.named_parameters()}
    unstack_experts(module)
    state = dict(module.named_parameters())
    assert set(parts) == {key for key in state if key.startswith(f"{path}.")}
    again = restack(parts, lambda key: state[key].clone())
    assert set(again) == set(own)
    assert all(torch.equal(again[key], own[key]) for key in own)


def test_work_is_spread_over_experts() -> None:
    module = architectures.build("mixtral")
    unstack_experts(module)
    with first_expert_only():
        flow = record(module, architectures.feeds("mixtral"))
    found = spread_over_experts({"model.layers.0.mlp.experts.0.up_proj": (100, "MatMul")}, flow)
    assert found == {f"model.layers.0.mlp.experts.{e}.up_proj": (50, "MatMul") for e in range(4)}


class Routed(nn.Module):
    """A home-made mixture: a token goes to one expert, by its sign; the third never gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k, here in enumerate((x[:, 0] >= 0, x[:, 0] < 0)):
            out[here] = self.experts[k](x[here])
        return out


def test_an_expert_without_tokens_is_listed() -> None:
    found = find_structure(Routed(), {"x": torch.randn(8, 4)}, compute=True)
    (block,) = found.blocks
    assert block.experts == tuple((f"experts.{e}.0", f"experts.{e}.2") for e in range(3))
    assert [input_group.layers for input_group in block.input_groups] == [
        (f"experts.{e}.{k}",) for e in range(3) for k in (0, 2)
    ]
    assert block.input_groups[5] == InputGroup(("experts.2.2",), "experts.2.0", "linear")
