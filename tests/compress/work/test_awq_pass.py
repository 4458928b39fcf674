"""AWQ: the search on inputs of unequal size, and the pass on tiny models, whose function scales must not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import streaming
import torch
from torch import Tensor, nn

from compress.context import PassResult
from compress.facts import InputGroup
from compress.formats.schemes import PRESETS, WeightScheme
from compress.formats.targets import TARGETS
from compress.passes import Gptq, Rtn
from compress.passes.awq import Awq
from compress.rounding.activations import round_inputs
from compress.rounding.awq import RoundedInputs, search_scales
from compress.rounding.gptq import output_error
from compress.rounding.grid import round_to_grid
from compress.work import apply_pass

W3 = WeightScheme(3, 32)


def inputs_of(n: int = 64, rows: int = 500) -> Tensor:
    """A few channels much larger than the others, and weights that are not."""
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(0)) * torch.linspace(-2, 3, n).exp()


def weight_of(out: int = 24, n: int = 64) -> Tensor:
    return torch.randn(out, n, generator=torch.Generator().manual_seed(1))


def test_scales_lower_the_error_that_they_say() -> None:
    x, weights = inputs_of(), [weight_of(), weight_of(8)]
    gram = x.T @ x / len(x)
    found = search_scales(weights, [W3, W3], gram, x.abs().mean(0), signed=False)
    assert found.scales is not None
    assert found.error_after < found.error_before
    both = torch.cat(weights)
    importance = gram.diagonal() / found.scales**2
    rounded = torch.from_numpy(round_to_grid(both * found.scales, W3, importance, False).dequantize()) / found.scales
    plain = torch.from_numpy(round_to_grid(both, W3, None, False).dequantize())
    assert output_error(both, rounded, gram) < 0.8 * output_error(both, plain, gram)


def test_scales_that_cost_inputs_more_than_weights_gain_are_not_taken() -> None:
    made, asked = torch.Generator().manual_seed(0), PRESETS["MXFP4"]
    sizes = torch.randn(128, generator=made).exp()
    x, weight = (torch.randn(rows, 128, generator=made) * sizes for rows in (500, 24))
    gram, magnitude = x.T @ x / len(x), x.abs().mean(0)
    inputs = RoundedInputs(x, lambda rows: round_inputs(rows, asked.activations))  # type: ignore[arg-type]

    def lose(scales: Tensor | None) -> float:
        s = torch.ones(128) if scales is None else scales
        rounded = torch.from_numpy(round_to_grid(weight * s, asked.weights, gram.diagonal() / s**2).dequantize())
        return float((x @ weight.T - inputs.round(x / s) @ rounded.T).norm() / (x @ weight.T).norm())

    blind = search_scales([weight], [asked.weights], gram, magnitude).scales
    aware = search_scales([weight], [asked.weights], gram, magnitude, inputs=inputs).scales
    assert lose(blind) > 1.01 * lose(None) >= 1.01 * lose(aware)


def test_scales_are_brought_into_the_form_that_can_be_folded() -> None:
    x = inputs_of()
    pairs: Callable[[Tensor], Tensor] = lambda s: s.reshape(-1, 2).log().mean(1).exp().repeat_interleave(2)  # noqa: E731
    found = search_scales([weight_of()], [W3], x.T @ x, x.abs().mean(0), pairs)
    assert found.scales is not None
    assert torch.equal(found.scales[::2], found.scales[1::2])


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-35, 1e30])
def test_a_layer_of_tiny_or_huge_weights_has_scales(size: float) -> None:
    """The products of such weights' powers are no float32; the scales are."""
    x = inputs_of()
    found = search_scales([weight_of() * size], [W3], x.T @ x / len(x), x.abs().mean(0))
    assert np.isfinite([found.error_before, found.error_after]).all()
    assert found.scales is None or bool((torch.isfinite(found.scales) & (found.scales > 0)).all())


def test_nothing_is_gained_where_rounding_costs_nothing() -> None:
    exact = torch.randint(-3, 4, (24, 64), generator=torch.Generator().manual_seed(0)).float()
    exact[:, ::32] = 3
    x = inputs_of()
    found = search_scales([exact], [W3], x.T @ x, x.abs().mean(0))
    assert found.scales is None
    assert found.error_after == found.error_before


def outlying(net: nn.Module) -> nn.Module:
    """Norms that make some channels large, as in trained models."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "layernorm" in name.lower() and name.endswith("weight"):
                parameter.copy_(torch.linspace(-1, 2, len(parameter)).exp())
    return net


def applied(one: Any, net: nn.Module | None = None, model: Any = None) -> PassResult:
    surroundings = replace(streaming.context(streaming.texts(8)), target=TARGETS["transformers"])
    return apply_pass(one, model or streaming.streamed(net or outlying(streaming.llama(layers=2))), surroundings)


def output(model: Any) -> Tensor:
    with torch.no_grad():
        found = model.materialise()(**streaming.together(streaming.texts(8)))
    return found if isinstance(found, Tensor) else next(iter(found.values()))


@pytest.mark.slow
@pytest.mark.parametrize("make", [streaming.llama, streaming.gpt2, streaming.bert])
def test_scaled_weights_compute_what_they_did(make: Any) -> None:
    net = outlying(make())
    before = streaming.streamed(net)
    result = applied(Awq(bits=3, group_size=16, round=False), net)
    assert not result.model.quantized_layers()
    torch.testing.assert_close(output(result.model), output(before), rtol=1e-3, atol=1e-4)
    names = [one.layer for one in result.decisions if one.action == "scaled"]
    assert names
    assert any(
        not torch.equal(result.model.store.read(f"{name}.weight"), before.store.read(f"{name}.weight"))
        for name in names
    )


@pytest.mark.slow
def test_it_is_closer_than_rtn_and_with_gptq_closer_still() -> None:
    config: dict[str, Any] = {"bits": 3, "group_size": 16}
    exact = output(streaming.streamed(outlying(streaming.llama(layers=2))))
    scaled = applied(Awq(**config, round=False))
    models = {
        "rtn": applied(Rtn(**config)).model,
        "awq": applied(Awq(**config)).model,
        "both": applied(Gptq(**config), model=scaled.model).model,
    }
    errors = {name: float((output(model) - exact).square().mean()) for name, model in models.items()}
    assert errors["both"] < errors["awq"] < errors["rtn"]


def test_the_report_says_what_was_folded_where() -> None:
    result = applied(Awq(bits=3, group_size=16))
    decided = {one.layer: one for one in result.decisions}
    assert "folded into input_layernorm" in decided["model.layers.0.self_attn.q_proj"].reason
    assert decided["model.layers.0.self_attn.q_proj"].action == "w3"
    assert all(
        numbers["error_after"] <= numbers["error_before"] for name, numbers in result.measured.items() if "proj" in name
    )


def test_a_layer_without_a_source_is_left_alone_and_said_so() -> None:
    model = streaming.streamed(outlying(streaming.llama(layers=2)))
    structure = model.structure
    blocks = tuple(
        replace(block, input_groups=tuple(InputGroup(input_group.layers) for input_group in block.input_groups))
        for block in structure.blocks
    )
    bare = replace(model, structure=replace(structure, blocks=blocks))
    result = applied(Awq(bits=4, group_size=16), model=bare)
    told = {one.layer: one.reason for one in result.decisions}
    assert (
        told["model.layers.0.mlp.up_proj"]
        == "W4A16, group 16; not scaled: no module before it can take a scale exactly"
    )
    float_ones = applied(Awq(bits=4, group_size=16, round=False), model=bare)
    assert {one.action for one in float_ones.decisions} == {"kept"}


def test_rounded_layers_are_not_scaled_again() -> None:
    first = applied(Rtn(bits=4, group_size=16, targets=("re:.*v_proj",)))
    result = applied(Awq(bits=4, group_size=16), model=first.model)
    told = {one.layer: one.reason for one in result.decisions}
    name = "model.layers.0.self_attn.v_proj"
    assert told["model.layers.0.self_attn.o_proj"].endswith(f"not scaled: {name} is rounded already")
    assert told[name] == "already in 4 bits"
    before, after = (one.model.store.quantized(name) for one in (first, result))
    np.testing.assert_array_equal(before.values, after.values)
