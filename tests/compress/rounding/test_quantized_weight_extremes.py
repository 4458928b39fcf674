"""Layers of denormal, zero, constant and huge weights: whatever rounds them leaves finite numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compress.formats.schemes import WeightScheme
from compress.rounding.autoround import autoround_block
from compress.rounding.awq import search_scales
from compress.rounding.gptq import factor_hessian, gptq_round
from compress.rounding.grid import round_to_grid
from compress.rounding.hqq import hqq_round
from compress.rounding.learn import RoundingSchedule
from compress.rounding.learned_batches import BlockBatch, Loss, relative_error, together
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.rounding.tune import tune_module

ROWS, INPUTS = 4, 16
SIZES = st.sampled_from([0.0, 1e-45, 1e-42, 1.2e-38, 1e-30, 1e-20, 1e-3, 1.0, 1e4, 1e18, 1e30])
SCHEMES = st.builds(
    WeightScheme, bits=st.integers(2, 8), group_size=st.sampled_from([-1, 4, 16]), symmetric=st.booleans()
)
LAYERS = st.tuples(SIZES, SIZES, st.sampled_from(["normal", "constant", "one", "rows", "columns"]), st.integers(0, 9))


def weight_of(size: float, other: float, how: str, seed: int) -> Tensor:
    """[ROWS, INPUTS] of one size, or of two: a single weight, a row or a column of the other."""
    rng = np.random.default_rng(seed)
    weight = np.full((ROWS, INPUTS), size) * (1.0 if how == "constant" else rng.normal(size=(ROWS, INPUTS)))
    place = {"one": (0, 0), "rows": (0,), "columns": (slice(None), 0)}.get(how)
    if place is not None:
        weight[place] = other
    return torch.from_numpy(weight.astype(np.float32))


def inputs_of(size: float, other: float, how: str, seed: int) -> Tensor:
    """Rows that a layer reads, whose squares still are numbers."""
    return torch.cat([weight_of(min(size, 1e15), min(other, 1e15), how, seed + i) for i in range(4)])


def check(weight: QuantizedWeight, scheme: WeightScheme) -> None:
    assert np.isfinite(weight.scales).all() and (weight.scales != 0).all()
    assert np.isfinite(weight.dequantize()).all()
    low, high = scheme.integer_range
    assert low <= int(weight.values.min()) and int(weight.values.max()) <= high


@pytest.mark.slow
@settings(max_examples=15)
@given(layer=LAYERS, read=LAYERS, scheme=SCHEMES)
def test_rounding_leaves_finite_weights(
    layer: tuple[float, float, str, int], read: tuple[float, float, str, int], scheme: WeightScheme
) -> None:
    weight, rows = weight_of(*layer), inputs_of(*read)
    gram = (rows.T @ rows).double().float() / len(rows)
    check(round_to_nearest(weight.numpy(), scheme.bits, scheme.group_size, scheme.symmetric), scheme)
    check(round_to_grid(weight, scheme, gram.diagonal()), scheme)
    check(hqq_round(weight, scheme), scheme)
    rounded = gptq_round(weight, factor_hessian(gram, 0.01), scheme)
    check(rounded.weight, scheme)
    assert np.isfinite([rounded.error, rounded.nearest_error]).all()
    found = search_scales([weight], [scheme], gram, rows.abs().mean(0))
    assert np.isfinite([found.error_before, found.error_after]).all() and found.error_after <= found.error_before
    if found.scales is not None:
        assert torch.isfinite(found.scales).all() and bool((found.scales > 0).all())
        assert torch.isfinite(weight * found.scales).all()


@settings(max_examples=12)
@given(layer=LAYERS, scheme=SCHEMES)
@example(layer=(1e30, 0.0, "normal", 0), scheme=WeightScheme(4, -1))
def test_learned_rounding_leaves_finite_weights(layer: tuple[float, float, str, int], scheme: WeightScheme) -> None:
    weight = weight_of(*layer)
    net = nn.Linear(INPUTS, ROWS).requires_grad_(False)
    net.weight.copy_(weight)
    start = {"": round_to_grid(weight, scheme)}
    rows = inputs_of(1.0, 1.0, "normal", 0)
    targets = net(rows)
    batches = together([BlockBatch(lambda: net(rows), lambda: targets, None, len(rows))], len(rows))
    schedule = RoundingSchedule(4, 0.01, 0.01, method="sign")
    learned, log = autoround_block({"": net}, start, batches, schedule, floats={"": weight})
    check(learned[""], scheme)
    assert np.isfinite(log.end_loss)


class Layer(nn.Module):
    """One linear layer with a bias, whose forward takes `x`."""

    def __init__(self, weight: Tensor, bias: float) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, ROWS)
        self.requires_grad_(False)
        self.linear.weight.copy_(weight)
        self.linear.bias.fill_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("kind", ["kl", "hidden"])
@settings(max_examples=12)
@given(layer=LAYERS, bias=SIZES, scheme=SCHEMES)
@example(layer=(1e30, 0.0, "normal", 0), bias=1e30, scheme=WeightScheme(4, -1))
@example(layer=(1e-42, 0.0, "normal", 0), bias=0.0, scheme=WeightScheme(4, -1))
@example(layer=(0.0, 0.0, "constant", 0), bias=1e-42, scheme=WeightScheme(4, -1))
def test_tuning_leaves_finite_weights(
    kind: Loss, layer: tuple[float, float, str, int], bias: float, scheme: WeightScheme
) -> None:
    weight = weight_of(*layer)
    student, teacher = Layer(weight, bias), Layer(weight, bias)
    start, batches = {"linear": round_to_grid(weight, scheme)}, [{"x": inputs_of(1.0, 1.0, "normal", 0)}]
    found, vectors, log = tune_module(
        student,
        {"linear": student.linear},
        start,
        batches,
        teacher,
        RoundingSchedule(4, 0.01, 0.01, 0.01),
        kind=kind,
        floats={"linear": weight},
    )
    check(found["linear"], scheme)
    assert all(torch.isfinite(vector).all() for vector in vectors.values())
    assert np.isfinite([log.start_loss, log.end_loss, *log.losses]).all() and log.end_loss <= log.start_loss


@pytest.mark.parametrize("power", [-10, 0, 70, 120])
def test_a_relative_error_is_the_same_for_larger_outputs(power: int) -> None:
    target = weight_of(1.0, 1.0, "normal", 0)
    out = target + 0.01 * weight_of(1.0, 1.0, "normal", 1)
    expected = float((out - target).double().square().sum() / target.double().square().sum())
    assert float(relative_error(out * 2.0**power, target * 2.0**power)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30])
def test_scales_of_tiny_weights_are_those_of_larger_ones(size: float) -> None:
    """What the search compares is relative, so that it does not see how large a layer is."""
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(64, INPUTS)).astype(np.float32))
    rows[:, 0] *= 30
    scheme, gram = WeightScheme(bits=3, group_size=-1, symmetric=True), rows.T @ rows / 64
    found = search_scales([weight_of(size, 0, "normal", 0)], [scheme], gram, rows.abs().mean(0))
    assert np.isfinite(found.error_after)
