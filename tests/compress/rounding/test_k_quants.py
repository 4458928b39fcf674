"""llama.cpp's formats: what is stored is what is dequantized, importance counts, GPTQ keeps the grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.formats.schemes import BLOCK_BITS, IQ4_NUMBERS, PRESETS
from compress.rounding.gptq import GptqRules, factor_hessian
from compress.rounding.k_quants import gptq_round_k, round_to_k
from compress.rounding.numbers import IQ4

NAMES = list(BLOCK_BITS)
IQ4_NAMES = ("IQ4_NL", "IQ4_XS")


def weights(rows: int = 8, inputs: int = 512, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 0.03


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_what_is_dequantized(name: str) -> None:
    scheme = PRESETS[name].weights
    made = round_to_k(weights(), scheme)
    size, n_groups = scheme.group_size, scheme.block // scheme.group_size
    d = np.repeat(made.stored["d"].astype(np.float32), n_groups, 1)
    if name != "IQ4_NL":
        d *= made.stored["scales"].astype(np.float32)
    by_hand = made.values.astype(np.float32) * np.repeat(d, size, 1)
    if not scheme.symmetric:
        m = np.repeat(made.stored["m"].astype(np.float32), n_groups, 1) * made.stored["offsets"].astype(np.float32)
        by_hand -= np.repeat(m, size, 1)
        assert made.stored["offsets"].min() >= 0
    assert np.array_equal(made.dequantize(), by_hand)
    if name in IQ4_NAMES:
        assert set(np.unique(made.values)) <= set(IQ4_NUMBERS)
    else:
        assert scheme.integer_range[0] <= made.values.min() and made.values.max() <= scheme.integer_range[1]


def test_more_bits_leave_less_error_and_importance_is_heeded() -> None:
    weight = weights()
    importance = torch.rand(512, generator=torch.Generator().manual_seed(2)) ** 4
    errors = []
    for name in ("Q2_K", "Q3_K", "IQ4_XS", "IQ4_NL", "Q5_K", "Q6_K"):
        scheme = PRESETS[name].weights
        plain, weighed = (torch.from_numpy(round_to_k(weight, scheme, i).dequantize()) for i in (None, importance))
        errors.append(float((weight - plain).square().sum()))
        of_both = [float(((weight - made).square() * importance).sum()) for made in (plain, weighed)]
        assert of_both[1] < 0.95 * of_both[0]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", ["Q3_K", "Q4_K", *IQ4_NAMES])
def test_gptq_is_the_nearest_where_inputs_are_independent_and_better_where_they_are_not(name: str) -> None:
    weight, scheme = weights(16, 256), PRESETS[name].weights
    alone = gptq_round_k(weight, factor_hessian(torch.eye(256), 0.01), scheme, GptqRules(sweeps=0))
    nearest = round_to_k(weight, scheme, torch.full((256,), 1.001))
    assert np.array_equal(alone.weight.dequantize(), nearest.dequantize())
    x = torch.randn(600, 32, generator=torch.Generator().manual_seed(1)) @ torch.randn(32, 256) + torch.randn(600, 256)
    together = gptq_round_k(weight, factor_hessian(x.T @ x / 600, 0.01), scheme, GptqRules())
    assert together.error < 0.7 * together.nearest_error


@given(st.lists(st.floats(-140, 140, width=32), min_size=1, max_size=40))
def test_numbers_of_a_table_are_the_nearest(values: list[float]) -> None:
    x, table = torch.tensor(values), torch.tensor(IQ4_NUMBERS, dtype=torch.float32)
    found = IQ4.nearest_(x.clone())
    assert set(found.tolist()) <= set(table.tolist())
    assert torch.equal((found - x).abs(), (x[:, None] - table).abs().amin(1))


def test_weights_without_a_range_and_without_an_end() -> None:
    scheme = PRESETS["Q4_K"].weights
    zeros = torch.zeros(2, 256)
    for name in NAMES:
        assert not round_to_k(zeros, PRESETS[name].weights).dequantize().any()
    zeros[1, 5] = 3.0
    assert np.allclose(round_to_k(zeros, scheme).dequantize(), zeros, atol=0.01)
    with pytest.raises(ValueError, match="which do not divide 384"):
        round_to_k(torch.zeros(2, 384), scheme)
    with pytest.raises(ValueError, match="NaN or Inf"):
        round_to_k(torch.full((2, 256), torch.nan), scheme)
    with pytest.raises(ValueError, match="half floats"):
        round_to_k(weights(2, 256) * 1e12, scheme)
