"""Weight rounding against loops, ONNX Runtime's DequantizeLinear and relations between widths and groups."""

from __future__ import annotations

import graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.formats.schemes import WeightScheme
from compress.graph.layers import find_layers
from compress.rounding.grid import round_to_grid
from compress.rounding.int8 import mean_shift
from compress.rounding.qdq import write_state
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.rounding.state import GraphState

WEIGHT = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)


def error(weight: np.ndarray, rounded: QuantizedWeight) -> float:
    return float(np.square(rounded.dequantize() - weight).sum())


def slow_group(group: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    """One group, rounded number by number."""
    if symmetric:
        top = 2 ** (bits - 1) - 1
        scale = np.float32(max(abs(float(w)) for w in group) / top) or np.float32(1)
        return np.array([min(max(round(float(w / scale)), -top), top) * scale for w in group], np.float32)
    top = 2**bits - 1
    low, high = min(0.0, float(group.min())), max(0.0, float(group.max()))
    scale = np.float32((high - low) / top) or np.float32(1)
    zero = round(-low / scale)
    quantized = [min(max(round(float(w / scale)) + zero, 0), top) for w in group]
    return np.array([(level - zero) * scale for level in quantized], np.float32)


BITS, SEEDS = st.integers(2, 8), st.integers(0, 2**32 - 1)
GROUPS = st.tuples(st.integers(1, 4), st.integers(1, 24))
"""Groups of a row, and inputs of a group."""


def weight_of(rows: int, groups: tuple[int, int], size: float, seed: int) -> np.ndarray:
    """Weights of about `size`, some of them zero and the first group wholly so, [rows, inputs]."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(rows, groups[0] * groups[1])) * size * (rng.random((rows, 1)) + 0.1)
    weight[rng.random(weight.shape) < 0.2] = 0
    weight[0, : groups[1]] = 0
    return weight.astype(np.float32)


@given(BITS, st.booleans(), st.integers(1, 5), GROUPS, st.sampled_from([1e-15, 1e-3, 1.0, 1e15]), SEEDS)
def test_groups_are_rounded_as_a_loop_rounds_them(
    bits: int, symmetric: bool, rows: int, groups: tuple[int, int], size: float, seed: int
) -> None:
    """No weight moves by more than half a step, and a zero does not move at all."""
    weight, width = weight_of(rows, groups, size, seed), groups[1]
    rounded = round_to_nearest(weight, bits, -1 if groups[0] == 1 else width, symmetric)
    found = rounded.dequantize()
    for row in range(rows):
        for group, start in enumerate(range(0, weight.shape[1], width)):
            own = slice(start, start + width)
            np.testing.assert_allclose(found[row, own], slow_group(weight[row, own], bits, symmetric), rtol=1e-6)
            assert np.abs(found[row, own] - weight[row, own]).max() <= rounded.scales[row, group] * 0.50001
    searched = round_to_grid(torch.from_numpy(weight), WeightScheme(bits, width, symmetric), signed=False)
    assert not found[weight == 0].any() and not searched.dequantize()[weight == 0].any()
    assert error(weight, searched) <= error(weight, rounded) * 1.00001


def test_what_is_on_the_grid_stays() -> None:
    grid = np.random.default_rng(0).integers(-7, 8, (4, 32)).astype(np.float32)
    grid[:, 0] = 7
    assert error(grid * 0.25, round_to_nearest(grid * 0.25, 4)) == 0
    assert error(np.zeros((2, 8), np.float32), round_to_nearest(np.zeros((2, 8), np.float32), 8)) == 0


@pytest.mark.parametrize("symmetric", [True, False])
def test_more_bits_smaller_groups_and_a_search_leave_less_error(symmetric: bool) -> None:
    def search(bits: int, group: int) -> QuantizedWeight:
        return round_to_grid(torch.from_numpy(WEIGHT), WeightScheme(bits, group, symmetric), signed=False)

    errors = {
        (bits, group, way is search): error(WEIGHT, way(bits, group))
        for bits in (4, 8)
        for group in (-1, 32, 16)
        for way in (search, lambda bits, group: round_to_nearest(WEIGHT, bits, group, symmetric))
    }
    for group in (-1, 32, 16):
        assert errors[8, group, True] < errors[4, group, True] <= errors[4, group, False]
    for bits in (4, 8):
        assert errors[bits, 16, True] <= errors[bits, 32, True] <= errors[bits, -1, True]


def test_integers_keep_to_their_range() -> None:
    weight = np.append(WEIGHT, -10 * np.ones((6, 64), np.float32), axis=0)
    assert np.abs(round_to_nearest(weight, 4).values).max() == 7
    asymmetric = round_to_nearest(weight, 4, 32, symmetric=False)
    assert asymmetric.values.dtype == np.uint8
    assert asymmetric.values.max() <= 15
    assert asymmetric.scales.shape == (12, 2)
    assert np.abs(round_to_nearest(weight, 8).values).max() <= 127


def test_convolution_weights_keep_their_shape() -> None:
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    rounded = round_to_nearest(weight, 8)
    assert rounded.values.shape == weight.shape
    assert rounded.scales.shape == (4, 1)
    assert np.abs(rounded.dequantize() - weight).max() <= rounded.scales.max() / 2 + 1e-6


def test_vanishing_weights_do_not_divide_by_zero() -> None:
    rounded = round_to_nearest(np.full((1, 4), 1e-44, np.float32), 8)
    assert np.isfinite(rounded.dequantize()).all()


@pytest.mark.parametrize("group_size", [48, 0])
def test_a_group_that_does_not_divide_is_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"group_size {group_size} does not divide 64 inputs"):
        round_to_nearest(WEIGHT, 4, group_size)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = WEIGHT.copy()
    weight[2, 3] = value
    with pytest.raises(ValueError, match="NaN or Inf"):
        round_to_nearest(weight, 8)


@settings(max_examples=25)
@given(st.sampled_from(["MatMul", "Gemm", "Gemm transB"]), BITS, st.booleans(), st.sampled_from([-1, 16, 32]), SEEDS)
def test_onnx_runtime_dequantizes_what_we_wrote(
    op: str, bits: int, symmetric: bool, group_size: int, seed: int
) -> None:
    """The weight that reaches the product, a MatMul whatever it was, is `dequantize()`, bit for bit."""
    model = graphs.one_layer(64, 1 + seed % 9, op, seed)
    (layer,) = find_layers(model)
    weight = round_to_nearest(layer.matrix(), bits, group_size, symmetric)
    written = write_state(GraphState(model, weight_only=["fc"], weights={"fc": weight}), "u8s8")
    (again,) = [node for node in written.graph if node.op_type == "MatMul"]
    stored = again.inputs[1]
    assert stored is not None
    assert stored.name
    stored.type = ir.TensorType(ir.DataType.FLOAT)
    written.graph.outputs.append(stored)
    (outputs,) = graphs.run_batches(graphs.open_session(written, 1, optimize=False), graphs.vectors(64, 1))
    np.testing.assert_array_equal(outputs[stored.name], weight.dequantize().T)


def test_the_shift_of_an_exact_weight_is_zero() -> None:
    assert not mean_shift(WEIGHT, WEIGHT, np.random.default_rng(0).normal(size=64)).any()


@pytest.mark.parametrize("groups", [1, 2])
def test_the_shift_is_what_rounding_adds_to_the_mean_output(groups: int) -> None:
    """Against a 1x1 convolution of the inputs themselves, group by group."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(4, 6 // groups, 1, 1)).astype(np.float32)
    rounded = round_to_nearest(weight, 4).dequantize()
    inputs = rng.normal(2, 1, (50, 6)).astype(np.float32)
    expected = np.zeros(4)
    for out in range(4):
        first = out // (4 // groups) * (6 // groups)
        part = inputs[:, first : first + 6 // groups].astype(np.float64)
        expected[out] = (part @ (rounded - weight)[out, :, 0, 0].astype(np.float64)).mean()
    shift = mean_shift(weight, rounded, inputs.mean(axis=0, dtype=np.float64), groups)
    np.testing.assert_allclose(shift, expected, atol=1e-9)
