"""Shapes that real networks have, through the whole pass: what it leaves runs, and is as wide as was asked."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from streaming import model_context
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from compress.blocks.sizes import shapes_of
from compress.models.load import TorchModel
from compress.passes import PruneChannels
from compress.pruning.configuration import fit_config
from compress.pruning.costs import macs_cost
from compress.pruning.coupling import find_coupling
from compress.pruning.importance import draw_label_loss, gradient_scores
from compress.pruning.statistics import MAX_FEATURES
from compress.pruning.surgery import differs_from_masked, remove
from compress.work import apply_pass
from compress.work.prune_batches import rows_within
from runtime.bundle.tensors import TensorSpec

EXACT = 1e-5


class Net(nn.Module):
    """Parts by name, and a forward of them."""

    def __init__(self, forward: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def made(forward: Any, **parts: nn.Module) -> Net:
    torch.manual_seed(0)
    for part in parts.values():
        for one in part.modules():
            if hasattr(one, "reset_parameters"):
                one.reset_parameters()
    return Net(forward, **parts).eval().requires_grad_(False)


def pruned(module: nn.Module, x: np.ndarray, **config: Any) -> Any:
    inputs = (TensorSpec("x", "float32", ("batch", *x.shape[1:])),)
    loaded = TorchModel(
        architecture="Net", inputs=inputs, outputs=(), module=module, parameters={"x": "x"}, task="generic"
    )
    batches = [{"x": part} for part in np.split(x, 4)]
    return apply_pass(PruneChannels(**{"ratio": 0.5, "round_to": 1} | config), loaded, model_context(batches=batches))


def images(n: int = 64, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, channels, 8, 8)).astype(np.float32)


def rows(n: int = 256, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, width)).astype(np.float32)


def test_two_layers_side_by_side() -> None:
    """Two dimensions share the axis that reads them."""
    net = made(
        lambda m, x: m.head(torch.cat([m.a(x), m.b(x)], 1).relu()).mean((2, 3)),
        a=nn.Conv2d(3, 16, 3),
        b=nn.Conv2d(3, 16, 3),
        head=nn.Conv2d(32, 4, 1),
    )
    pruned(net, images())
    assert (net.a.out_channels, net.b.out_channels, net.head.in_channels) == (8, 8, 16)  # type: ignore[union-attr]


def test_activations_in_place() -> None:
    net = made(
        lambda m, x: m.second(m.act(m.norm(m.first(x)))).mean((2, 3)),
        first=nn.Conv2d(3, 16, 3),
        norm=nn.BatchNorm2d(16),
        act=nn.ReLU(inplace=True),
        second=nn.Conv2d(16, 4, 3),
    )
    result = pruned(net, images(), importance="obs")
    assert net.first.out_channels == 8 and result.measured  # type: ignore[union-attr]


@pytest.mark.parametrize("constants", [[1.7, 2.9], [3.3, 5.6, 40.0]])
def test_features_that_never_vary_are_worth_nothing(constants: list[float]) -> None:
    net = made(
        lambda m, x: m.second(m.norm(m.first(x)).relu()),
        first=nn.Linear(16, 32),
        norm=nn.BatchNorm1d(32),
        second=nn.Linear(32, 4),
    )
    dead = len(constants)
    net.norm.weight[:dead] = 0.0  # type: ignore[union-attr,index]
    net.norm.bias[:dead] = torch.tensor(constants)  # type: ignore[union-attr,index]
    x = rows()
    before = net(torch.from_numpy(x))
    pruned(net, x, ratio=dead / 32)
    assert net.norm.num_features == 32 - dead  # type: ignore[union-attr]
    assert float((net(torch.from_numpy(x)) - before).abs().max()) < 1e-3  # a bias makes up for them


@pytest.mark.parametrize(
    "said",
    [
        lambda h: F.normalize(h, dim=-1),
        lambda h: h / torch.linalg.vector_norm(h, 2, -1, keepdim=True),
        lambda h: h / h.std(-1, keepdim=True),
        lambda h: h / h.var(dim=-1, unbiased=False, keepdim=True),
        lambda h: h - h.max(-1, keepdim=True)[0],
    ],
)
def test_norms_along_an_axis(said: Any) -> None:
    net = made(lambda m, x: m.b(m.a(said(x)).relu()), a=nn.Linear(16, 32), b=nn.Linear(32, 4))
    (dimension,) = find_coupling(net, {"x": torch.ones(1, 16)}).dimensions
    assert (dimension.name, dimension.n_units) == ("a", 32)


def test_pixels_at_their_largest() -> None:
    net = made(lambda m, x: m.b(m.a(x).flatten(2).max(-1)[0]), a=nn.Conv2d(3, 16, 3), b=nn.Linear(16, 4))
    (dimension,) = find_coupling(net, {"x": torch.from_numpy(images(1))}).dimensions
    assert (dimension.name, dimension.n_units) == ("a", 16)


def test_a_forward_that_looks_at_values() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.b(h) * (2 if bool(h.sum() < -1) else 1)

    net = made(forward, a=nn.Linear(16, 32), b=nn.Linear(32, 4))
    pruned(net, rows())
    assert net.a.out_features == 16  # type: ignore[union-attr]


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=2, use_cache=False, **more)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_the_work_of_a_tied_head_follows_the_width() -> None:
    feeds = {"input_ids": torch.arange(5)[None]}
    costs = []
    for tied in (True, False):
        module = llama(tie_word_embeddings=tied)
        dimensions = find_coupling(module, feeds, compute=True).dimensions
        cost = macs_cost(module, dimensions, feeds)
        costs.append(cost.at([one.n_units // 2 if one.kind == "width" else one.n_units for one in dimensions]))
    assert costs[0] == costs[1]


def test_numbers_that_do_not_go_together_are_passed_over() -> None:
    """48 to 24 neurons: half of the vocabulary, tried for that, would leave the padding's row outside."""
    module = llama(pad_token_id=60)
    built = shapes_of(module)
    feeds = {"input_ids": torch.arange(5)[None]}
    neurons = next(one for one in find_coupling(module, feeds, compute=True).dimensions if one.kind == "neurons")
    remove(module, neurons, np.arange(24))
    assert fit_config(module, built) == "" and module.config.intermediate_size == 24


def test_a_gated_feed_forward_in_one_projection_has_neurons() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate, up = m.both(x).chunk(2, -1)
        return m.down(F.silu(gate) * up)

    net = made(forward, both=nn.Linear(16, 64), down=nn.Linear(32, 4))
    (dimension,) = find_coupling(net, {"x": torch.ones(1, 16)}).dimensions
    assert (dimension.kind, dimension.n_units) == ("neurons", 32)
    pruned(net, rows(), dimensions=("neurons",), ratio=0.3, round_to=8)
    assert net.down.in_features == 24  # type: ignore[union-attr]


def differences(net: nn.Module, feeds: dict[str, Tensor]) -> dict[str, float]:
    """Dimension -> how far removing all units but one is from not reading them."""
    found = {}
    for one in find_coupling(net, feeds).dimensions:
        found[one.name] = differs_from_masked(copy.deepcopy(net), one, np.arange(1, one.n_units), feeds)
    return found


def test_convolutions_in_groups_down_to_one_channel_each() -> None:
    net = made(
        lambda m, x: m.last(m.grouped(m.first(x)).relu()).mean((2, 3)),
        first=nn.Conv2d(3, 8, 3),
        grouped=nn.Conv2d(8, 8, 3, groups=4),
        last=nn.Conv2d(8, 4, 1),
    )
    found = differences(net, {"x": torch.from_numpy(images(2))})
    assert found.keys() == {"first", "grouped"} and max(found.values()) < EXACT
    depthwise = made(
        lambda m, x: m.last(m.depthwise(m.first(x)).relu()).mean((2, 3)),
        first=nn.Conv2d(3, 8, 3),
        depthwise=nn.Conv2d(8, 16, 3, groups=8),
        last=nn.Conv2d(16, 4, 1),
    )
    assert max(differences(depthwise, {"x": torch.from_numpy(images(2))}).values()) < EXACT


def test_transposed_convolutions_in_groups() -> None:
    net = made(
        lambda m, x: m.last(m.up(m.first(x).relu())).mean((2, 3)),
        first=nn.Conv2d(3, 8, 3),
        up=nn.ConvTranspose2d(8, 8, 2, groups=2),
        last=nn.Conv2d(8, 4, 1),
    )
    found = differences(net, {"x": torch.from_numpy(images(2))})
    assert found and max(found.values()) < EXACT


class Biased(nn.Module):
    """Attention with a learned table of one row for each head as its mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.table = nn.Parameter(torch.randn(1, 4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.table)
        return self.o(mixed.transpose(1, 2).flatten(2))


def test_a_mask_with_a_row_for_each_head() -> None:
    torch.manual_seed(0)
    net = Biased().eval().requires_grad_(False)
    found = find_coupling(net, {"x": torch.randn(2, 6, 16)}).dimensions
    heads = next(one for one in found if one.kind == "heads")
    assert ("table", 1) in heads.members
    assert differs_from_masked(net, heads, np.array([1, 3]), {"x": torch.randn(2, 6, 16)}) < EXACT


def test_a_layer_that_sees_too_much_is_left_with_its_reason() -> None:
    n = MAX_FEATURES + 1
    net = made(
        lambda m, x: m.c(m.b(m.a(m.wide(x).relu()).relu())),
        wide=nn.Linear(n, 16),
        a=nn.Linear(16, 32),
        b=nn.Linear(32, 8),
        c=nn.Linear(8, 4),
    )
    result = pruned(net, rows(256, n), targets=("a",))
    reasons = {one.layer: one.reason for one in result.decisions}
    assert f"not fitted: one output sees {n} features, and more than {n - 1} are not fitted" in reasons["wide"]
    assert net.a.out_features == 16  # type: ignore[union-attr]


def test_taylor_settles_with_more_data() -> None:
    """At labels drawn from the model itself the mean gradient is noise around zero; its square is not."""
    net = made(lambda m, x: m.b(m.a(x).relu()), a=nn.Linear(16, 64), b=nn.Linear(64, 10))
    (dimension,) = find_coupling(net, {"x": torch.ones(1, 16)}).dimensions
    x = torch.from_numpy(rows(8192))

    def scores(seed: int) -> np.ndarray:
        batches = [{"x": part} for part in x.split(64)]
        return gradient_scores(net, [dimension], batches, draw_label_loss(seed), "taylor")[0]

    one, other = (scores(seed).argsort().argsort() for seed in (0, 1))
    assert np.corrcoef(one, other)[0, 1] > 0.95


def test_rows_at_once_follow_from_how_wide_the_outputs_are() -> None:
    words = (TensorSpec("logits", "float32", ("batch", "sequence", 128_256)),)
    assert rows_within(words, 16_384, 512 * 2**20) == 523
    assert rows_within((TensorSpec("logits", "float32", ("batch", 10)),), 16_384, 512 * 2**20) == 16_384
    assert rows_within((), 16_384, 1) == 1
