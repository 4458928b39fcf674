"""Passes over blocks leave FP4, MX and FP8 as files hold them, with what fused layers share and inputs need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming import context, llama, streamed, texts

from compress.blocks.engine_arithmetic import compute_as_engine, rounding_notes
from compress.export.checkpoint import write_checkpoint
from compress.formats.schemes import PRESETS, ActivationScheme
from compress.passes import Awq, Gptq, Pass, Rtn
from compress.passes.autoround import AutoRound
from compress.passes.tune import Tune
from compress.recipe.exports import CheckpointExport
from compress.rounding.activations import round_inputs
from compress.work import apply_pass

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"


def passes(scheme: str) -> dict[str, Pass]:
    every: dict[str, Pass] = {
        "rtn": Rtn(scheme=scheme),
        "gptq": Gptq(scheme=scheme),
        "autoround": AutoRound(scheme=scheme, steps=3),
        "tune": Tune(scheme=scheme, steps=3),
        "tune block by block": Tune(scheme=scheme, steps=0, block_steps=3, blockwise=True),
    }
    return {**every, "awq": Awq(scheme=scheme, steps=2)} if scheme in ("MXFP4A16", "W4AFP8") else every


@pytest.mark.parametrize("scheme", ["NVFP4", "MXFP4A16", "FP8_BLOCK", "W4AFP8"])
@pytest.mark.parametrize("kind", ["rtn", "gptq", "awq", "autoround", "tune", "tune block by block"])
def test_every_pass_leaves_what_a_file_holds(kind: str, scheme: str, tmp_path: Path) -> None:
    if kind not in passes(scheme):
        pytest.skip("the plan refuses it")
    net = llama(layers=1, **SIZES)
    model = streamed(net)
    result = apply_pass(passes(scheme)[kind], model, context(texts(), tmp_path / "work", target="vllm")).model
    layers = result.quantized_layers()
    assert len(layers) == 7 and {result.schemes[layer] for layer in layers} == {PRESETS[scheme]}
    weights = {layer: result.store.quantized(layer) for layer in layers}
    if scheme == "NVFP4":
        for together in ([f"{ATTENTION}.{n}_proj" for n in "qkv"], [f"{MLP}.{n}_proj" for n in ("gate", "up")]):
            assert len({float(weights[layer].stored["global_scale"][0]) for layer in together}) == 1  # type: ignore[union-attr]
            assert len({result.activation_scales[layer] for layer in together}) == 1
        assert set(result.activation_scales) == set(layers)
    written = write_checkpoint(tmp_path / "out", result, CheckpointExport(), "name: x\n")
    assert written
    floats = net.state_dict()
    for layer, weight in weights.items() if kind != "awq" else ():
        assert weight is not None
        exact = floats[f"{layer}.weight"]
        error = (torch.from_numpy(weight.dequantize()) - exact).norm() / exact.norm()
        assert error < (0.05 if scheme == "FP8_BLOCK" else 0.35), layer


def test_inputs_are_rounded_in_groups_below_a_stored_scale(tmp_path: Path) -> None:
    model = streamed(llama(layers=1, **SIZES))
    result = apply_pass(Rtn(scheme="NVFP4"), model, context(texts(), target="vllm")).model
    layer = f"{MLP}.down_proj"
    module = compute_as_engine(result, "vllm").materialise()
    part = dict(module.named_modules())[f"wrapped.{layer}"]
    seen: list[torch.Tensor] = []
    part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(3, 128)
    part(x)
    whole = torch.tensor(1 / result.activation_scales[layer], dtype=torch.float32)
    groups = x.reshape(3, -1, 16)
    scales = (groups.abs().amax(2, keepdim=True) / 6 * whole).to(torch.float8_e4m3fn).float() / whole
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    sizes = (groups / scales).abs().clamp_max(6)
    nearest = table[(sizes[..., None] - table).abs().argmin(-1)] * groups.sign() * scales
    torch.testing.assert_close(seen[-1], nearest.reshape(3, 128))
    assert "inputs in 4 bits" in rounding_notes(result, "vllm")[0].text


@pytest.mark.parametrize(("scheme", "size"), [("MXFP4", 32), ("MXFP8", 32), ("FP8_BLOCK", 128)])
def test_groups_of_inputs_are_scaled_as_they_run(scheme: str, size: int) -> None:
    inputs = PRESETS[scheme].activations
    assert inputs == ActivationScheme("float", True, inputs.bits, size, inputs.scales)  # type: ignore[union-attr]
    x = torch.randn(5, 256)
    x[:, :size] *= 1000  # which must not reach other groups
    rounded = round_inputs(x, inputs)  # type: ignore[arg-type]
    error = ((rounded - x)[:, size:].abs().max() / x[:, size:].abs().max()).item()
    assert error < (0.3 if inputs.bits == 4 else 0.05)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="given none"):
        round_inputs(x, PRESETS["NVFP4"].activations)  # type: ignore[arg-type]


def test_a_start_that_is_given_is_learned_on_and_keeps_its_formats(tmp_path: Path) -> None:
    model = streamed(llama(layers=1, **SIZES))
    ctx = context(texts(), tmp_path, target="vllm")
    first = apply_pass(Gptq(scheme="NVFP4"), model, ctx).model
    second = apply_pass(AutoRound(start="given", steps=2), first, context(texts(), tmp_path / "b", target="vllm")).model
    layer = f"{ATTENTION}.o_proj"
    before, after = first.store.quantized(layer), second.store.quantized(layer)
    assert before is not None and after is not None
    np.testing.assert_array_equal(before.stored["global_scale"], after.stored["global_scale"])
    assert second.activation_scales == first.activation_scales


def idle(net: Any) -> str:
    """Give it a layer that nothing calls."""
    net.get_submodule("model.layers.0.mlp").expert = torch.nn.Linear(32, 16)
    return "model.layers.0.mlp.expert"


def starved(net: Any) -> str:
    """Let one of its layers read nothing but zeros."""
    net.get_submodule("model.layers.1.mlp.up_proj").weight.data.zero_()
    return "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("spoil", [idle, starved])
@pytest.mark.parametrize(
    "config",
    [
        Gptq(scheme="W8A8_STATIC"),
        Rtn(scheme="FP8"),
        AutoRound(scheme="FP8", steps=2),
    ],
    ids=lambda config: f"{config.kind}-{config.scheme}",
)
def test_a_layer_whose_inputs_get_no_scale_stays_float_and_is_named(config: Any, spoil: Any) -> None:
    net = llama(layers=2)
    name = spoil(net)
    result = apply_pass(config, streamed(net), context(texts()))
    rounded = result.model.quantized_layers()
    assert name not in rounded and len(rounded) >= 13
    assert set(result.model.activation_scales) == set(rounded)
    decided = {decision.layer: decision for decision in result.decisions}
    assert decided[name].action == "kept" and "for which a scale would be stored" in decided[name].reason
    assert [note.text for note in result.notes if name in note.text and "stays float" in note.text]
