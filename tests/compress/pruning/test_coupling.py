"""What can be removed together, on architectures of every kind; removing it is not reading it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_strategies import small_nets
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    ViTConfig,
    ViTForImageClassification,
)

from compress.blocks.sizes import fit, shapes_of
from compress.errors import PassError
from compress.pruning.coupling import coupling_of, find_coupling
from compress.pruning.dimensions import Coupling, Dimension
from compress.pruning.surgery import differs_from_masked, remove
from compress.structure.dataflow import record
from compress.zoo.cifar_resnet import CifarResNet

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
EXACT = 1e-5


class FirstOutput(nn.Module):
    """A transformers model's first output."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, **feeds: Tensor) -> Tensor:
        return self.wrapped(**feeds)[0]


class Dense(nn.Module):
    """Concatenation, flattening into a Linear, grouped and depthwise convolution, squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grow = nn.Conv2d(8, 4, 3, padding=1)
        self.grouped = nn.Conv2d(12, 16, 3, padding=1, groups=4)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.squeeze, self.excite = nn.Linear(16, 6), nn.Linear(6, 16)
        self.mix = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        h = torch.cat([h, self.grow(h).relu()], dim=1)
        h = self.norm(self.depthwise(self.grouped(h).relu())).relu()
        gate = self.excite(self.squeeze(h.mean(dim=(2, 3))).relu()).sigmoid()
        h = self.mix(h * gate[:, :, None, None]).relu()
        return self.head(F.adaptive_avg_pool2d(h, 2).flatten(1))


class Fused(nn.Module):
    """One projection for queries, keys and values, split by numbers that the module holds; a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.embed_dim = 4, 32
        self.qkv, self.out = nn.Linear(24, 96), nn.Linear(32, 24)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(20, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            part.view(b, t, self.n_heads, 8).transpose(1, 2) for part in self.qkv(x).split(self.embed_dim, dim=2)
        )
        mixed = (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).reshape(b, t, self.embed_dim)
        x = x + self.out(mixed)
        a, gate = self.up(x).chunk(2, dim=-1)
        return x + self.down(a * gate.sigmoid())


IDS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: BertModel(BertConfig(vocab_size=60, **TINY)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=60, num_key_value_heads=2, **TINY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(vocab_size=60, num_key_value_heads=2, head_dim=8, **TINY)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=60, tie_word_embeddings=True, **TINY)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, bos_token_id=0, eos_token_id=0)
    ),
}
IMAGES: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **TINY)),
    "convnext": lambda: ConvNextForImageClassification(
        ConvNextConfig(image_size=16, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    ),
    "segformer": lambda: SegformerForSemanticSegmentation(
        SegformerConfig(
            num_encoder_blocks=2,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            num_attention_heads=[2, 4],
            sr_ratios=[2, 2],  # as many as heads, and not to be taken for them
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=32,
        )
    ),
}
OWN: dict[str, Callable[[], nn.Module]] = {"resnet": lambda: CifarResNet(2), "dense": Dense}


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with random weights, none of them zero, and two samples."""
    torch.manual_seed(0)
    if name in IDS:
        module, feeds = FirstOutput(IDS[name]()), {"input_ids": torch.randint(0, 60, (2, 8))}
    elif name in IMAGES:
        module, feeds = FirstOutput(IMAGES[name]()), {"pixel_values": torch.randn(2, 3, 16, 16)}
    elif name == "fused":
        module, feeds = Fused(), {"x": torch.randn(2, 6, 24)}
    else:
        module, feeds = OWN[name](), {"x": torch.randn(2, 3, 16, 16)}
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return module.eval().requires_grad_(False), feeds


def by_name(coupling: Coupling) -> dict[str, Dimension]:
    return {one.name: one for one in coupling.dimensions}


@pytest.mark.parametrize("name", [*IDS, *IMAGES, *OWN, "fused"])
def test_removing_units_is_not_reading_them(name: str) -> None:
    """Alone and all at once; norms see a width, so that there only shapes can be held against the masked model."""
    module, feeds = made(name)
    coupling = find_coupling(module, feeds)
    assert coupling.dimensions
    smaller = copy.deepcopy(module)
    for one in coupling.dimensions:
        difference = differs_from_masked(copy.deepcopy(module), one, np.array([one.n_units - 1]), feeds)
        assert difference < (np.inf if one.kind == "width" else EXACT), one.name
        remove(smaller, one, np.array([0]))
    n_before, n_after = (sum(p.numel() for p in m.parameters()) for m in (module, smaller))
    assert n_after < n_before
    assert smaller(**feeds).shape == module(**feeds).shape


@settings(max_examples=8)
@given(small_nets(), st.randoms(use_true_random=False))
def test_any_units_of_a_small_net_can_go_and_none_of_them_is_nothing(given: tuple[Any, Tensor], random: Random) -> None:
    module, x = given
    dimensions = find_coupling(module, {"x": x}).dimensions
    assert {one.name for one in dimensions} >= {f"first.{i}" for i in range(len(module.first))}
    before = module(x)
    for one in dimensions:
        remove(module, one, np.array([], np.int64))
        assert torch.equal(module(x), before)
    for one in dimensions:
        units = np.array(sorted(random.sample(range(one.n_units), random.randint(0, one.n_units - 1))), np.int64)
        assert differs_from_masked(module, one, units, {"x": x}) < EXACT, one.name


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2", "dense", "resnet", "fused"])
def test_a_shape_record_makes_a_fresh_module_take_the_smaller_weights(name: str) -> None:
    module, feeds = made(name)
    smaller, fresh = copy.deepcopy(module), copy.deepcopy(module)
    for one in find_coupling(module, feeds).dimensions:
        remove(smaller, one, np.array([1]))
    fit(fresh, shapes_of(smaller).since(shapes_of(module)))
    fresh.load_state_dict(smaller.state_dict())
    assert torch.equal(fresh(**feeds), smaller(**feeds))


def test_a_residual_network_with_padded_shortcuts() -> None:
    """Inner channels all; of the stream what the first stage writes, since padding adds a number fixed in the code."""
    module, feeds = made("resnet")
    coupling = find_coupling(module, feeds)
    dimensions = by_name(coupling)
    inner = [f"layer{s}.{i}.conv1" for s in (1, 2, 3) for i in (0, 1)]
    assert set(dimensions) == {"conv1", *inner}
    assert dimensions["conv1"].kind == "width" and dimensions["conv1"].n_units == 16
    assert all(dimensions[name].kind == "channels" for name in inner)
    assert (
        coupling.kept["layer2.0.conv2"] == "16 of 32 outputs: constant_pad_nd in layer2.0 adds a fixed number of them"
    )
    assert "linear" in coupling.kept


def test_grouped_queries_go_with_their_key_and_value() -> None:
    module, feeds = made("llama")
    heads = by_name(find_coupling(module, feeds))["model.layers.0.self_attn.q_proj"]
    assert heads.kind == "heads" and heads.n_units == 2
    assert heads.members["model.layers.0.self_attn.q_proj.weight", 0].shape == (2, 16)  # two heads of 8
    assert heads.members["model.layers.0.self_attn.k_proj.weight", 0].shape == (2, 8)
    assert heads.writers == tuple(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")
    assert heads.readers == ("model.layers.0.self_attn.o_proj",)


def test_what_counts_heads_is_put_right() -> None:
    module, feeds = made("bert")
    coupling = find_coupling(module, feeds)
    remove(module, by_name(coupling)["encoder.layer.0.attention.self.query"], np.array([0, 2]))
    attention = module.wrapped.encoder.layer[0].attention.self
    assert (attention.num_attention_heads, attention.all_head_size, attention.attention_head_size) == (2, 16, 8)
    assert module.wrapped.encoder.layer[1].attention.self.num_attention_heads == 4


def test_concatenation_groups_and_flattening() -> None:
    module, feeds = made("dense")
    dimensions = by_name(find_coupling(module, feeds))
    assert dimensions["grouped"].n_units == 4  # the same position of each of four groups
    assert dimensions["squeeze"].kind == "neurons"
    assert dimensions["mix"].members["head.weight", 1].shape == (8, 4)  # four pixels of each channel
    remove(module, dimensions["grouped"], np.array([1]))
    assert (module.grouped.groups, module.depthwise.groups, module.depthwise.in_channels) == (4, 12, 12)


def test_an_operator_without_a_rule_keeps_what_it_reads() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).sort(dim=-1).values)

    coupling = find_coupling(Odd(), {"x": torch.zeros(2, 6)})
    assert coupling.dimensions == ()
    assert coupling.kept["a"] == "sort has no rule"


def test_what_the_model_gives_stays() -> None:
    module, feeds = made("bert")
    coupling = find_coupling(module, feeds)
    assert all(one.kind != "width" for one in coupling.dimensions)
    assert coupling.kept["encoder.layer.1.output.dense"] == "the model's outputs have it"


def test_a_size_that_the_code_fixes_is_found_out() -> None:
    """Where the forward itself names a size, the smaller module does not run, and the difference says so."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).view(-1, 8))

    module, feeds = Fixed().requires_grad_(False), {"x": torch.ones(2, 6)}
    (one,) = coupling_of(record(module, feeds)).dimensions
    assert differs_from_masked(copy.deepcopy(module), one, np.array([0]), feeds) == np.inf
    settled = find_coupling(module, feeds)
    assert not settled.dimensions and settled.kept["a"] == "the model's code fixes this size"


class Reduced(nn.Module):
    """Reads tokens [N, T, width] through a convolution, its results laid out by the width of the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce, self.back = nn.LayerNorm(width), nn.Conv1d(width, width, 2, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        fewer = self.reduce(x.transpose(1, 2).reshape(n, width, t))
        return x + self.back(self.norm(fewer.reshape(n, width, -1).transpose(1, 2))).mean(1, keepdim=True)


class Tied(nn.Module):
    """Two streams of one width, each with two such blocks, and between them a size that is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.fixed, self.b, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.first, self.second = (nn.Sequential(Reduced(8), Reduced(8)) for _ in range(2))
        self.free = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fixed(self.first(self.a(x))).view(-1, 4, 8)
        return self.head(self.free(self.second(self.b(x))))


@pytest.mark.parametrize("compute", [False, True])
def test_sizes_that_the_code_reads_from_one_tensor_and_uses_for_another_are_tied(compute: bool) -> None:
    module, feeds = Tied().requires_grad_(False), {"x": torch.randn(2, 4, 6)}
    coupling = find_coupling(module, feeds, compute)
    assert {one.name: set(one.writers) for one in coupling.dimensions} == {
        "a": {"a", "first.0.reduce", "first.0.back", "first.1.reduce", "first.1.back"},
        "b": {"b", "second.0.reduce", "second.0.back", "second.1.reduce", "second.1.back"},
        "free": {"free"},
    }
    assert coupling.kept["fixed"] == "the model's code fixes this size"
    assert [facts.name for facts in coupling.facts] == [one.name for one in coupling.dimensions]
    for one in coupling.dimensions:
        difference = differs_from_masked(copy.deepcopy(module), one, np.array([0, 3]), feeds)
        assert difference < (np.inf if one.kind == "width" else EXACT), one.name


def test_removing_everything_is_refused() -> None:
    module, feeds = made("resnet")
    one = find_coupling(module, feeds).dimensions[1]
    with pytest.raises(PassError, match=r"layer1\.0\.conv1: all 16 channels would go; leave at least one"):
        remove(module, one, np.arange(16))
