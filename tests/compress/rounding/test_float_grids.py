"""Grids of FP4 and FP8: numbers and scales are those of the formats, found better than the range gives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor, nn

from compress.formats.schemes import PRESETS, WeightScheme
from compress.rounding.autoround import autoround_block
from compress.rounding.awq import search_scales
from compress.rounding.fake import LearnedWeight, ShiftedWeight
from compress.rounding.gptq import factor_hessian, gptq_round, gptq_round_together, output_error
from compress.rounding.grid import fit_grid, fit_shared, round_to_grid
from compress.rounding.learn import RoundingSchedule
from compress.rounding.learned_batches import BlockBatch, together
from compress.rounding.numbers import E2M1, E4M3, Numbers, ScaleRule
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.tune import student_of

NAMES = ["NVFP4A16", "MXFP4A16", "MXFP8A16", "FP8_BLOCK", "FP8_DYNAMIC", "FP8"]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def weight_of(rows: int = 160, inputs: int = 256, seed: int = 0) -> Tensor:
    """Rows and columns of unequal size; blocks of 128 do not divide the rows."""
    rng = np.random.default_rng(seed)
    sizes = np.geomspace(0.01, 1, rows)[:, None] * np.geomspace(0.5, 2, inputs)
    return torch.from_numpy((rng.normal(size=(rows, inputs)) * sizes).astype(np.float32))


def gram_of(n: int = 256, seed: int = 1) -> Tensor:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy((rng.normal(size=(600, n)) @ rng.normal(size=(n, n)) * np.geomspace(0.1, 3, n)).astype("f4"))
    return x.T @ x / len(x)


def scheme_of(name: str) -> WeightScheme:
    return PRESETS[name].weights


def minmax(weight: Tensor, name: str) -> Tensor:
    """The weight as compressed-tensors' own range rounds it."""
    arguments = preset_name_to_scheme(name, ["Linear"]).weights
    whole = generate_gparam(weight.min(), weight.max()) if name.startswith("NV") else None
    if name == "FP8_BLOCK":
        padded = nn.functional.pad(weight, (0, 0, 0, -len(weight) % 128))
        groups, axes = padded.reshape(-1, 128, weight.shape[1] // 128, 128), (1, 3)
    elif arguments.group_size:
        groups, axes = weight.unflatten(1, (-1, arguments.group_size)), (2,)
    else:
        groups, axes = weight, (0, 1) if name == "FP8" else (1,)
    low, high = groups.amin(axes, keepdim=name == "FP8_DYNAMIC"), groups.amax(axes, keepdim=name == "FP8_DYNAMIC")
    scales, zeros = calculate_qparams(low, high, arguments, whole)
    return fake_quantize(weight, scales, zeros, arguments, global_scale=whole)


def check(weight: QuantizedWeight, name: str) -> None:
    """Its numbers and scales are such that a file of the format holds them."""
    scheme = scheme_of(name)
    numbers = torch.from_numpy(weight.values.astype(np.float32))
    if scheme.bits == 4:
        assert torch.isin(numbers.abs(), FP4).all()
    scales = torch.from_numpy(weight.scales)
    assert (scales > 0).all()
    if scheme.scales == "e4m3":
        bytes_ = torch.from_numpy(weight.stored["scales"]).view(torch.float8_e4m3fn).float()
        assert torch.equal(scales, bytes_ / torch.from_numpy(weight.stored["global_scale"]))
    elif scheme.scales == "e8m0":
        exponents = torch.from_numpy(weight.stored["exponents"]).int() - 127
        assert torch.equal(scales, torch.exp2(exponents.float()))
    elif scheme.rows > 1:
        for start in range(0, len(scales), scheme.rows):
            assert (scales[start : start + scheme.rows] == scales[start]).all()


def test_numbers_round_to_the_nearest_and_places_count_them() -> None:
    x = torch.randn(20000) * 3
    every = torch.cat([FP4, -FP4])
    nearest = every[(x[:, None] - every).abs().argmin(1)]
    assert torch.equal(E2M1.nearest_(x.clone()), nearest)
    wide = torch.cat([x * 100, x / 1e4])
    assert torch.equal(E4M3.nearest_(wide.clone()), wide.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    bytes_ = torch.arange(127, dtype=torch.uint8)
    assert torch.equal(E4M3.place(bytes_.view(torch.float8_e4m3fn).float()), bytes_.float())
    assert torch.equal(E2M1.place(-FP4), -torch.arange(8.0))
    for numbers in (E2M1, E4M3, Numbers(-8, 7)):
        inside = x.clamp(numbers.low, numbers.high)
        torch.testing.assert_close(numbers.value(numbers.place(inside)), inside)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert E2M1.nearest_(ties.clone()).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("kind", ["e4m3", "e8m0"])
def test_scales_go_to_the_nearest_that_a_file_holds(kind: str) -> None:
    rule = ScaleRule(kind, global_scale=37.0)  # type: ignore[arg-type]
    held = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 37
    if kind == "e8m0":
        held = torch.exp2(torch.arange(-20.0, 20))
    x = torch.rand(2000) * 10 + 1e-4
    assert torch.equal(rule.nearest(x), held[(x[:, None] - held).abs().argmin(1)])
    assert torch.equal(rule.nearest(held), held)


@pytest.mark.parametrize("name", NAMES)
def test_searched_scales_leave_no_more_error_than_the_library_s_range(name: str) -> None:
    weight, importance = weight_of(), gram_of().diagonal()
    found = round_to_grid(weight, scheme_of(name), importance)
    check(found, name)
    searched = ((torch.from_numpy(found.dequantize()) - weight) ** 2 * importance).sum()
    ranged = ((minmax(weight, name) - weight) ** 2 * importance).sum()
    assert searched <= ranged * {"NVFP4A16": 0.8, "MXFP4A16": 0.999}.get(name, 1 + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gptq_makes_less_output_error_with_scales_that_a_file_holds(name: str) -> None:
    weight, gram = weight_of(), gram_of()
    found, error, nearest = gptq_round(weight, factor_hessian(gram, 0.01), scheme_of(name))
    check(found, name)
    assert error < 0.8 * nearest
    assert error == pytest.approx(output_error(weight, torch.from_numpy(found.dequantize()), gram), rel=0.3)


@pytest.mark.parametrize("name", ["NVFP4A16", "FP8"])
def test_weights_that_one_engine_fuses_share_what_is_one_for_the_tensor(name: str) -> None:
    weights, scheme = [weight_of(seed=1), weight_of(96, seed=2) * 5], scheme_of(name)
    shared = fit_shared(weights, scheme)
    alone = [round_to_grid(weight, scheme, shared=shared) for weight in weights]
    learned = [part.weight for part in gptq_round_together(weights, factor_hessian(gram_of(), 0.01), scheme)]
    for first, second in (alone, learned):
        whole = [w.stored["global_scale"][0] if name == "NVFP4A16" else w.scales[0, 0] for w in (first, second)]
        assert whole[0] == whole[1]


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-20, 1e18, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_extremes_stay_finite(size: float, name: str) -> None:
    weight = torch.zeros(4, 128)
    weight[1:] = torch.randn(3, 128) * size
    weight[3] = 0.01
    for rounded in (
        round_to_grid(weight, scheme_of(name)),
        gptq_round(weight, factor_hessian(gram_of(128), 0.01), scheme_of(name)).weight,
    ):
        check(rounded, name)
        assert np.isfinite(rounded.dequantize()).all()


def test_awq_finds_scales_for_floats() -> None:
    gram, weight = gram_of(), weight_of()
    magnitude = gram.diagonal().sqrt()
    found = search_scales([weight], [scheme_of("MXFP4A16")], gram, magnitude, steps=5)
    assert found.scales is not None and found.error_after < found.error_before


@pytest.mark.parametrize("fake", [LearnedWeight, ShiftedWeight])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_learned_is_what_is_stored(fake: type, name: str) -> None:
    weight, scheme = weight_of(130, 128), scheme_of(name)
    start = round_to_grid(weight, scheme)
    learned = fake(start, weight, scheme=scheme)
    assert torch.equal(learned(), torch.from_numpy(start.dequantize()))
    learned().square().sum().backward()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in (*learned.rounding(), *learned.scaling()):
            if parameter.requires_grad:
                assert parameter.grad is not None and parameter.grad.abs().sum() > 0
                parameter += torch.randn(parameter.shape, generator=generator) * 0.3
    learned.confine()
    frozen = learned.freeze()
    check(frozen, name)
    assert not np.array_equal(frozen.values, start.values)
    assert torch.equal(learned(), torch.from_numpy(frozen.dequantize()))


def test_floats_are_not_learned_as_whole_numbers() -> None:
    with pytest.raises(ValueError, match="are not the numbers of its scheme"):
        LearnedWeight(round_to_grid(weight_of(), scheme_of("NVFP4A16")))


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16"])
def test_learning_brings_a_layer_closer(name: str) -> None:
    torch.manual_seed(0)
    weight, scheme = weight_of(32, 64), scheme_of(name)
    net = nn.Linear(64, 32, bias=False).requires_grad_(False)
    net.weight.copy_(weight)
    mix = torch.randn(8, 64)  # few directions hold all: what one weight gets wrong others can make up for
    inputs = [torch.randn(256, 8) @ mix for _ in range(4)]
    targets = [net(x) for x in inputs]
    batches = together(
        [BlockBatch(lambda x=x: net(x), lambda y=y: y, None, 256) for x, y in zip(inputs, targets, strict=True)],  # type: ignore[misc]
        256,
    )
    start = {"net": round_to_grid(weight, scheme)}
    schedule = RoundingSchedule(100, 0.01, 0.01, method="sign")
    weights, log = autoround_block(
        {"net": net}, start, batches, schedule, floats={"net": weight}, schemes={"net": scheme}
    )
    assert log.end_loss < 0.85 * log.start_loss
    check(weights["net"], name)
    assert student_of(net, {"": net}, {"": start["net"]}, {}, {}, schemes={"": scheme}).parameters()


def test_a_rough_fit_is_near_the_full_one() -> None:
    weight = weight_of()
    for name in NAMES:
        scheme = scheme_of(name)
        errors = [
            (fit.values(fit.quantize(weight)) - weight).square().sum()
            for fit in (fit_grid(weight, scheme), fit_grid(weight, scheme, every=3), fit_grid(weight, scheme, every=0))
        ]
        assert errors[0] <= errors[1] * (1 + 1e-6) and errors[1] <= 1.05 * errors[2]
