"""GPTQ: the rounding against slow and obvious references, and the pass around it."""

from __future__ import annotations

from typing import Any

import graphs
import numpy as np
import pytest
from graphs import context, facts_of, written

from compress.errors import PassError
from compress.passes import Gptq, Rtn
from compress.passes.context import PassResult
from compress.quantize.gptq import gptq_round, gram_matrix, invert_hessian, output_error
from compress.quantize.measure import output_cosine
from compress.quantize.rounding import round_to_nearest
from compress.quantize.state import GraphState
from compress.targets import TARGETS


def correlated(n: int = 48, rows: int = 400, seed: int = 0) -> np.ndarray:
    """The Gram matrix of inputs that depend on each other, some much larger than others; float64 [n, n]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, n)) @ rng.normal(size=(n, n)) * np.geomspace(0.05, 3, n)
    return x.T @ x / rows


def weight_of(rows: int = 12, n: int = 48, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, n)).astype(np.float32)


@pytest.mark.parametrize("symmetric", [True, False])
def test_with_independent_inputs_it_is_rounding_to_the_nearest(symmetric: bool) -> None:
    weight = weight_of()
    found, error, nearest = gptq_round(weight, invert_hessian(np.eye(48), 0.01), 4, 16, symmetric)
    expected = round_to_nearest(weight, 4, 16, symmetric)
    np.testing.assert_array_equal(found.values, expected.values)
    assert error == nearest == pytest.approx(output_error(weight, expected.dequantize(), np.eye(48)))


def test_the_factor_is_that_of_the_inverse() -> None:
    hessian = invert_hessian(correlated(), 0.01)
    damped = hessian.gram + 0.01 * np.diag(hessian.gram).mean() * np.eye(48)
    ordered = damped[np.ix_(hessian.order, hessian.order)]
    np.testing.assert_allclose(hessian.factor.T @ hessian.factor @ ordered, np.eye(48), atol=1e-8)
    assert not np.tril(hessian.factor, -1).any()
    assert (np.diff(np.diag(ordered)) <= 0).all()


@pytest.mark.parametrize("act_order", [True, False])
def test_the_columns_are_rounded_as_obq_rounds_them(act_order: bool) -> None:
    """The reference updates the inverse Hessian itself after each column (Frantar & Alistarh 2022, equation 3)."""
    weight, hessian = weight_of(), invert_hessian(correlated(), 0.01, act_order)
    importance = np.diag(hessian.gram) + 1e-3 * np.diag(hessian.gram).mean()
    scales = round_to_nearest(weight, 4, 16, importance=importance).scales
    damped = hessian.gram + 0.01 * np.diag(hessian.gram).mean() * np.eye(48)
    left, inverse = weight.astype(np.float64), np.linalg.inv(damped)
    expected = np.zeros(weight.shape)
    for column in hessian.order:
        scale = scales[:, column // 16].astype(np.float64)
        expected[:, column] = np.clip(np.round(left[:, column] / scale), -7, 7)
        error = (left[:, column] - expected[:, column] * scale) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    np.testing.assert_array_equal(gptq_round(weight, hessian, 4, 16, True)[0].values, expected)


@pytest.mark.parametrize("group_size", [-1, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_loses_less_than_rounding_to_the_nearest(group_size: int, symmetric: bool) -> None:
    weight, gram = weight_of(), correlated()
    errors = []
    for bits in (2, 3, 4, 8):
        found, error, _ = gptq_round(weight, invert_hessian(gram, 0.01), bits, group_size, symmetric)
        plain = round_to_nearest(weight, bits, group_size, symmetric)
        assert error == pytest.approx(output_error(weight, found.dequantize(), gram))
        assert error < 0.8 * output_error(weight, plain.dequantize(), gram)
        errors.append(error)
    assert errors == sorted(errors, reverse=True)


def test_a_gram_matrix_is_that_of_all_rows() -> None:
    feeds = graphs.vectors()
    rows = np.concatenate([batch["x"] for batch in feeds]).astype(np.float64)
    np.testing.assert_allclose(gram_matrix(graphs.one_layer(), "x", feeds), rows.T @ rows / len(rows), atol=1e-6)
    with pytest.raises(ValueError, match="no calibration data"):
        gram_matrix(graphs.one_layer(), "x", [])


def test_inputs_that_are_always_zero_keep_their_nearest_weight() -> None:
    gram = correlated()
    gram[5], gram[:, 5] = 0, 0
    hessian = invert_hessian(gram, 0.01)
    assert hessian.dead.nonzero()[0].tolist() == [5]
    weight = weight_of()
    found = gptq_round(weight, hessian, 8, -1, True)[0]
    assert np.abs(found.dequantize()[:, 5] - weight[:, 5]).max() <= found.scales.max() / 2


def test_more_damping_is_tried_and_its_end_is_an_error() -> None:
    gram = correlated(rows=8)  # of rank 8: needs damping
    gram -= np.eye(48) * 0.03 * np.diag(gram).mean()
    assert invert_hessian(gram, 0.01).damp_percent > 0.01
    with pytest.raises(ValueError, match="cannot be inverted, not even with damp_percent 1"):
        invert_hessian(-correlated() + 2 * np.diag(np.diag(correlated())) - 9 * correlated(), 0.01)


def run_pass(**knobs: Any) -> PassResult:
    return Gptq(**knobs).apply(GraphState(graphs.transformer()), context(graphs.tokens(n_batches=6)))


def test_the_pass_is_closer_than_rtn_and_says_by_how_much() -> None:
    feeds = graphs.tokens(n_batches=6)
    exact = graphs.run(graphs.transformer(), feeds)
    result = run_pass()
    rtn = Rtn().apply(GraphState(graphs.transformer()), context([])).model

    def cosine(state: GraphState) -> float:
        return output_cosine(exact, np.split(written(state, feeds), len(feeds)))

    assert cosine(result.model) > cosine(rtn) > 0.9
    assert result.model.weight_only == ["query", "key", "value", "projection", "up", "down"]
    assert all(m["output_error"] <= m["output_error_rtn"] for m in result.measured.values())


def test_only_a_sequential_run_sees_the_layers_before_it_rounded() -> None:
    one, other = run_pass(sequential=True).model.weights, run_pass(sequential=False).model.weights
    np.testing.assert_array_equal(one["query"].values, other["query"].values)
    assert (one["down"].values != other["down"].values).any()


def test_a_channel_that_never_speaks_is_named_and_strict_refuses_it() -> None:
    feeds = graphs.vectors()
    for batch in feeds:
        batch["x"][:, 3] = 0
    notes = Gptq().apply(GraphState(graphs.one_layer()), context(feeds)).notes
    assert [note.text for note in notes] == ["gptq: fc: 1 of 64 inputs were zero on all calibration data"]
    with pytest.raises(PassError, match="gptq: fc: 1 of 64 inputs were zero"):
        Gptq(strict=True).apply(GraphState(graphs.one_layer()), context(feeds))


def test_a_value_that_is_not_finite_stops_it_and_is_named() -> None:
    feeds = graphs.vectors()
    feeds[1]["x"][0, 0] = np.nan
    with pytest.raises(PassError, match="gptq: fc: tensor 'x': NaN or Inf on the calibration data"):
        Gptq().apply(GraphState(graphs.one_layer()), context(feeds))


def test_a_group_that_does_not_divide_is_refused_by_the_plan() -> None:
    problems = Gptq(group_size=24).check(facts_of(graphs.one_layer()), TARGETS["openvino"]).problems
    assert problems == (
        "gptq: fc has 64 inputs, which group_size 24 does not divide; use group_size: 16 or 32, or ignore it",
    )
