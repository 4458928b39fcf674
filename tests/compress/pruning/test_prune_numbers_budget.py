"""Budgets against all choices there are; costs and layer times as functions of widths."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from compress.errors import PassError
from compress.graph.fast_forms import pad_input_channels
from compress.pruning.budget import Limit, Options, choose_widths, list_widths
from compress.pruning.costs import AxisSize, Cost, Term, macs_cost, parameters_cost
from compress.pruning.coupling import find_coupling
from compress.pruning.latency import (
    LatencyTable,
    LayerShape,
    chain,
    find_wanted_layers,
    grid,
    keep_form,
    latency_cost,
    measure,
    measure_scale,
)
from compress.pruning.surgery import remove
from compress.rounding.latency import round_all_roughly
from compress.rounding.qdq import write_state
from compress.timing.clock import Clock
from compress.timing.kept import Kept
from runtime.backends import find_backend


class Net(nn.Module):
    """Two dimensions that meet in one layer, and a depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.c = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.d = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).relu()).relu()
        return self.d(self.c(h).relu().mean((2, 3)))


SAMPLE = {"x": torch.zeros(1, 2, 8, 8)}


def random_problem(seed: int) -> tuple[list[Options], Cost]:
    """Three dimensions in a row, whose products are the cost."""
    rng = np.random.default_rng(seed)
    widths = np.array([2, 4, 6, 8])
    options = [Options(widths, np.append(np.sort(rng.exponential(size=3))[::-1], 0.0)) for _ in range(3)]
    sizes = [AxisSize(8, {d: 1}) for d in range(3)]
    factors = rng.integers(1, 5, 4)
    terms = [
        Term((sizes[0],), lambda s: float(factors[0] * s[0])),
        Term((sizes[0], sizes[1]), lambda s: float(factors[1] * s[0] * s[1])),
        Term((sizes[1], sizes[2]), lambda s: float(factors[2] * s[0] * s[1])),
        Term((sizes[2],), lambda s: float(factors[3] * s[0])),
    ]
    return options, Cost("MACs", (8, 8, 8), tuple(terms))


def damage_of(options: list[Options], widths: tuple[int, ...]) -> float:
    return sum(float(one.damage[list(one.widths).index(w)]) for one, w in zip(options, widths, strict=True))


def test_widths_are_near_the_best_of_all_and_mostly_are_it() -> None:
    n_best, ratios = 0, []
    for seed in range(30):
        options, cost = random_problem(seed)
        budget = cost.at((8, 8, 8)) * 0.45
        found = choose_widths(options, [Limit(cost, budget)])
        assert cost.at(found) <= budget
        every = itertools.product((2, 4, 6, 8), repeat=3)
        best = min(damage_of(options, widths) for widths in every if cost.at(widths) <= budget)
        ratios.append(damage_of(options, found) / best)
        n_best += ratios[-1] < 1 + 1e-9
    assert n_best >= 27
    assert max(ratios) < 1.3


def test_independent_dimensions_get_the_best_widths() -> None:
    rng = np.random.default_rng(0)
    widths = np.arange(8, 65, 8)
    options = [Options(widths, np.append(np.sort(rng.exponential(size=7))[::-1], 0.0)) for _ in range(4)]
    terms = [Term((AxisSize(64, {d: 1}),), lambda s, f=f: float(f * s[0])) for d, f in enumerate((1, 2, 3, 5))]  # type: ignore[misc]
    cost = Cost("ms", (64,) * 4, tuple(terms))
    budget = 0.5 * cost.at((64,) * 4)
    every = (w for w in itertools.product(widths, repeat=4) if cost.at(w) <= budget)
    best = min(damage_of(options, w) for w in every)
    assert damage_of(options, choose_widths(options, [Limit(cost, budget)])) == pytest.approx(best, rel=0.02)


def test_of_many_widths_those_near_the_choice_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    options = [Options(np.arange(1, 65), np.cumsum(rng.random(64))[::-1].copy()) for _ in range(4)]
    cost = Cost("units", (64,) * 4, tuple(Term((AxisSize(64, {d: 1}),), lambda sizes: sizes[0]) for d in range(4)))
    whole = damage_of(options, choose_widths(options, [Limit(cost, 130)]))
    monkeypatch.setattr("compress.pruning.budget.MOST_WIDTHS", 64)
    near = choose_widths(options, [Limit(cost, 130)])
    assert damage_of(options, near) == pytest.approx(whole, rel=0.02)


def test_a_wide_budget_leaves_everything_and_one_out_of_reach_says_the_best() -> None:
    options, cost = random_problem(0)
    assert choose_widths(options, [Limit(cost, cost.at((8, 8, 8)))]) == (8, 8, 8)
    least = cost.at((2, 2, 2))
    assert choose_widths(options, [Limit(cost, least)]) == (2, 2, 2)
    with pytest.raises(PassError, match=rf"cannot be met: the least that these widths reach is {least:.6g} of"):
        choose_widths(options, [Limit(cost, least - 1)])
    assert choose_widths(options, [Limit(cost, least - 1)], or_nearest=True) == (2, 2, 2)
    few = Cost("units", cost.n_units, (Term((AxisSize(8, {0: 1}),), lambda sizes: sizes[0]),))
    assert choose_widths(options, [Limit(few, 2), Limit(cost, cost.at((8, 8, 8)))], or_nearest=True)[0] == 2


def test_allowed_widths_are_multiples_and_the_whole() -> None:
    assert list_widths("d", 20, 8, 1).tolist() == [8, 16, 20]
    assert list_widths("d", 20, 8, 9).tolist() == [16, 20]
    assert list_widths("d", 6, 8, 1).tolist() == [6]
    with pytest.raises(PassError, match="d: min_units is 21, but the dimension has 20 units"):
        list_widths("d", 20, 8, 21)


def test_costs_are_those_of_the_model_that_surgery_leaves() -> None:
    module = Net()
    dimensions = find_coupling(module, SAMPLE).dimensions
    widths = [5, 7]
    parameters, macs = parameters_cost(module, dimensions), macs_cost(module, dimensions, SAMPLE)
    expected = parameters.at(widths), macs.at(widths)
    changed = parameters.at((8, 12)) + parameters.change((8, 12), 0, 5), parameters.at((5, 12))
    assert changed[0] == pytest.approx(changed[1])
    for one, width in zip(dimensions, widths, strict=True):
        remove(module, one, np.arange(one.n_units - width))
    assert expected[0] == sum(p.numel() for p in module.parameters())
    assert expected[1] == macs_cost(module, (), SAMPLE).at(())
    # [places] * weights: 64 * 5 * 2 * 9, 16 * 7 * 5 * 9, 16 * 7 * 9, 7 * 5
    assert expected[1] == 64 * 90 + 16 * 315 + 16 * 63 + 35


def test_wanted_layers_know_their_form_and_what_to_measure() -> None:
    module = Net()
    dimensions = find_coupling(module, SAMPLE).dimensions
    widths = [[4, 8], [4, 8, 12]]
    a, b, c, d = find_wanted_layers(module, dimensions, widths, SAMPLE)
    assert (a.outs, a.ins, b.outs, b.ins) == ((4, 8), (2,), (4, 8, 12), (4, 8))
    assert (c.outs, c.ins, c.shape.per_group, c.shape.groups) == ((4, 8, 12), (1,), 1, 12)
    assert (d.outs, d.ins, d.shape.kernel, d.shape.places) == ((5,), (4, 8, 12), (), ())
    assert (a.shape.places, b.shape.places, b.shape.kernel) == ((8, 8), (4, 4), (3, 3))
    size = AxisSize(100, {0: 1})
    assert grid(size, [range(1, 101)], [100], both=False) == tuple(range(1, 101))
    few = grid(size, [range(1, 101)], [100], both=True)
    assert (len(few), few[0], few[-1]) == (8, 1, 100)


def test_a_chain_runs_and_has_the_layers_it_says(tmp_path: Path) -> None:
    for shape, n_out, n_in, width in (
        (LayerShape((3, 3), (1, 1), (8, 8), 0, 1), 6, 4, 4),
        (LayerShape((3, 2), (2, 1), (5, 6), 1, 8), 6, 1, 6),
        (LayerShape((), (), (7,), 0, 1), 6, 4, 4),
    ):
        model, size, links = chain(shape, n_out, n_in)
        onnx.checker.check_model(ir.to_proto(model))
        assert len(model.graph.initializers) == 2 * links == 8
        ir.save(model, tmp_path / "chain.onnx")
        session = find_backend("onnxruntime-cpu").open(tmp_path / "chain.onnx", 1, {})
        assert size == ((1, width, *shape.places) if shape.kernel else (1, *shape.places, width))
        found = session.run({"x": np.ones(size, np.float32)})
        assert next(iter(found.values())).shape == size
    assert chain(LayerShape((), (), (1,), 0, 1), 2048, 1024)[2] == 1


def test_a_chain_whose_channels_are_padded_for_int8_runs(tmp_path: Path) -> None:
    """Three channels, as of an image: what pads them is named after the layers."""
    model, _, links = chain(LayerShape((3, 3), (1, 1), (8, 8), 0, 1), 6, 3)
    written = write_state(round_all_roughly(model), "u8s8")
    assert pad_input_channels(written) == 2 * links
    ir.save(written, tmp_path / "chain.onnx")
    find_backend("onnxruntime-cpu").open(tmp_path / "chain.onnx", 1, {}).close()


class Stopped(Clock):
    """One that times nothing more."""

    def time_each(self, *_: Any) -> list[float]:
        raise AssertionError("it is known")


@pytest.mark.slow
def test_a_table_is_measured_interpolated_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.pruning.latency.BUDGET_S", 0.0)
    module = Net()
    dimensions = find_coupling(module, SAMPLE).dimensions
    wanted = find_wanted_layers(module, dimensions, [[8], [12]], SAMPLE)
    clock = Clock("onnxruntime-cpu", kept=Kept(tmp_path))
    tables = measure(wanted, clock, keep_form, "float")
    assert len(tables) == len(wanted)
    assert all(table.ms[-1][-1] > 0 for table in tables)
    assert measure(wanted, Stopped(clock.backend, kept=clock.kept), keep_form, "float") == tables
    table = LatencyTable(wanted[0].shape, (4, 8), (2, 4), ((1.0, 2.0), (3.0, 6.0)))
    assert table.at((8, 4)) == 6
    assert table.at((6, 3)) == 3


def test_predicted_time_is_the_whole_less_what_its_layers_save() -> None:
    module = Net()
    dimensions = find_coupling(module, SAMPLE).dimensions
    wanted = find_wanted_layers(module, dimensions, [[4, 8], [12]], SAMPLE)
    tables = [
        LatencyTable(one.shape, one.outs, one.ins, tuple(tuple(0.1 * o + 0.01 * i for i in one.ins) for o in one.outs))
        for one in wanted
    ]
    cost = latency_cost(2.0, wanted, tables, (8, 12))
    assert cost.at((8, 12)) == 2.0
    assert cost.at((4, 12)) == pytest.approx(2.0 - 0.4 - 0.04)  # a gives four less, b reads four less
    scaled = latency_cost(2.0, wanted, tables, (8, 12), measure_scale(2.0, cost.at((4, 12)), 1.5))
    assert scaled.at((4, 12)) == pytest.approx(1.5)
    assert measure_scale(2.0, 1.9, 0.1) == 2
    assert measure_scale(2.0, 2.0, 1.9) == 1


def test_two_limits_hold_at_once_and_the_choice_is_near_the_best_of_all() -> None:
    n_best, ratios = 0, []
    for seed in range(20):
        options, cost = random_problem(seed)
        _, other = random_problem(seed + 100)
        limits = [Limit(cost, cost.at((8, 8, 8)) * 0.5), Limit(other, other.at((8, 8, 8)) * 0.4)]
        found = choose_widths(options, limits)
        assert all(limit.holds(found) for limit in limits)
        every = (w for w in itertools.product((2, 4, 6, 8), repeat=3) if all(limit.holds(w) for limit in limits))
        ratios.append(damage_of(options, found) / min(damage_of(options, widths) for widths in every))
        n_best += ratios[-1] < 1 + 1e-9
    assert n_best >= 17
    assert max(ratios) < 1.3
