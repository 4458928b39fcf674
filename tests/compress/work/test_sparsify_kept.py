"""Zeros that a pass put into a weight are there after every pass that rounds or learns it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from streaming import context, llama, streamed, texts
from torch import Tensor

from compress.formats.schemes import WeightScheme
from compress.passes import AutoRound, Gptq, Tune
from compress.passes.sparsify import Sparsify
from compress.pruning.masks import choose_zeros
from compress.pruning.sparsity import Sparsity
from compress.rounding.fake import FakeWeight, LearnedWeight, ShiftedWeight
from compress.rounding.gptq import PUBLISHED, GptqRules, factor_hessian, gptq_round, gptq_round_together, round_columns
from compress.rounding.grid import fit_grid, round_to_grid
from compress.rounding.quantized_weight import LEAST_ZEROS, keep_zeros, zeros_to_keep
from compress.work import apply_pass

N = 48


pytestmark = pytest.mark.usefixtures("one_thread", "small_micro_batches")


def correlated(seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(400, N)) @ rng.normal(size=(N, N)) * np.geomspace(0.05, 3, N)
    return torch.from_numpy(x.T @ x / 400).float()


def dense(rows: int = 12, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, N)).astype(np.float32))


def sparse(rows: int = 12, seed: int = 1) -> Tensor:
    weight = dense(rows, seed)
    return weight.masked_fill(choose_zeros(weight.abs()[None], Sparsity.of("2:4"), "row")[0], 0.0)


def test_a_weight_with_few_zeros_is_dense() -> None:
    weight = torch.ones(10, 10)
    assert zeros_to_keep(weight) is None
    weight.view(-1)[: int(100 * LEAST_ZEROS) - 1] = 0
    assert zeros_to_keep(weight) is None
    weight.view(-1)[: int(100 * LEAST_ZEROS)] = -0.0
    assert torch.equal(zeros_to_keep(weight), weight == 0)


@pytest.mark.parametrize("points", [None, torch.tensor([5.0, 6.0])])
def test_what_stands_for_zero_takes_its_place(points: Tensor | None) -> None:
    levels = torch.tensor([1.0, 2.0])
    keep_zeros(levels, torch.tensor([True, False]), points)
    assert levels.tolist() == [0.0 if points is None else 5.0, 2.0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("sweeps", [0, 2])
def test_gptq_leaves_zeros_zero(symmetric: bool, bits: int, sweeps: int) -> None:
    """And still loses less than rounding to the nearest, because the other weights make up for both."""
    weight, scheme = sparse(), WeightScheme(bits, 16, symmetric)
    found, error, nearest = gptq_round(weight, factor_hessian(correlated(), 0.01), scheme, GptqRules(sweeps=sweeps))
    assert (torch.from_numpy(found.dequantize())[weight == 0] == 0).all()
    assert error < 0.9 * nearest


@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_with_zeros_are_rounded_as_obq_rounds_them(symmetric: bool) -> None:
    """The reference updates the inverse Hessian itself; a weight that is gone counts as rounded to zero."""
    weight, gram = sparse(), correlated().double()
    hessian = factor_hessian(correlated(), 0.01)
    grid = fit_grid(weight, WeightScheme(4, 16, symmetric), hessian.importance)
    left, inverse = weight.double(), torch.linalg.inv(gram + 0.01 * gram.diagonal().mean() * torch.eye(N))
    expected = torch.zeros_like(left)
    for column in hessian.order.tolist():
        scale = grid.scales[:, column // 16].double()
        zero = torch.zeros(12) if grid.zeros is None else grid.zeros[:, column // 16]
        level = ((left[:, column] / scale).round() + zero).clamp(grid.numbers.low, grid.numbers.high)
        expected[:, column] = torch.where(weight[:, column] == 0, zero.double(), level)
        error = (left[:, column] - (expected[:, column] - zero) * scale) / inverse[column, column]
        left -= torch.outer(error, inverse[column])
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    found = round_columns(weight, hessian, grid, PUBLISHED, weight == 0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0)


def test_of_layers_together_each_keeps_its_own_zeros() -> None:
    """A dense one beside a sparse one is free, as it is alone."""
    hessian, scheme = factor_hessian(correlated(), 0.01), WeightScheme(3, 16)
    for one, both in zip(
        (sparse(), dense(9, 2)), gptq_round_together([sparse(), dense(9, 2)], hessian, scheme), strict=True
    ):
        alone = gptq_round(one, hessian, scheme).weight
        np.testing.assert_array_equal(alone.values, both.weight.values)


@pytest.mark.parametrize("kind", [LearnedWeight, ShiftedWeight])
@pytest.mark.parametrize("symmetric", [True, False])
def test_learning_moves_no_zero(kind: Any, symmetric: bool) -> None:
    weight = sparse()
    learned: FakeWeight = kind(round_to_grid(weight, WeightScheme(4, 16, symmetric)), weight)
    with torch.no_grad():
        for parameter in (*learned.rounding(), *learned.scaling()):
            parameter.add_(torch.from_numpy(np.random.default_rng(0).normal(size=parameter.shape)).float() * 3)
        learned.confine()
    values = learned()
    assert (values[weight == 0] == 0).all() and (values[weight != 0] != 0).any()
    np.testing.assert_array_equal(learned.freeze().dequantize(), values.detach().numpy())
    values.square().sum().backward()
    (position,) = learned.rounding()
    assert position.grad is not None and not position.grad.reshape(weight.shape)[weight == 0].any()


PASSES: dict[str, list[Any]] = {
    "gptq": [Gptq(group_size=16)],
    "gptq-asymmetric": [Gptq(group_size=16, symmetric=False, bits=3)],
    "autoround": [AutoRound(group_size=16, steps=3)],
    "gptq-tune": [Gptq(group_size=16, bits=2), Tune(steps=3)],
}


@pytest.mark.parametrize("name", PASSES)
def test_zeros_stay_through_passes(name: str) -> None:
    result = apply_pass(Sparsify(pattern="2:4"), streamed(llama(layers=2)), context(texts()))
    layers = [one.layer for one in result.decisions if one.action == "sparse"]
    model = result.model
    for one in PASSES[name]:
        model = apply_pass(one, model, context(texts())).model
    assert set(model.quantized_layers()) == set(layers)
    for layer in layers:
        before, after = (store.read(f"{layer}.weight") for store in (result.model.store, model.store))
        assert (after[before == 0] == 0).all() and (after != before).any()
