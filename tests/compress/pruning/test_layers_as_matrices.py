"""Every kind of layer is rows times a matrix; transposed convolutions and shared modules are pruned as others are."""

from __future__ import annotations

import copy
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compress.passes.prune_channels import Importance, PruneChannels, shrunk
from compress.pruning.coupling import find_coupling
from compress.pruning.curves import find_curves
from compress.pruning.importance import random_projection_loss
from compress.pruning.layers import (
    apply_layer,
    features_of,
    input_rows,
    n_features,
    n_rows,
    output_rows,
    read_weight,
    write_weight,
)
from compress.pruning.shrink import shrink
from compress.pruning.surgery import differs_from_masked, remove

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 5), (2, 4, 6)),
    "grouped": (nn.Conv2d(6, 8, 3, 2, 1, groups=2), (2, 6, 5, 4)),
    "transposed 1d": (nn.ConvTranspose1d(6, 8, 4, 2, 1), (2, 6, 7)),
    "transposed 2d": (
        nn.ConvTranspose2d(6, 8, (3, 4), (2, 3), (1, 0), output_padding=(1, 2), groups=2, dilation=(2, 1)),
        (2, 6, 5, 4),
    ),
    "transposed 3d": (nn.ConvTranspose3d(4, 4, 2, 2), (1, 4, 3, 3, 3)),
    "transposed depthwise": (nn.ConvTranspose1d(4, 4, 5, 1, 3, groups=4), (2, 4, 9)),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_is_its_rows_times_its_matrix(name: str) -> None:
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out, matrix = layer(x), read_weight(layer)
    rows = torch.arange(n_rows(layer, out))
    product = torch.einsum("gnf,gof->ngo", input_rows(layer, x, rows), matrix).flatten(1) + layer.bias
    torch.testing.assert_close(product, output_rows(layer, out, rows), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(apply_layer(layer, x, matrix, layer.bias), out)
    assert matrix.shape[2] == n_features(layer)
    before = layer.weight.clone()
    write_weight(layer, matrix.clone())
    assert torch.equal(layer.weight, before)


class Decoder(nn.Module):
    """Transposed convolutions, plain and grouped, between others, with norms and PReLU."""

    def __init__(self, groups: int = 1) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(6, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 16, 4, 2, 1, groups=groups)
        self.again, self.relu = nn.ConvTranspose2d(16, 12, 2, 2, bias=False), nn.PReLU(12)
        self.last = nn.Conv2d(12, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(torch.relu(self.norm(self.first(x))))
        return self.last(self.relu(self.again(torch.relu(x))))


class Shared(nn.Module):
    """A head of two convolutions that reads two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(6, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
        self.head, self.out = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.stem(x))
        b = torch.relu(self.down(a))
        one, two = (self.out(torch.relu(self.head(part))).flatten(2) for part in (a, b))
        return torch.cat([one, two], 2)


NETS: dict[str, Any] = {"decoder": Decoder, "grouped decoder": lambda: Decoder(2), "shared": Shared}


def made(name: str) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    module = NETS[name]().eval().requires_grad_(False)
    return module, [{"x": torch.randn(4, 6, 6, 6)} for _ in range(4)]


@pytest.mark.parametrize("name", NETS)
def test_units_of_them_can_go_and_counts_are_those_of_their_shapes(name: str) -> None:
    from compress.facts import ModelFacts
    from compress.models.facts import _describe_layers
    from compress.structure.dataflow import count_work, record

    module, batches = made(name)
    coupling = find_coupling(module, batches[0])
    written = {writer for dimension in coupling.dimensions for writer in dimension.writers}
    assert written >= ({"first", "up", "again"} if "decoder" in name else {"stem", "head"})
    facts = ModelFacts("torch", "", "generic", (), (), _describe_layers(module, count_work(record(module, batches[0]))))
    expected = shrunk(facts, coupling.facts, {group.name: group.n_units - 1 for group in coupling.facts})
    smaller = copy.deepcopy(module)
    for dimension in coupling.dimensions:
        last = np.array([dimension.n_units - 1])
        assert differs_from_masked(copy.deepcopy(module), dimension, last, batches[0]) < 1e-4
        remove(smaller, dimension, last)
    layers = _describe_layers(smaller, count_work(record(smaller, batches[0])))
    assert [(x.shape, x.macs) for x in layers] == [(x.shape, x.macs) for x in expected.layers]


@pytest.mark.parametrize("importance", [kind for kind in get_args(Importance) if kind != "bn_scale"])
@pytest.mark.parametrize("name", NETS)
def test_every_importance_orders_them_and_the_rest_is_fitted(name: str, importance: Any) -> None:
    module, batches = made(name)
    dimensions = find_coupling(module, batches[0]).dimensions
    curves = find_curves(module, dimensions, batches, importance, loss=random_projection_loss())
    widths = [-(-2 * dimension.n_units // 3) for dimension in dimensions]
    record = shrink(module, dimensions, curves, widths, batches, remove)
    assert np.isfinite(record.error_with) and record.error_with <= record.error_without * 1.05
    fitted = {layer.layer for layer in record.layers}
    assert fitted >= ({"up", "again"} if "decoder" in name else {"down"})


def test_features_of_a_transposed_layer_s_inputs_are_those_that_their_units_are() -> None:
    layer = nn.ConvTranspose1d(4, 6, 3, groups=2)
    inputs = np.array([[0, 2], [1, 3]])
    matrix = read_weight(layer)  # [2, 3, 6]
    with torch.no_grad():
        layer.weight[[0, 2]] = 0
    features = features_of(layer, inputs)
    removed = torch.block_diag(*matrix)[:, features[0]]
    assert torch.equal(torch.block_diag(*read_weight(layer))[:, features[0]], torch.zeros_like(removed))
    assert (torch.block_diag(*read_weight(layer))[:, features[1]] != 0).sum() == 2 * 3 * 3


def test_a_refusal_names_the_commonest_reasons() -> None:
    from compress.facts import LayerFacts, ModelFacts
    from compress.formats.targets import TARGETS

    layers = tuple(LayerFacts(name, "Linear", "MatMul", name, (8, 8)) for name in "abc")
    facts = ModelFacts("torch", "", "generic", (), (), layers, prunable=(), unprunable=dict.fromkeys("abc", "why so"))
    (problem,) = PruneChannels(ratio=0.5).check(facts, TARGETS["onnxruntime-cpu"]).problems
    assert "nothing is left to prune" in problem and "3 layers stay: why so" in problem
