"""HQQ and FP8: weights rounded without data."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import streaming
import torch
from torch import Tensor

from compress.context import PassResult
from compress.formats.schemes import PRESETS, WeightScheme
from compress.formats.targets import TARGETS
from compress.passes import Rtn
from compress.passes.hqq import Hqq
from compress.rounding.grid import fit_shared, round_to_grid
from compress.rounding.hqq import POWER, hqq_round
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import LARGEST_FLOAT8
from compress.work import apply_pass

FP8 = PRESETS["FP8"].weights


def heavy(out: int = 12, n: int = 64) -> Tensor:
    """Weights with a few that are far out."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(out, n, generator=generator) * torch.rand(out, n, generator=generator).clamp_min(0.05) ** -1


def error(weight: Tensor, rounded: QuantizedWeight) -> np.ndarray:
    """sum |W - Q|^p for each group."""
    difference = np.abs(weight.numpy() - rounded.dequantize()) ** POWER
    return difference.reshape(len(weight), rounded.scales.shape[1], -1).sum(2)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [-1, 16])
def test_no_group_is_worse_than_rounded_to_the_least_square(bits: int, symmetric: bool, group_size: int) -> None:
    weight, scheme = heavy(), WeightScheme(bits, group_size, symmetric)
    found, plain = hqq_round(weight, scheme), round_to_grid(weight, scheme)
    assert (error(weight, found) <= error(weight, plain) * (1 + 1e-5)).all()
    if bits < 8:
        assert error(weight, found).sum() < error(weight, plain).sum()
    low, high = scheme.integer_range
    assert found.values.min() >= low
    assert found.values.max() <= high
    assert (found.zero_points is None) == symmetric


def test_the_size_of_the_weights_does_not_matter() -> None:
    one, other = (hqq_round(heavy() * factor, WeightScheme(3, 16)) for factor in (1.0, 2.0**-10))
    np.testing.assert_array_equal(one.values, other.values)


def applied(one: Hqq | Rtn) -> PassResult:
    surroundings = replace(streaming.context(), target=TARGETS["transformers"])
    return apply_pass(one, streaming.streamed(streaming.llama(layers=2)), surroundings)


def test_the_pass_needs_no_data_and_rounds_all_but_the_head() -> None:
    result = applied(Hqq(bits=4, group_size=16))
    assert len(result.model.quantized_layers()) == 14
    assert {one.reason for one in result.decisions if one.action == "w4"} == {"W4A16, group 16"}
    assert next(one.reason for one in result.decisions if one.layer == "lm_head") == "ignore: lm_head"


def test_a_fallback_is_noted() -> None:
    config = {"bits": 4, "group_size": 32, "indivisible": "fit", "targets": ("re:.*down_proj",)}
    texts = [note.text for note in applied(Hqq(**config)).notes]  # type: ignore[arg-type]
    assert (
        texts[0]
        == "hqq: model.layers.0.mlp.down_proj has 48 inputs, which group_size 32 does not divide: group_size 24"
    )


@pytest.mark.parametrize("group_size", [-1, 0])
def test_fp8_weights_are_those_of_ml_dtypes(group_size: int) -> None:
    weight = heavy()
    weight[3] = 0
    found = round_to_grid(weight, replace(FP8, group_size=group_size))
    expected = (weight.numpy() / found.scales).astype(ml_dtypes.float8_e4m3fn)
    assert found.values.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(found.values.view(np.uint8), expected.view(np.uint8))
    assert found.scales.shape == ((len(weight), 1) if group_size else (1, 1))
    np.testing.assert_array_equal(found.dequantize(), found.values.astype(np.float32) * found.scales)
    peak = np.abs(weight.numpy()).max(1, keepdims=True) if group_size else np.abs(weight.numpy()).max()
    scales = np.where(peak > 0, peak / np.float32(LARGEST_FLOAT8), 1)
    ranged = (weight.numpy() / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    assert np.square(found.dequantize() - weight.numpy()).sum() <= np.square(ranged - weight.numpy()).sum() * (1 + 1e-6)


def test_fp8_has_groups_that_divide_and_no_infinity() -> None:
    with pytest.raises(ValueError, match="group_size 33 does not divide 64 inputs"):
        round_to_grid(heavy(), replace(FP8, group_size=33))
    with pytest.raises(ValueError, match="NaN or Inf"):
        round_to_grid(torch.full((2, 2), torch.inf), FP8)


def test_rtn_writes_fp8_and_static_input_scales() -> None:
    result = applied(Rtn(scheme="FP8_DYNAMIC"))
    weight = result.model.store.quantized("model.layers.0.mlp.up_proj")
    assert weight is not None
    assert weight.values.dtype == ml_dtypes.float8_e4m3fn
    assert not result.model.activation_scales
    surroundings = replace(streaming.context(streaming.texts()), target=TARGETS["vllm"])
    static = apply_pass(Rtn(scheme="FP8"), streaming.streamed(streaming.llama(layers=2)), surroundings).model
    assert set(static.activation_scales) == set(static.quantized_layers())
    assert static.store.quantized("model.layers.0.mlp.up_proj").scales.shape == (1, 1)
    net = streaming.llama(layers=2)
    seen: list[Tensor] = []
    net.get_submodule("model.layers.0.self_attn.q_proj").register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    feeds = streaming.together(streaming.texts())
    with torch.no_grad():
        net(**feeds)
    peak = float(seen[0][feeds["attention_mask"].bool()].abs().max())
    assert static.activation_scales["model.layers.0.self_attn.q_proj"] == pytest.approx(peak / LARGEST_FLOAT8, rel=1e-4)


def vllm_rounds_again(values: np.ndarray, scales: np.ndarray, largest: float) -> np.ndarray:
    """What vLLM keeps of one of the layers that it fuses: its values, rounded once more to the largest scale."""
    again = np.float32(values.astype(np.float32) * scales) / np.float32(largest)
    return again.astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    "fused", [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")]
)
def test_layers_that_vllm_fuses_share_the_one_scale_of_fp8(fused: tuple[str, ...]) -> None:
    net = streaming.llama(layers=2)
    names = [f"model.layers.1.{name}" for name in fused]
    for factor, name in enumerate(names, start=1):
        net.get_submodule(name).weight.data *= factor
    alone = [round_to_grid(net.get_submodule(name).weight.detach(), FP8) for name in names]
    assert len({one.scales.item() for one in alone}) == len(names)
    largest = max(one.scales.item() for one in alone)  # what vLLM would compute all of them with
    shared = fit_shared([net.get_submodule(name).weight.detach() for name in names], FP8)
    changed = [vllm_rounds_again(one.values, one.scales, largest).tobytes() != one.values.tobytes() for one in alone]
    assert changed.count(True) == len(names) - 1  # why they share one
    surroundings = replace(streaming.context(streaming.texts()), target=TARGETS["vllm"])
    floats = [net.get_submodule(name).weight.detach().numpy().copy() for name in names]
    model = apply_pass(Rtn(scheme="FP8"), streaming.streamed(net), surroundings).model
    for name, matrix in zip(names, floats, strict=True):
        written = model.store.quantized(name)
        assert written.scales.tolist() == [[shared]]
        expected = (matrix / np.float32(shared)).astype(ml_dtypes.float8_e4m3fn)
        assert written.values.tobytes() == expected.tobytes()
        assert vllm_rounds_again(written.values, written.scales, shared).tobytes() == written.values.tobytes()
    other = model.store.quantized("model.layers.1.mlp.down_proj")
    matrix = net.get_submodule("model.layers.1.mlp.down_proj").weight.detach()
    assert other.scales.item() == round_to_grid(matrix, FP8).scales.item()


def test_a_layer_that_stays_float_has_no_part_in_the_shared_scale() -> None:
    net = streaming.llama(layers=1)
    net.get_submodule("model.layers.0.self_attn.q_proj").weight.data *= 9
    surroundings = replace(streaming.context(streaming.texts()), target=TARGETS["vllm"])
    alone = Rtn(scheme="FP8", ignore=("re:.*q_proj", "lm_head"))
    model = apply_pass(alone, streaming.streamed(net), surroundings).model
    found = {model.store.quantized(f"model.layers.0.self_attn.{name}_proj").scales.item() for name in "kv"}
    both = [net.get_submodule(f"model.layers.0.self_attn.{name}_proj").weight.detach() for name in "kv"]
    assert found == {np.float32(fit_shared(both, FP8))}
