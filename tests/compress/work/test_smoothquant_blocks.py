"""SmoothQuant on blocks: exact before rounding, better after it, and said where it is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import streaming
import torch
from torch import Tensor, nn

from compress.context import PassResult
from compress.facts import ModelFacts
from compress.formats.targets import TARGETS
from compress.passes import SmoothQuant
from compress.rounding.smooth import search_smoothing
from compress.work import apply_pass


def outlying(net: nn.Module) -> nn.Module:
    """Norms that give two channels fifty times the others."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "layernorm" in name.lower() and name.endswith("weight"):
                parameter[3::16] = 50.0
    return net


def applied(**config: Any) -> PassResult:
    surroundings = replace(streaming.context(streaming.texts(8)), target=TARGETS["vllm"])
    return apply_pass(SmoothQuant(**config), streaming.streamed(outlying(streaming.llama(layers=2))), surroundings)


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model.materialise()(**streaming.together(streaming.texts(8)))


def test_the_smoothed_model_computes_what_it_did() -> None:
    before = output(streaming.streamed(outlying(streaming.llama(layers=2))))
    torch.testing.assert_close(output(applied().model), before, rtol=1e-3, atol=1e-4)


def test_it_says_what_was_folded_and_what_was_left() -> None:
    result = applied(ignore=("model.layers.1.mlp.up_proj",))
    told = {one.layer: (one.action, one.reason) for one in result.decisions}
    action, reason = told["model.layers.0.self_attn.q_proj"]
    assert action == "smoothed"
    assert reason.endswith("folded into input_layernorm")
    text = "left alone: it reads a tensor with model.layers.1.mlp.up_proj, which is kept"
    assert told["model.layers.1.mlp.gate_proj"] == ("kept", text)
    assert told["model.layers.1.mlp.up_proj"] == ("kept", "ignore: model.layers.1.mlp.up_proj")
    numbers = result.measured["model.layers.0.self_attn.q_proj"]
    assert numbers["error_after"] < 0.9 * numbers["error_before"]


def test_a_fixed_strength_is_taken_everywhere() -> None:
    reasons = [one.reason for one in applied(alpha=0.5).decisions if one.action == "smoothed"]
    assert reasons
    assert all(reason.startswith("alpha 0.5, folded into") for reason in reasons)


def test_rows_that_have_scales_of_their_own_are_measured_so() -> None:
    """One huge row ruins a range that all rows share, not the others' own."""
    rng = np.random.default_rng(0)
    rows, weight = rng.normal(size=(64, 16)).astype(np.float32), rng.normal(size=(8, 16)).astype(np.float32)
    rows[0] *= 1000
    peak = np.abs(rows).max(axis=0)
    shared, own = (search_smoothing(rows, peak, [weight], by_row=flag) for flag in (False, True))
    scaled = np.round(rows / (np.abs(rows).max(1, keepdims=True) / 127)) * (np.abs(rows).max(1, keepdims=True) / 127)
    assert np.abs(scaled[1:] - rows[1:]).max() < 0.05
    assert own.error_before <= shared.error_before


@pytest.mark.parametrize(
    ("source", "task", "stage"), [("torch", "text-generation", "blocks"), ("torch", "feature-extraction", "graph")]
)
def test_a_decoder_is_smoothed_as_blocks(source: Any, task: str, stage: str) -> None:
    facts = ModelFacts(source, "Tiny", task, (), (), ())
    assert SmoothQuant().stage_on(facts) == stage
