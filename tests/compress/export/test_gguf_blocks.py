"""The blocks of a GGUF file are read by the gguf package as exactly what was stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import ExportError
from compress.export.gguf_blocks import as_stored, find_block_type, pack_blocks
from compress.formats.schemes import BLOCK_BITS, IQ4_NUMBERS, PRESETS, Scheme, WeightScheme
from compress.rounding.grid import round_to_grid
from compress.rounding.k_quants import round_to_k
from compress.rounding.quantized_weight import QuantizedWeight

PLAIN = [Scheme(WeightScheme(bits, group, symmetric)) for bits, group, symmetric in (
    (4, 32, True), (4, 32, False), (2, 64, False), (5, 32, True), (5, 128, False), (3, -1, True), (8, 32, True),
)]  # fmt: skip
BLOCKS = [PRESETS[name] for name in BLOCK_BITS]


@pytest.mark.parametrize("scheme", [*PLAIN, *BLOCKS], ids=lambda s: f"{s.name}-{s.weights.group_size}")
def test_the_package_reads_what_was_stored(scheme: Scheme) -> None:
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    kind, problem = find_block_type(scheme, 512)
    assert not problem
    made = (round_to_k if scheme in BLOCKS else round_to_grid)(weight, scheme.weights)
    stored = as_stored(made, kind)
    read = gguf.dequantize(pack_blocks(stored, kind), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(read, stored.dequantize())
    assert np.abs(read - made.dequantize()).max() <= (0 if scheme in BLOCKS else 2e-3 * np.abs(made.dequantize()).max())


@given(st.sampled_from(["IQ4_NL", "IQ4_XS"]), st.integers(0, 2**32 - 1))
def test_any_numbers_of_iq4_are_packed_bit_for_bit(name: str, seed: int) -> None:
    gguf = pytest.importorskip("gguf")
    rng, scheme = np.random.default_rng(seed), PRESETS[name].weights
    levels = rng.choice(np.array(IQ4_NUMBERS, np.int8), (2, 512))
    d = rng.normal(size=(2, 512 // scheme.block)).astype(np.float16)
    scales = rng.integers(-32, 32, (2, 16)).astype(np.int8)
    stored = {"d": d, "scales": scales} if name == "IQ4_XS" else {"d": d}
    real = np.repeat(d.astype(np.float32), scheme.block // 32, 1)
    real = real * scales if name == "IQ4_XS" else real
    weight = QuantizedWeight(levels, real, None, 4, 32, stored=stored)
    read = gguf.dequantize(pack_blocks(weight, name), gguf.GGMLQuantizationType[name])
    assert np.array_equal(read, weight.dequantize())


@pytest.mark.parametrize(
    ("scheme", "inputs", "words"),
    [
        (PRESETS["W4A16"].with_group(16), 64, "groups of 32, and 16 inputs share a scale; set group_size: 32"),
        (PRESETS["W4A16"].with_group(-1), 172, "172 inputs share a scale; ignore it"),
        (PRESETS["W8A16_ASYM"].with_group(32), 64, "no offsets beside more than 5 bits; set symmetric: true"),
        (PRESETS["W8A8"], 64, "W8A8: GGUF holds integer weights alone"),
        (PRESETS["FP8"], 64, "FP8: GGUF holds integer weights alone"),
        (PRESETS["Q4_K"], 384, "blocks of 256 inputs, which do not divide 384; set indivisible: fit"),
        (PRESETS["IQ4_NL"], 172, "IQ4_NL has blocks of 32 inputs, which do not divide 172; ignore it"),
    ],
)  # fmt: skip
def test_what_no_type_holds_is_refused(scheme: Scheme, inputs: int, words: str) -> None:
    kind, problem = find_block_type(scheme, inputs)
    assert not kind and words in problem


def test_a_scale_beyond_half_floats_is_refused() -> None:
    made = round_to_grid(torch.ones(1, 32) * 1e7, WeightScheme(4, 32))
    with pytest.raises(ExportError, match="does not fit into a half float"):
        as_stored(made, "Q4_0")
