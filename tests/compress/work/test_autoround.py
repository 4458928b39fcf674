"""AutoRound: without steps it is rounding to the nearest, with them each block comes closer to the float one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from streaming import bert, context, gpt2, llama, streamed, texts
from torch import Tensor, nn

from compress.blocks.streamed import StreamedModel
from compress.errors import PassError
from compress.facts import LayerFacts, ModelFacts
from compress.formats.targets import TARGETS
from compress.passes.autoround import AutoRound
from compress.passes.rtn import Rtn
from compress.rounding.autoround import autoround_block
from compress.rounding.fake import MOST_STRETCH, ShiftedWeight
from compress.rounding.learn import RoundingSchedule
from compress.rounding.learned_batches import BlockBatch, JoinedBatches, together
from compress.rounding.quantized_weight import QuantizedWeight, round_to_nearest
from compress.work import apply_pass
from compress.work.autoround import apply_autoround

SCHEDULE = RoundingSchedule(100, 0.01, 0.01, method="sign")

UP = "model.layers.0.mlp.up_proj"


def weight_of(rows: int = 8, inputs: int = 32, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, inputs)).astype(np.float32))


def block(
    bits: int, group: int, symmetric: bool
) -> tuple[nn.Module, dict[str, nn.Module], dict[str, QuantizedWeight], dict[str, Tensor], list[JoinedBatches]]:
    """Two layers, their nearest integers, their float weights, and micro-batches of correlated inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8)).requires_grad_(False)
    mix = torch.randn(6, 32)  # few directions hold all: what one weight gets wrong others can make up for
    inputs = [torch.randn(512, 6) @ mix for _ in range(6)]
    targets = [net(x) for x in inputs]
    layers = {"a": net[0], "b": net[2]}
    floats = {name: layer.weight.clone() for name, layer in layers.items()}
    start = {name: round_to_nearest(w.numpy(), bits, group, symmetric) for name, w in floats.items()}
    pieces = [BlockBatch(lambda x=x: net(x), lambda y=y: y, None, 512) for x, y in zip(inputs, targets, strict=True)]  # type: ignore[misc]
    return net, layers, start, floats, together(pieces, 512)


@pytest.mark.parametrize("grid", [(4, 8, True), (2, 8, False), (3, -1, True), (8, -1, False)])
def test_without_rates_it_is_rounding_to_the_nearest(grid: tuple[int, int, bool]) -> None:
    _, layers, start, floats, batches = block(*grid)
    still = replace(SCHEDULE, rounding_rate=0.0, scale_rate=0.0)
    for schedule in (still, replace(SCHEDULE, steps=0)):
        weights, log = autoround_block(layers, start, batches, schedule, floats=floats)
        assert log.best_step == 0
        for name, weight in weights.items():
            np.testing.assert_array_equal(weight.values, start[name].values)
            np.testing.assert_array_equal(weight.scales, start[name].scales)


@pytest.mark.parametrize("grid", [(2, 8, True), (3, 8, False), (3, -1, True), (4, 8, True)])
def test_the_block_comes_closer(grid: tuple[int, int, bool]) -> None:
    _, layers, start, floats, batches = block(*grid)
    weights, log = autoround_block(layers, start, batches[:5], SCHEDULE, kept_aside=batches[5:], floats=floats)
    assert log.end_loss < 0.9 * log.start_loss and len(log.losses) == 100
    for name, weight in weights.items():
        low, high = (
            (0, 2 ** grid[0] - 1)
            if weight.zero_points is not None
            else (1 - 2 ** (grid[0] - 1), 2 ** (grid[0] - 1) - 1)
        )
        assert low <= weight.values.min() and weight.values.max() <= high
        layers[name].weight.data = torch.from_numpy(weight.dequantize())  # type: ignore[union-attr]
    assert batches[5].loss().item() == pytest.approx(log.end_loss, rel=1e-5)  # what was learned with is what is stored


def test_a_step_is_the_sign_of_the_gradient() -> None:
    """One step by hand: v -= rate * sign(dL/dv), and so the scale's factor."""
    weight, upstream = weight_of(), weight_of(seed=1)
    start = round_to_nearest(weight.numpy(), 4, 16, True)
    layer = nn.Linear(32, 8, bias=False).requires_grad_(False)
    batch = BlockBatch(lambda: (layer.weight * upstream).sum()[None, None], lambda: torch.full((1, 1), -1e6), None, 1)
    step = JoinedBatches([batch, batch])
    found, log = autoround_block(
        {"a": layer}, {"a": start}, [step], RoundingSchedule(1, 0.3, 0.01, method="sign"), floats={"a": weight}
    )
    assert log.best_step == 1
    fake = ShiftedWeight(start, weight)
    sign = -torch.sign(upstream.reshape(8, 2, 16) * fake.scales[:, :, None])
    scales = torch.from_numpy(start.scales)
    by_position = fake.weight / scales[:, :, None]
    inside = by_position.round().clamp(-7, 7)
    slope = (upstream.reshape(8, 2, 16) * (inside - by_position)).sum(
        2
    )  # d(level * s)/ds, the level fixed at W / s + v
    new_scales = scales * (1 - 0.01 * torch.sign(slope))
    levels = (fake.weight / new_scales[:, :, None] + 0.3 * sign).round().clamp(-7, 7)
    agree = (found["a"].values.reshape(8, 2, 16) == levels.numpy()).mean()
    np.testing.assert_allclose(found["a"].scales, new_scales.numpy(), rtol=1e-6)
    assert agree == 1.0


def test_the_ends_of_a_range() -> None:
    """The upper end alone stretched: what stood for the range's ends stands for them, and the zero point with them."""
    start = round_to_nearest(weight_of().numpy(), 4, 16, False)
    fake = ShiftedWeight(start, weight_of())
    assert fake.lower is not None
    with torch.no_grad():
        fake.upper.fill_(0.25)
        fake.lower.fill_(9.0)
    fake.confine()
    assert fake.lower.max() == MOST_STRETCH
    with torch.no_grad():
        fake.lower.zero_()
    found = fake.freeze()
    low = -start.zero_points.astype(np.float64) * start.scales  # type: ignore[union-attr]
    high = (15.0 - start.zero_points) * start.scales * 1.25  # type: ignore[operator]
    np.testing.assert_allclose(found.scales, (high - low) / 15, rtol=1e-5)
    assert np.abs(found.zero_points + low / found.scales).max() <= 0.5 + 1e-4  # type: ignore[operator]
    assert found.zero_points.dtype == start.zero_points.dtype  # type: ignore[union-attr]


def losses(result: Any) -> dict[str, tuple[float, float]]:
    return {
        name: (numbers["start_loss"], numbers["end_loss"])
        for name, numbers in result.measured.items()
        if "start_loss" in numbers
    }


@pytest.mark.parametrize("net", [llama, bert, gpt2])
def test_every_block_of_any_architecture(net: Any) -> None:
    model = streamed(net())
    result = apply_autoround(AutoRound(kind="autoround", bits=2, group_size=16, steps=25), model, context(texts(6)))
    assert len(losses(result)) >= 2 and all(end <= start for start, end in losses(result).values())
    assert sum(end < 0.9 * start for start, end in losses(result).values()) >= 2
    model = result.model
    assert {model.schemes[layer].weights.bits for layer in model.quantized_layers()} == {2}
    assert "lm_head" not in model.quantized_layers()


def test_no_steps_are_rtn() -> None:
    config: dict[str, Any] = {"bits": 3, "group_size": 16}
    rtn = apply_pass(Rtn(kind="rtn", **config), streamed(llama(layers=2)), context()).model
    found = apply_autoround(
        AutoRound(kind="autoround", steps=0, **config), streamed(llama(layers=2)), context(texts(2))
    )
    assert set(rtn.quantized_layers()) == set(found.model.quantized_layers())
    assert all(same(rtn, found.model, layer) for layer in rtn.quantized_layers())


def same(a: StreamedModel, b: StreamedModel, layer: str) -> bool:
    one, other = a.store.quantized(layer), b.store.quantized(layer)
    assert one is not None and other is not None
    return np.array_equal(one.values, other.values) and np.array_equal(one.scales, other.scales)


def test_it_goes_on_from_what_is_given() -> None:
    rtn = apply_pass(Rtn(kind="rtn", bits=2, group_size=16), streamed(llama(layers=2)), context()).model
    config = AutoRound(kind="autoround", start="given", steps=0)
    found = apply_autoround(config, rtn, context(texts(4)))
    assert all(same(rtn, found.model, layer) for layer in rtn.quantized_layers())
    found = apply_autoround(AutoRound(kind="autoround", start="given", steps=30), rtn, context(texts(8)))
    assert all(end < start for start, end in losses(found).values()) and found.model.schemes == rtn.schemes
    again = apply_autoround(AutoRound(kind="autoround", start="given", steps=30), rtn, context(texts(8)))
    assert all(same(found.model, again.model, layer) for layer in rtn.quantized_layers())


def test_refusals() -> None:
    model = streamed(llama(layers=2))
    with pytest.raises(PassError, match="autoround: no layer is left to round; check targets and ignore"):
        apply_autoround(AutoRound(kind="autoround", ignore=("Linear",)), model, context(texts(2)))
    with pytest.raises(PassError, match="group_size 7 does not divide"):
        apply_autoround(AutoRound(kind="autoround", group_size=7), model, context(texts(2)))
    rtn = apply_pass(Rtn(kind="rtn", bits=8, group_size=16), model, context()).model
    wild = AutoRound(kind="autoround", start="given", rate=0.5, steps=2)
    notes = apply_autoround(wild, rtn, context(texts(4))).notes
    assert all(note.text.endswith("led to nothing better than the start, which is kept") for note in notes) and notes


def test_the_plan() -> None:
    layers = (LayerFacts(UP, "Linear", "MatMul", f"{UP}.weight", (8, 32)),)
    facts = ModelFacts("torch", "Net", "text-generation", (), (), layers, structure=streamed(llama(layers=2)).structure)
    target = TARGETS["onnxruntime-cpu"]
    config = AutoRound(kind="autoround", bits=4, group_size=32)
    assert config.stage_on(facts) == "blocks"
    assert [d.action for d in config.check(facts, target).decisions] == ["w4"]
    given = AutoRound(kind="autoround", start="given")
    assert given.check(facts, target).problems == (
        "autoround: no quantized layer is left to learn; put it after gptq or rtn",
    )
    assert not given.check(facts.with_bits({UP: 5.0}), target).problems
    assert given.explain_refusal(target) is None
    assert "works on torch models" in config.check(replace(facts, structure=None), target).problems[0]
