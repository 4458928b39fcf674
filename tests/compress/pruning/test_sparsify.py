"""Masks, SparseGPT and refitting against slow and obvious references; convolutions against their patches."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_strategies import convolutions
from torch import Tensor, nn

from compress.pruning.masks import choose_zeros, lowest, refit, wanda_scores
from compress.pruning.matrix import as_matrices, as_weight, groups_of, inputs_of, patches
from compress.pruning.sparsegpt import sparsegpt
from compress.pruning.sparsity import Sparsity
from compress.rounding.gptq import Hessian, factor_hessian

N = 48
PAIR = Sparsity.of("2:4")
AMOUNTS = (Sparsity(0.5), Sparsity(0.3), PAIR, Sparsity.of("1:4"), Sparsity.of("5:8"))


def correlated(n: int = N, rows: int = 400, seed: int = 0) -> Tensor:
    """The Gram matrix of inputs that depend on each other, some much larger than others; float32 [n, n]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, n)) @ rng.normal(size=(n, n)) * rng.permutation(np.geomspace(0.05, 3, n))
    return torch.from_numpy(x.T @ x / rows).float()


def weight_of(groups: int = 1, rows: int = 12, n: int = N, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(groups, rows, n)).astype(np.float32))


def inverted(gram: Tensor) -> Hessian:
    return factor_hessian(gram, 0.01, act_order=False)


def error(weight: Tensor, found: Tensor, gram: Tensor) -> float:
    change = (weight - found).double()
    return float(((change @ gram.double()) * change).sum())


def zeroed(weight: Tensor, scores: Tensor, sparsity: Sparsity, scope: Any = "layer") -> Tensor:
    return weight.masked_fill(choose_zeros(scores, sparsity, scope), 0.0)


def obvious(scores: Tensor, sparsity: Sparsity, scope: str) -> np.ndarray[Any, Any]:
    """By sorting lists of (score, place)."""
    flat = scores.numpy().reshape(-1)
    width = sparsity.group or (scores.shape[-1] if scope == "row" else flat.size)
    k = width - sparsity.kept if sparsity.group else round(width * sparsity.share)
    removed = np.zeros(flat.size, bool)
    for start in range(0, flat.size, width):
        for _, place in sorted((flat[i], i) for i in range(start, start + width))[:k]:
            removed[place] = True
    return removed.reshape(scores.shape)


@st.composite
def sparsities(draw: st.DrawFn) -> Sparsity:
    """A share, or N:M."""
    if draw(st.booleans()):
        return Sparsity(draw(st.floats(0.01, 0.99)))
    group = draw(st.integers(2, 8))
    return Sparsity.of(f"{draw(st.integers(1, group - 1))}:{group}")


SCOPES, SEEDS = st.sampled_from(["row", "layer"]), st.integers(0, 2**32 - 1)


@given(sparsities(), SCOPES, st.booleans(), st.integers(1, 3), st.integers(1, 6), SEEDS)
def test_the_lowest_scores_go(sparsity: Sparsity, scope: Any, ties: bool, groups: int, rows: int, seed: int) -> None:
    scores = weight_of(groups, rows, (sparsity.group or 5) * (1 + seed % 4), seed).abs()
    scores = (scores * 3).round() if ties else scores
    np.testing.assert_array_equal(choose_zeros(scores, sparsity, scope).numpy(), obvious(scores, sparsity, scope))


@given(sparsities())
def test_a_pattern_reads_as_it_is_written(sparsity: Sparsity) -> None:
    if sparsity.group:
        assert Sparsity.of(str(sparsity)) == sparsity
    else:
        with pytest.raises(ValueError, match="is no pattern"):
            Sparsity.of(str(sparsity))


def test_none_of_them_is_none() -> None:
    assert not lowest(torch.zeros(2, 5), 0).any()


def test_wanda_weighs_with_the_norm_of_each_input() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 30, N)).astype(np.float32))
    weight, gram = weight_of(groups=2), rows.mT @ rows / 30
    expected = weight.abs() * rows.square().sum(1).sqrt()[:, None] / 30**0.5
    torch.testing.assert_close(wanda_scores(weight, gram), expected)


# --- SparseGPT --------------------------------------------------------------------------------------------------------


@given(sparsities(), SEEDS)
def test_with_independent_inputs_it_is_magnitude(sparsity: Sparsity, seed: int) -> None:
    n = (sparsity.group or 6) * (1 + seed % 5)
    weight = weight_of(2, 5, n, seed)
    found = sparsegpt(weight, [inverted(torch.eye(n))] * 2, sparsity)
    assert torch.equal(found, zeroed(weight, weight.abs(), sparsity))


@settings(max_examples=10)
@given(st.sampled_from(AMOUNTS[:4]), st.sampled_from([16, 20, 24, 128]), st.integers(0, 9))
def test_it_is_optimal_brain_surgery_column_by_column(sparsity: Sparsity, block: int, seed: int) -> None:
    """The reference holds the inverse Hessian itself and takes each column out of it (equations 3 and 4)."""
    weight, gram = weight_of(seed=seed), correlated(seed=seed)
    found = sparsegpt(weight, [inverted(gram)], sparsity, block)[0].double()
    left = weight[0].double()
    inverse = torch.linalg.inv(gram.double() + 0.01 * gram.double().diagonal().mean() * torch.eye(N))
    size, chosen = sparsity.group or block, 0
    for start in range(0, N, size):
        width = min(size, N - start)
        # Column j's pivot is what the inverse has there once all columns before it are taken out.
        pivots, ahead = [], inverse.clone()
        for column in range(start, start + width):
            pivots.append(ahead[column, column].clone())
            ahead = ahead - torch.outer(ahead[:, column], ahead[column]) / ahead[column, column]
        scores = left[:, start : start + width].square() / torch.stack(pivots)
        k = width - sparsity.kept if sparsity.group else round(sparsity.share * len(left) * (start + width)) - chosen
        chosen += k
        parts = scores if sparsity.group else scores.T.reshape(1, -1)
        removed = torch.zeros_like(parts, dtype=torch.bool).scatter_(1, parts.argsort(1)[:, :k], True)
        removed = removed if sparsity.group else removed.reshape(width, -1).T
        for column in range(start, start + width):
            change = torch.where(removed[:, column - start], left[:, column], 0.0) / inverse[column, column]
            left = left - torch.outer(change, inverse[column])
            inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
            left[removed[:, column - start], column] = 0.0
    torch.testing.assert_close(found, left, rtol=0, atol=2e-3)
    assert torch.equal(found == 0, left.abs() < 1e-12)


@pytest.mark.parametrize("sparsity", AMOUNTS, ids=str)
def test_each_method_loses_less_than_the_one_before(sparsity: Sparsity) -> None:
    """Of four layers together: of one alone, now and then not."""
    errors = np.zeros(4)
    for seed in range(4):
        weight, gram = weight_of(rows=24, seed=seed + 1), correlated(seed=seed)[None]
        hessian = inverted(gram[0])
        magnitude = zeroed(weight, weight.abs(), sparsity, "row")
        wanda = zeroed(weight, wanda_scores(weight, gram), sparsity, "row")
        published = sparsegpt(weight, [hessian], sparsity)
        refitted = refit(weight, published, gram + hessian.added.diag())
        errors += [error(weight, one, gram) for one in (refitted, published, wanda, magnitude)]
    assert (np.diff(errors) > 0).all() and errors[2] < 0.9 * errors[3] and errors[0] < 0.95 * errors[1]


@settings(max_examples=20)
@given(sparsities(), st.integers(1, 3), st.integers(1, 6), st.integers(3, 40), SEEDS)
def test_the_share_of_zeros_is_the_one_asked_for(
    sparsity: Sparsity, groups: int, rows: int, block: int, seed: int
) -> None:
    """Of groups together, whatever the blocks are."""
    n = (sparsity.group or 6) * (1 + seed % 5)
    weight = weight_of(groups, rows, n, seed)
    hessians = [inverted(correlated(n, seed=group)) for group in range(groups)]
    found = sparsegpt(weight, hessians, sparsity, block)
    assert int((found == 0).sum()) == round(sparsity.share * weight.numel())
    if sparsity.group:
        assert ((found != 0).reshape(-1, sparsity.group).sum(1) == sparsity.kept).all()


def test_inputs_that_never_spoke_go_first() -> None:
    """Even where the others are so small that the 1 that damping puts there would make them look dear."""
    gram = 1e-6 * torch.eye(N)
    gram[5, 5] = 0
    found = sparsegpt(weight_of().sign() + weight_of().clamp(-1, 1), [inverted(gram)], Sparsity(1 / N))
    assert (found[0] == 0).nonzero()[:, 1].tolist() == [5] * 12
    silent = sparsegpt(weight_of(), [inverted(torch.zeros(N, N))], Sparsity(0.5))
    assert torch.equal(silent, zeroed(weight_of(), weight_of().abs(), Sparsity(0.5)))


# --- refitting --------------------------------------------------------------------------------------------------------


def test_refitting_ends_in_least_squares_and_never_rises() -> None:
    weight, gram = weight_of(groups=2), torch.stack([correlated(seed=s) + torch.eye(N) for s in (0, 1)])
    start = zeroed(weight, weight.abs(), Sparsity(0.5))
    expected = torch.zeros_like(weight, dtype=torch.float64)
    for group, row in itertools.product(range(2), range(12)):
        kept = start[group, row] != 0
        one = gram[group].double()
        expected[group, row, kept] = torch.linalg.solve(one[kept][:, kept], one[kept] @ weight[group, row].double())
    torch.testing.assert_close(refit(weight, start, gram, 60).double(), expected, rtol=0, atol=1e-3)
    errors = [sum(error(weight[g], refit(weight, start, gram, k)[g], gram[g]) for g in (0, 1)) for k in range(12)]
    assert errors == sorted(errors, reverse=True)
    assert torch.equal(refit(weight, start, gram, 9) == 0, start == 0)
    assert torch.equal(refit(weight, start, gram, 0), start)


def test_refitting_changes_nothing_with_independent_inputs() -> None:
    weight = weight_of()
    start = zeroed(weight, weight.abs(), PAIR)
    assert torch.equal(refit(weight, start, torch.eye(N)[None]), start)


# --- a layer as matrices ----------------------------------------------------------------------------------------------


@given(convolutions())
def test_a_convolution_is_a_product_with_its_patches(given: tuple[Any, Tensor]) -> None:
    layer, x = given
    weight: Any = layer.weight
    with torch.no_grad():
        matrices = as_matrices(weight, groups_of(layer))
        product = patches(layer, x) @ matrices.mT  # [groups, n, out / groups]
        bias = 0 if layer.bias is None else layer.bias.reshape(-1, *[1] * (x.dim() - 2))
        expected = (layer(x) - bias).flatten(2)  # [N, out, positions]
    found = product.transpose(0, 1).reshape(len(x), -1, weight.shape[0]).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.equal(as_weight(matrices, weight.shape), weight)


def test_groups_of_inputs_are_channels_at_one_position() -> None:
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 8, 3, 3)).astype(np.float32))
    matrices = as_matrices(weight)
    sparse = as_weight(zeroed(matrices, matrices.abs(), PAIR), weight.shape)
    kept = (sparse != 0).reshape(4, 2, 4, 3, 3).sum(2)  # [out, groups of channels, *kernel]
    assert (kept == 2).all()


def test_large_inputs_come_in_parts() -> None:
    layer = nn.Conv2d(6, 8, 3)
    x = torch.randn(5, 6, 9, 7, generator=torch.Generator().manual_seed(0))
    whole = patches(layer, x)
    parts = list(inputs_of(layer, x, at_once=2 * 9 * x[0].numel()))
    assert len(parts) == 3 and torch.equal(torch.cat(parts, 1), whole)


def test_rows_of_padding_are_left_out() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    rows = torch.tensor([[True, True, False], [True, False, False]])
    (found,) = inputs_of(nn.Linear(4, 2), x, rows)
    assert torch.equal(found, x[rows][None])


@pytest.mark.parametrize("text", ["4:4", "0:4", "5:4", "2:", "2/4", "-1:4", "a"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no pattern: N:M keeps N of each M inputs, 1 <= N < M"):
        Sparsity.of(text)
