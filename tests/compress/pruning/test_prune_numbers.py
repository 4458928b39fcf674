"""Statistics, elimination, least squares and importance against direct solutions in the test."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer_strategies import convolutions
from torch import Tensor, nn

from compress.errors import PassError
from compress.pruning import importance, statistics
from compress.pruning.compensate import RIDGE, distance, fit, solve
from compress.pruning.coupling import find_coupling
from compress.pruning.dimensions import Dimension
from compress.pruning.layers import (
    apply_layer,
    features_of,
    in_groups,
    input_rows,
    output_rows,
    read_weight,
    write_weight,
)
from compress.pruning.obs import DAMPING, ReadingLayer, compensate_weight, eliminate
from compress.pruning.statistics import MAX_FEATURES, Sums, gather_inputs


def correlated(rows: int, features: int, seed: int = 0) -> Tensor:
    """Rows whose features depend on each other, float64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator, dtype=torch.float64)
    return torch.randn(rows, features, generator=generator, dtype=torch.float64) @ (mix + torch.eye(features)) + 0.3


def reading_layer(x: Tensor, weight: Tensor, k: int) -> ReadingLayer:
    return ReadingLayer(weight, x.T @ x / len(x), np.arange(x.shape[1]).reshape(-1, k))


def refitted_error(x: Tensor, weight: Tensor, kept: list[int]) -> float:
    """Least squares of the outputs on the kept features, by a direct solver, per row."""
    target = x @ weight.T
    found = torch.linalg.lstsq(x[:, kept], target).solution
    return float((target - x[:, kept] @ found).square().sum() / len(x))


@st.composite
def linear_layers(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A linear layer and a batch of vectors, or of rows of them."""
    torch.manual_seed(draw(st.integers(0, 99)))
    n_in, n_out = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    return nn.Linear(n_in, n_out, draw(st.booleans())).requires_grad_(False), torch.randn(*shape, n_in)


@given(convolutions(2) | linear_layers())
def test_a_layer_as_matrices_gives_what_it_gives(given: tuple[Any, Tensor]) -> None:
    layer, x = given
    out = layer(x).detach()
    rows = torch.randperm(out.numel() // len(read_weight(layer).flatten(0, 1)))[:20]
    bias = torch.zeros(len(read_weight(layer).flatten(0, 1))) if layer.bias is None else layer.bias.detach()
    product = input_rows(layer, x, rows) @ read_weight(layer).mT  # [groups, rows, out / groups]
    expected = in_groups(layer, output_rows(layer, out, rows) - bias)
    torch.testing.assert_close(product, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(apply_layer(layer, x, read_weight(layer), bias), out, atol=1e-5, rtol=1e-5)
    write_weight(layer, 2 * read_weight(layer))
    torch.testing.assert_close(layer(x).detach() - out, out - apply_layer(layer, x, 0 * read_weight(layer), bias))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(6, 5), (4, 3, 6)),
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (3, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3, groups=2), (3, 4, 7, 8)),
    ],
)
def test_the_features_of_an_input_are_those_that_see_it(layer: Any, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    width = layer.weight.shape[1]
    features = features_of(layer, np.arange(width)[:, None])
    assert sorted(features.reshape(-1)) == list(range(features.size))
    for unit in range(width):
        seen = x.clone()
        axis = 2 if isinstance(layer, nn.Linear) else 1
        seen.index_fill_(axis, torch.arange(unit, shape[axis], width), 1.0)
        rows = input_rows(layer, seen, torch.arange(4)).transpose(0, 1).flatten(1)  # [rows, groups * features]
        assert set(rows.any(0).nonzero()[:, 0].tolist()) <= set(features[unit])
        assert rows.any()


def test_an_input_without_a_batch_dimension_is_refused() -> None:
    with pytest.raises(PassError, match="no batch dimension"):
        input_rows(nn.Conv2d(2, 2, 1), torch.zeros(2, 4, 4), torch.arange(2))


def test_rows_of_padding_are_left_out_and_batches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.silent = nn.Linear(4, 2)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(x)

    x = torch.randn(4, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]])
    batches = [{"x": x[a : a + 2], "attention_mask": mask[a : a + 2]} for a in (0, 2)]
    sums = gather_inputs(Tokens(), ["layer"], batches)["layer"]
    real = x[mask.bool()].double()
    assert sums.n == len(real)
    torch.testing.assert_close(sums.plain()[0][0] * sums.n, real.T @ real, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.without_means()[0][0], torch.cov(real.T, correction=0), rtol=1e-5, atol=1e-6)
    with pytest.raises(PassError, match="silent: the calibration data never reaches"):
        gather_inputs(Tokens(), ["silent"], batches)
    wide = nn.Sequential(nn.Linear(MAX_FEATURES + 1, 1))
    with pytest.raises(PassError, match=f"0: one output sees {MAX_FEATURES + 1} features"):
        gather_inputs(wide, ["0"], [{"input": torch.ones(1, MAX_FEATURES + 1)}])


def test_sampled_rows_are_few_and_the_same_each_time() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(10, 5, 3)
    chosen = [statistics.choose_rows(layer, x, layer(x), {}, 7, seed) for seed in (1, 1, 2)]
    assert len(chosen[0]) == 7
    assert torch.equal(chosen[0], chosen[1])
    assert not torch.equal(chosen[0], chosen[2])


@pytest.mark.parametrize("k", [1, 3])
def test_elimination_takes_the_cheapest_unit_each_time_and_its_error_is_that_of_least_squares(k: int) -> None:
    x, weight = correlated(400, 12), torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).double()
    n_units = 12 // k
    found = eliminate([reading_layer(x, weight, k)])
    removed: list[int] = []
    for step, unit in enumerate(found.order):
        left = [u for u in range(n_units) if u not in removed]
        costs = {u: refitted_error(x, weight, [u2 * k + j for u2 in left if u2 != u for j in range(k)]) for u in left}
        assert min(costs, key=costs.__getitem__) == unit
        assert found.errors[step] == pytest.approx(costs[int(unit)], rel=2e-3)
        removed.append(int(unit))
    assert len(removed) == n_units - 1


def test_errors_of_several_readers_add_up() -> None:
    x, weight = correlated(300, 8), torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).double()
    whole = eliminate([reading_layer(x, weight, 2)])
    parts = eliminate([reading_layer(x, weight[:1], 2), reading_layer(x, weight[1:], 2)])
    np.testing.assert_array_equal(whole.order, parts.order)
    np.testing.assert_allclose(whole.errors, parts.errors, rtol=1e-6)


def test_what_can_be_made_up_for_is_free_and_goes_first() -> None:
    x, weight = correlated(300, 6), torch.randn(3, 6, generator=torch.Generator().manual_seed(9)).double()
    x[:, 4] = x[:, 1] + x[:, 2]  # one of these three is free
    found = eliminate([reading_layer(x, weight, 1)])
    assert found.order[0] in (1, 2, 4)
    assert found.errors[0] < 1e-3 * found.errors[1]
    x[:, 5] = 0  # never there
    assert eliminate([reading_layer(x, weight, 1)]).order[0] == 5


def test_units_removed_together_cost_what_they_cost_together() -> None:
    x, weight = correlated(500, 40), torch.randn(4, 40, generator=torch.Generator().manual_seed(3)).double()
    found = eliminate([reading_layer(x, weight, 1)], n_left=10, share=0.2)
    kept = [int(unit) for unit in found.choose_kept(10, 40)]
    assert found.errors[-1] == pytest.approx(refitted_error(x, weight, kept), rel=5e-3)
    assert np.all(np.diff(found.errors) >= 0)
    one_by_one = eliminate([reading_layer(x, weight, 1)], n_left=10)
    assert one_by_one.errors[-1] <= found.errors[-1] * 1.05
    assert found.error_at(40, 40) == 0


def test_the_weight_that_makes_up_for_units_is_the_least_squares_one() -> None:
    x, weight = correlated(300, 8), torch.randn(3, 8, generator=torch.Generator().manual_seed(4)).double()
    own = reading_layer(x, weight, 2)
    found = compensate_weight(own, np.array([1, 3]))
    kept = [0, 1, 4, 5]
    expected = torch.linalg.lstsq(x[:, kept], x @ weight.T).solution.T
    torch.testing.assert_close(found[:, kept], expected, rtol=0, atol=200 * DAMPING)
    assert not found[:, [2, 3, 6, 7]].any()
    torch.testing.assert_close(compensate_weight(own, np.array([], np.int64)), weight, rtol=0, atol=200 * DAMPING)


def test_nothing_may_be_left_of_no_layer() -> None:
    own = reading_layer(correlated(50, 4), torch.ones(2, 4).double(), 1)
    with pytest.raises(PassError, match=re.escape("0 of [4] units cannot be left")):
        eliminate([own], n_left=0)


def test_sums_give_the_distance_and_the_solution_of_their_rows() -> None:
    x = correlated(200, 6).reshape(2, 100, 6)
    y = torch.randn(2, 100, 3, generator=torch.Generator().manual_seed(5)).double()
    sums = Sums.empty(2, 6, 3)
    sums.add(x[:, :70], y[:, :70])
    sums.add(x[:, 70:], y[:, 70:])
    for free_bias, group in itertools.product((True, False), range(2)):
        weight, bias = solve(sums, 1e-12, free_bias)
        design = torch.cat([x[group], torch.ones(100, 1)], 1) if free_bias else x[group]
        expected = torch.linalg.lstsq(design, y[group]).solution.T
        torch.testing.assert_close(weight[group], expected[:, :6], rtol=1e-3, atol=1e-4)
        left = y - x @ weight.mT - bias[:, None]
        assert distance(sums, weight, bias) == pytest.approx(float(left.square().sum() / 100), rel=1e-4)
    assert distance(sums) == pytest.approx(float(y.square().sum() / 100))


def test_new_targets_for_the_same_rows_are_as_if_they_had_been_the_first() -> None:
    x, y = correlated(50, 4)[None], torch.randn(1, 50, 2).double()
    once, again = Sums.empty(1, 4, 2), Sums.empty(1, 4, 2)
    once.add(x, 2 * y)
    again.add(x, y)
    again = again.without_targets()
    again.aim(x, 2 * y)
    torch.testing.assert_close(solve(once, 0.1, True), solve(again, 0.1, True))


def test_the_ridge_is_the_best_on_rows_held_out_and_noise_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(6)
    x, true = torch.randn(1, 400, 20, generator=generator).double(), torch.randn(1, 2, 20, generator=generator).double()
    y = x @ true.mT + 0.1
    learned, held, noise = (Sums.empty(1, 20, 2) for _ in range(3))
    learned.add(x[:, :300], y[:, :300])
    held.add(x[:, 300:], y[:, 300:])
    found = fit(learned, held, free_bias=True)
    assert found.ridge == 1e-5
    torch.testing.assert_close(found.weight, true, rtol=1e-3, atol=1e-3)
    assert found.after < 1e-6 * found.before
    noise.add(x[:, :300], torch.randn(1, 300, 2, generator=generator).double())
    left = fit(noise, held, free_bias=True)
    assert left.ridge == 0
    assert not left.weight.any()
    assert fit(learned, None, free_bias=True).ridge == RIDGE


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu()).mean((2, 3))


def chain() -> tuple[Chain, Dimension, list[dict[str, Tensor]]]:
    torch.manual_seed(7)
    module = Chain().eval()
    nn.init.uniform_(module.norm.weight, -1, 2)
    batches = [{"x": torch.randn(5, 2, 6, 6)} for _ in range(3)]
    return module, find_coupling(module, batches[0]).dimensions[0], batches


def labelled(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(module(**batch), torch.arange(5) % 3, reduction="sum")


def test_magnitude_and_batch_norm_scale_are_those_of_the_units() -> None:
    module, dimension, _ = chain()
    for power in (1, 2):
        expected = [
            float(
                torch.cat([module.first.weight[u].flatten(), module.second.weight[:, u].flatten()]).detach().norm(power)
            )
            for u in range(4)
        ]
        np.testing.assert_allclose(importance.magnitude(module, dimension, power), expected, rtol=1e-5)
    scales = importance.batch_norm_scale(module, dimension)
    np.testing.assert_allclose(scales, module.norm.weight.detach().abs(), rtol=1e-6)
    members = {axis: m for axis, m in dimension.members.items() if "norm" not in axis[0]}
    bare = Dimension("first", "channels", members, ("first",), ("second",))
    with pytest.raises(PassError, match="first: no batch norm"):
        importance.batch_norm_scale(module, bare)


def test_gradient_scores_are_those_of_gradients_taken_one_after_another() -> None:
    module, dimension, batches = chain()
    found = {
        kind: importance.gradient_scores(module, [dimension], batches, labelled, kind)[0]  # type: ignore[arg-type]
        for kind in ("taylor", "fisher")
    }
    assert all(parameter.grad is None for parameter in module.parameters())
    by_batch: list[dict[str, Tensor]] = []
    squares: dict[str, Tensor] = {}
    for batch in batches:
        module.zero_grad()
        labelled(module, batch).backward()
        by_batch.append({name: parameter.grad.clone() for name, parameter in module.named_parameters()})
        for name, parameter in module.named_parameters():
            squares[name] = squares.get(name, 0) + (parameter.grad / 5) ** 2 * 5 / 15
    units = {"first.weight": 0, "norm.weight": 0, "norm.bias": 0, "second.weight": 1}
    for u in range(4):
        own = {name: (module.get_parameter(name).detach().select(a, u), a) for name, a in units.items()}
        sums = [sum(float((w * g[name].select(a, u)).sum()) for name, (w, a) in own.items()) for g in by_batch]
        taylor = sum(one**2 / 5 for one in sums) / 15
        fisher = sum(float((w**2 * squares[name].select(a, u)).sum()) / 2 for name, (w, a) in own.items())
        assert found["taylor"][u] == pytest.approx(taylor, rel=1e-4)
        assert found["fisher"][u] == pytest.approx(fisher, rel=1e-4)


def test_damage_and_activations_of_units_are_those_of_their_columns() -> None:
    x, weight = correlated(100, 6), torch.randn(3, 6, generator=torch.Generator().manual_seed(8)).double()
    own = reading_layer(x, weight, 2)
    for unit in range(3):
        columns = [2 * unit, 2 * unit + 1]
        lost = (x[:, columns] @ weight[:, columns].T).square().sum() / 100
        assert importance.damage([own])[unit] == pytest.approx(float(lost), rel=1e-6)
        rms = x[:, columns].square().sum(1).mean().sqrt()
        assert importance.activation_norm([own])[unit] == pytest.approx(float(rms), rel=1e-6)
    assert eliminate([own]).errors[0] <= importance.damage([own]).min()


def test_ranking_compares_globally_or_within_a_dimension() -> None:
    scores = np.array([3.0, 1.0, 2.0])
    found = importance.rank_units(scores)
    assert found.order.tolist() == [1, 2]
    assert found.errors.tolist() == [1, 3]
    np.testing.assert_allclose(importance.rank_units(10 * scores, "local").errors, [0.5, 1.5])
    assert np.array_equal(importance.random_scores(5, 3), importance.random_scores(5, 3))
    assert not np.array_equal(importance.random_scores(5, 3), importance.random_scores(5, 4))


def test_the_fisher_of_outputs_is_the_curvature_of_the_loss() -> None:
    module, _, batches = chain()
    found = importance.output_fisher(module, ["norm", "second"], batches[:1], importance.random_projection_loss(0))
    expected = torch.zeros(3).double()  # every pixel of an output counts 1 / 16 with a random sign
    torch.testing.assert_close(found["second"], expected + 1 / 16, rtol=1e-4, atol=0)
    assert found["norm"].shape == (4,)
    batch = {"x": torch.randn(20000, 2, 3, 3)}
    drawn = importance.output_fisher(module, ["second"], [batch], importance.draw_label_loss(1))["second"]
    probabilities = module(**batch).softmax(1).detach()
    spread = (probabilities * (1 - probabilities)).mean(0)  # the Fisher information of logits, its diagonal
    torch.testing.assert_close(drawn.float(), spread, rtol=0.05, atol=0)
