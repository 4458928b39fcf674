"""GPTQ: the rounding against slow and obvious references, and the pass around it, on graphs and on blocks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import architectures
import graphs
import numpy as np
import pytest
import streaming
import torch
from graphs import context, facts_of, written
from torch import Tensor

from compress.blocks.experts import unstack_experts
from compress.context import PassResult
from compress.formats.schemes import WeightScheme
from compress.formats.targets import TARGETS
from compress.passes import Gptq, Rtn
from compress.passes.awq import Awq
from compress.rounding.descent import descend
from compress.rounding.gptq import (
    GptqRules,
    factor_hessian,
    gptq_round,
    gptq_round_together,
    output_error,
    round_columns,
)
from compress.rounding.gram import Gram, gram_matrix, shrink_correlations
from compress.rounding.grid import fit_grid, round_to_grid
from compress.rounding.measure import output_cosine
from compress.rounding.state import GraphState
from compress.work import apply_pass, settle_compute


def correlated(n: int = 48, rows: int = 400, seed: int = 0) -> Tensor:
    """The Gram matrix of inputs that depend on each other, some much larger than others; float64 [n, n]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, n)) @ rng.normal(size=(n, n)) * np.geomspace(0.05, 3, n)
    return torch.from_numpy(x.T @ x / rows)


def weight_of(rows: int = 12, n: int = 48, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, n)).astype(np.float32))


def stands_for(weight: Any) -> Tensor:
    return torch.from_numpy(weight.dequantize())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_with_independent_inputs_it_is_rounding_to_the_nearest(symmetric: bool, signed: bool) -> None:
    weight, scheme = weight_of(), WeightScheme(4, 16, symmetric)
    found, error, nearest = gptq_round(weight, factor_hessian(torch.eye(48), 0.01), scheme, GptqRules(signed, 0))
    expected = round_to_grid(weight, scheme, signed=signed)
    np.testing.assert_array_equal(found.values, expected.values)
    assert error == nearest == pytest.approx(output_error(weight, stands_for(expected), torch.eye(48)), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_later_inputs_make_up_for_is_the_factor_of_the_hessian(dtype: torch.dtype) -> None:
    hessian = factor_hessian(correlated().to(dtype), 0.01)
    damped = correlated() + 0.01 * correlated().diagonal().mean() * torch.eye(48, dtype=torch.float64)
    torch.testing.assert_close(hessian.gram.double() + torch.diag(hessian.added), damped, rtol=1e-5, atol=1e-4)
    ordered = damped[hessian.order][:, hessian.order]
    factor = hessian.carry.double() * hessian.pivots.double()
    torch.testing.assert_close(factor @ factor.T, ordered, rtol=1e-5, atol=1e-4)
    assert not factor.tril(-1).any() and torch.equal(hessian.carry.diagonal(), torch.ones(48))
    assert (ordered.diagonal().diff() <= 0).all()


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [7, 128])
def test_the_columns_are_rounded_as_obq_rounds_them(act_order: bool, symmetric: bool, block: int) -> None:
    """The reference updates the inverse Hessian itself after each column (Frantar & Alistarh 2022, equation 3)."""
    weight, hessian = weight_of(), factor_hessian(correlated(), 0.01, act_order)
    grid = fit_grid(weight, WeightScheme(4, 16, symmetric), hessian.importance)
    damped = correlated() + 0.01 * correlated().diagonal().mean() * torch.eye(48, dtype=torch.float64)
    left, inverse = weight.double(), torch.linalg.inv(damped)
    expected = torch.zeros_like(left)
    for column in hessian.order.tolist():
        scale = grid.scales[:, column // 16].double()
        zero = 0 if grid.zeros is None else grid.zeros[:, column // 16].double()
        expected[:, column] = ((left[:, column] / scale).round() + zero).clamp(grid.numbers.low, grid.numbers.high)
        error = (left[:, column] - (expected[:, column] - zero) * scale) / inverse[column, column]
        left -= torch.outer(error, inverse[column])
        inverse -= torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    torch.testing.assert_close(
        round_columns(weight, hessian, grid, GptqRules(block=block)).double(), expected, rtol=0, atol=0
    )


@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("symmetric", [True, False])
def test_descent_takes_the_best_level_of_each_input_in_turn(size: int, symmetric: bool) -> None:
    """The reference tries every level of every weight, row by row, then solves for each scale."""
    weight, gram = weight_of(4), correlated().float()
    grid = fit_grid(weight, WeightScheme(3, size, symmetric))
    start = grid.quantize(weight)
    given = [grid.scales.clone(), start.clone()]
    quantized, found = descend(weight, gram, torch.ones(48), start, grid, 1)
    gram += torch.eye(48)
    assert torch.equal(given[0], grid.scales) and torch.equal(given[1], start)
    expected, scales = start.double(), grid.scales.double()

    def values(row: int, group: int | None = None) -> Tensor:
        zero = torch.zeros(len(scales[row])) if grid.zeros is None else grid.zeros[row]
        out = ((expected[row].reshape(-1, size) - zero[:, None]) * scales[row][:, None]).reshape(-1)
        return out if group is None else out * (torch.arange(48) // size == group)

    def error(row: int) -> float:
        difference = weight[row].double() - values(row)
        return float(difference @ gram.double() @ difference)

    for row in range(4):
        for first in range(0, 48, 128 // size * size if size <= 128 else 128):
            for column in range(first, 48):
                tried = []
                for level in range(int(grid.numbers.low), int(grid.numbers.high) + 1):
                    expected[row, column] = level
                    tried.append((error(row), level))
                expected[row, column] = min(tried)[1]
            for group in range(48 // size):
                own = values(row, group)
                gradient = own @ gram.double()
                left = weight[row].double() - values(row) + own
                if (energy := float(gradient @ own)) > 0:
                    scales[row, group] *= float(gradient @ left) / energy
    torch.testing.assert_close(quantized.double(), expected, rtol=0, atol=0)
    torch.testing.assert_close(found.scales.double(), scales, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("group_size", [-1, 16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_it_loses_less_than_rounding_to_the_nearest(group_size: int, symmetric: bool, signed: bool) -> None:
    weight, gram = weight_of(), correlated()
    errors = []
    for bits in range(2, 9):
        scheme = WeightScheme(bits, group_size, symmetric)
        found, error, _ = gptq_round(weight, factor_hessian(gram, 0.01), scheme, GptqRules(signed))
        published = gptq_round(weight, factor_hessian(gram, 0.01), scheme, GptqRules(signed, 0)).error
        plain = round_to_grid(weight, scheme, signed=signed)
        assert error == pytest.approx(output_error(weight, stands_for(found), gram), rel=1e-4)
        assert error <= published * 1.001
        assert error < 0.8 * output_error(weight, stands_for(plain), gram)
        low, high = (0, 2**bits - 1) if not symmetric else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        assert found.values.min() >= low + (symmetric and not signed)
        assert found.values.max() <= high
        assert signed or (found.scales > 0).all()
        errors.append(error)
    assert errors == sorted(errors, reverse=True)


def test_layers_together_are_what_each_is_alone() -> None:
    weights, hessian, scheme = (
        [weight_of(5), weight_of(9, seed=2)],
        factor_hessian(correlated(), 0.01),
        WeightScheme(3, 16),
    )
    for one, both in zip(weights, gptq_round_together(weights, hessian, scheme), strict=True):
        alone = gptq_round(one, hessian, scheme)
        np.testing.assert_array_equal(alone.weight.values, both.weight.values)
        np.testing.assert_allclose(alone.weight.scales, both.weight.scales, rtol=1e-5)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_gram_matrix_is_that_of_all_rows(compute: Any) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(3000, 30)).astype(np.float32))
    gram = Gram(30, compute)
    for part in rows.split(1100):
        gram.add(part)
    expected = rows.double().T @ rows.double() / 3000
    mean, n_rows = gram.mean()
    assert n_rows == 3000
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6 if compute == "float32" else 5e-3)
    torch.testing.assert_close(mean, mean.T, rtol=0, atol=0)


def test_rows_in_bfloat16_leave_a_gram_matrix_positive() -> None:
    """Products that came out in bfloat16 did not: what few directions share lost to their rounding."""
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(2000, 4)) @ rng.normal(size=(4, 64)) + 1e-2 * rng.normal(size=(2000, 64))
    gram = Gram(64, "bfloat16")
    gram.add(torch.from_numpy(mixed.astype(np.float32)))
    assert float(torch.linalg.eigvalsh(gram.mean()[0].double()).min()) > 0


def test_a_graph_s_gram_matrix_is_that_of_its_tensor() -> None:
    feeds = graphs.vectors()
    rows = np.concatenate([batch["x"] for batch in feeds])
    np.testing.assert_allclose(gram_matrix(graphs.one_layer(), "x", feeds)[0], rows.T @ rows / len(rows), atol=1e-5)
    with pytest.raises(ValueError, match="no calibration data"):
        gram_matrix(graphs.one_layer(), "x", [])


def test_inputs_that_are_always_zero_keep_their_nearest_weight() -> None:
    gram = correlated()
    gram[5], gram[:, 5] = 0, 0
    hessian = factor_hessian(gram, 0.01)
    assert hessian.dead.nonzero().flatten().tolist() == [5]
    weight = weight_of()
    found = gptq_round(weight, hessian, WeightScheme(8, -1)).weight
    assert np.abs(found.dequantize()[:, 5] - weight[:, 5].numpy()).max() <= np.abs(found.scales).max() / 2 * 1.001


def test_a_gram_matrix_without_an_inverse_is_an_error() -> None:
    gram = correlated(rows=8)  # of rank 8: needs damping
    assert torch.isfinite(factor_hessian(gram, 0.01).carry).all()
    with pytest.raises(ValueError, match=re.escape("has no inverse at damp_percent 0.01; give more")):
        factor_hessian(gram - torch.eye(48) * 0.03 * gram.diagonal().mean(), 0.01)
    with pytest.raises(ValueError, match="NaN or Inf among its inputs"):
        factor_hessian(torch.full((4, 4), torch.nan), 0.01)


def test_few_rows_are_believed_for_as_much_as_they_tell_of_others() -> None:
    """What is rounded by few rows leaves less error on others of their kind where their correlations are shrunk."""
    rng = np.random.default_rng(3)
    mixing = np.linalg.qr(rng.normal(size=(96, 96)))[0] / np.sqrt(np.arange(1, 97))[:, None]
    few, others = (rng.normal(size=(n, 96)) @ mixing for n in (96, 20000))
    seen, truth = (torch.from_numpy((rows.T @ rows / len(rows)).astype(np.float32)) for rows in (few, others))
    shrunk = shrink_correlations(seen.clone(), len(few))
    assert torch.equal(shrunk.diagonal(), seen.diagonal())
    torch.testing.assert_close(shrunk.triu(1), seen.triu(1) / 2)
    weight = torch.from_numpy(rng.normal(size=(40, 96)).astype(np.float32))
    found = [gptq_round(weight, factor_hessian(gram, 0.01), WeightScheme(3, 16)) for gram in (shrunk, seen)]
    errors = [output_error(weight, stands_for(rounded.weight), truth) for rounded in found]
    assert errors[0] < 0.8 * errors[1]


def run_pass(**config: Any) -> PassResult:
    return apply_pass(
        Gptq(**{"group_size": 16, **config}), GraphState(graphs.transformer()), context(graphs.tokens(n_batches=6))
    )


def test_the_pass_is_closer_than_rtn_and_says_by_how_much() -> None:
    feeds = graphs.tokens(n_batches=6)
    exact = graphs.run(graphs.transformer(), feeds)
    result = run_pass()
    rtn = apply_pass(Rtn(group_size=16), GraphState(graphs.transformer()), context([])).model

    def cosine(state: GraphState) -> float:
        return output_cosine(exact, np.split(written(state, feeds), len(feeds)))

    assert cosine(result.model) > cosine(rtn) > 0.9
    assert result.model.weight_only == ["query", "key", "value", "projection", "up", "down"]
    assert all(m["output_error"] <= m["output_error_rtn"] for m in result.measured.values())


def test_a_channel_that_never_speaks_is_named() -> None:
    feeds = graphs.vectors()
    for batch in feeds:
        batch["x"][:, 3] = 0
    notes = apply_pass(Gptq(), GraphState(graphs.one_layer()), context(feeds)).notes
    assert [note.text for note in notes] == ["gptq: fc: 1 of 64 inputs were zero on all calibration data"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_costs_its_layer_and_is_named(value: float) -> None:
    feeds = graphs.vectors()
    feeds[1]["x"][0, 0] = value
    result = apply_pass(Gptq(), GraphState(graphs.one_layer()), context(feeds))
    text = "gptq: fc: NaN or Inf among its inputs on the calibration data; rounded to the nearest"
    assert [note.text for note in result.notes] == [text]
    nearest = apply_pass(Rtn(), GraphState(graphs.one_layer()), context(feeds)).model.weights["fc"]
    np.testing.assert_array_equal(result.model.weights["fc"].values, nearest.values)


def test_a_group_that_does_not_divide_is_refused_by_the_plan() -> None:
    problems = Gptq(group_size=24).check(facts_of(graphs.one_layer()), TARGETS["openvino"]).problems
    assert problems == (
        "gptq: fc has 64 inputs, which group_size 24 does not divide; use group_size: 16 or 32, set indivisible: fit, "
        "or ignore it",
    )


def test_an_onnx_source_has_4_and_8_bits() -> None:
    for config, name in (({"bits": 3}, "W3A16"), ({"scheme": "W8A8"}, "W8A8")):
        problems = Gptq(**config).check(facts_of(graphs.one_layer()), TARGETS["openvino"]).problems  # type: ignore[arg-type]
        text = f"gptq: {name} needs a torch model; weights of an onnx: source get 4 or 8 bits (W4A16, W8A16)"
        assert text in problems


def on_blocks(net: Any = None, batches: Any = None, target: str = "transformers", **config: Any) -> PassResult:
    one = Gptq(**{"group_size": 16, **config})
    surroundings = replace(streaming.context(batches or streaming.texts()), target=TARGETS[target])
    return apply_pass(one, streaming.streamed(net or streaming.llama(layers=2)), surroundings)


def test_blocks_are_rounded_against_what_reaches_them() -> None:
    """The reference gathers each layer's inputs by hooks on whole forward passes."""
    net = streaming.llama(layers=2)
    result = on_blocks(streaming.llama(layers=2), bits=3)
    feeds = streaming.together(streaming.texts())
    rows = feeds["attention_mask"].bool()
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)):
        layers = [net.get_submodule(f"model.layers.0.{name}") for name in names]
        seen: list[Tensor] = []
        keep = seen.append
        handle = layers[0].register_forward_pre_hook(lambda module, args, keep=keep: keep(args[0][rows]))
        with torch.no_grad():
            net(**feeds)
            handle.remove()
            gram = shrink_correlations(seen[0].T @ seen[0] / len(seen[0]), len(seen[0]))
            hessian = factor_hessian(gram, 0.01)
            found = gptq_round_together([layer.weight for layer in layers], hessian, WeightScheme(3, 16))
            for name, layer, expected in zip(names, layers, found, strict=True):
                mine = result.model.store.quantized(f"model.layers.0.{name}")
                assert (mine.values == expected.weight.values).mean() > 0.98
                layer.weight.copy_(torch.from_numpy(mine.dequantize()))


def test_the_pass_on_blocks_says_what_it_did() -> None:
    result = on_blocks()
    assert len(result.model.quantized_layers()) == 14
    assert not [name for name in result.model.quantized_layers() if "lm_head" in name]
    decided = {one.layer: one for one in result.decisions}
    assert (decided["lm_head"].action, decided["lm_head"].reason) == ("kept", "ignore: lm_head")
    assert decided["model.layers.1.mlp.up_proj"].reason == "W4A16, group 16"
    told = [numbers for layer, numbers in result.measured.items() if "proj" in layer]
    assert len(told) == 14
    assert all(numbers["output_error"] <= numbers["output_error_rtn"] for numbers in told)


def test_static_inputs_get_a_scale_and_integer_products_symmetric_levels() -> None:
    result = on_blocks(scheme="W8A8_STATIC", group_size=-1)
    assert set(result.model.activation_scales) == set(result.model.quantized_layers())
    assert all(scale > 0 for scale in result.model.activation_scales.values())
    for layer in result.model.quantized_layers():
        weight = result.model.store.quantized(layer)
        assert weight.values.min() >= -127
        assert (weight.scales > 0).all()


def test_a_layer_that_no_row_reaches_stays_float_and_is_named() -> None:
    def with_idle() -> Any:
        net = streaming.llama(layers=2)
        net.get_submodule("model.layers.0.mlp").expert = torch.nn.Linear(32, 16)
        return net

    result = on_blocks(with_idle())
    name = "model.layers.0.mlp.expert"
    assert [note.text for note in result.notes] == [f"gptq: {name}: no calibration data reaches what stays float"]
    assert not result.model.store.is_quantized(name)
    decided = next(one for one in result.decisions if one.layer == name)
    assert (decided.action, decided.reason) == ("kept", "no calibration data reaches it")


def test_experts_without_tokens_are_rounded_by_what_the_others_read() -> None:
    """A router that knows two experts: the others' first layers have the Hessian of what these read."""
    net = architectures.build("mixtral").float()
    for block in net.model.layers:
        gate = block.mlp.gate
        gate.top_k = 1
        gate.weight[1], gate.weight[2:] = -gate.weight[0], 0
    unstack_experts(net)
    result = on_blocks(net, [{**batch, "input_ids": batch["input_ids"] % 61} for batch in streaming.texts()])
    text = (
        "gptq: no calibration token reaches 2 of 4 experts (model.layers.0.mlp.experts.2, model.layers.0.mlp.experts.3"
    )
    assert result.notes[0].text.startswith(text)
    for expert in (2, 3):
        for layer, is_nearest in (("gate_proj", False), ("up_proj", False), ("down_proj", True)):
            name = f"model.layers.0.mlp.experts.{expert}.{layer}"
            weight = net.get_submodule(name).weight.detach()
            same = result.model.store.quantized(name).values == round_to_grid(weight, WeightScheme(4, 16)).values
            assert same.all() == is_nearest, name


@pytest.mark.parametrize(
    ("config", "worth", "expected"),
    [
        (Gptq(bits=4, group_size=16), 0.0, {"compute": "bfloat16"}),
        (Awq(bits=4, group_size=16), 0.0, {"compute": "bfloat16"}),
        (Gptq(bits=4, group_size=16, compute="float32"), 0.0, {}),
        (Gptq(bits=4, group_size=16), settle_compute.WORTH, {}),
    ],
)
def test_products_are_computed_in_what_is_sooner_of_large_models(
    config: Gptq | Awq, worth: float, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(settle_compute, "WORTH", worth)
    monkeypatch.setattr(settle_compute, "GAIN", 1e9)
    result = apply_pass(
        config, streaming.streamed(streaming.llama()), streaming.context(streaming.texts(), tmp_path / "work")
    )
    assert result.settled == expected
    assert (tmp_path / "work" / settle_compute.FILE).exists() == bool(expected)
