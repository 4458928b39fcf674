"""The form in which a model is written as GGUF: found by trying, with the reader that is here, and by no name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import decoder
from places import ROOT
from torch import nn

from compress.export.gguf_tensors import mask_numbers, pair_rows
from compress.export.gguf_trial import _probe_offset, find_form, order_architectures

gguf = pytest.importorskip("gguf")
OFFSET = {"head_dim": 256}
"""As large as what Gemma 2 divides queries by, which transformers does not read of a file."""


@pytest.mark.parametrize(
    ("kind", "more", "architecture", "pairs", "offset"),
    [
        ("Llama", {}, "llama", True, 0.0),
        ("Qwen2", {}, "qwen2", False, 0.0),
        ("Phi3", {}, "phi3", False, 0.0),
        ("Gemma2", OFFSET, "gemma2", False, 1.0),
    ],
)
def test_a_form_is_found(kind: str, more: dict[str, Any], architecture: str, pairs: bool, offset: float) -> None:
    finding = find_form(decoder(kind, **more).to("meta"))
    assert finding.form is not None, finding.problem
    assert finding.form.architecture == architecture and finding.form.pairs == pairs
    assert finding.form.offsets.get("model.norm", 0.0) == offset


@pytest.mark.parametrize(
    ("kind", "more", "architecture"),
    [
        ("DeepseekV3", {"n_routed_experts": 4, "kv_lora_rank": 32, "q_lora_rank": 32}, "deepseek2"),
        ("Jamba", {"num_experts": 2, "mamba_dt_rank": 8}, "jamba"),
        ("Cohere", {}, "command-r"),
        ("Granite", {"residual_multiplier": 0.5}, "granite"),
    ],
)
def test_llama_cpp_finds_more(kind: str, more: dict[str, Any], architecture: str) -> None:
    pytest.importorskip("llama_cpp")
    finding = find_form(decoder(kind, **more).to("meta"))
    assert finding.form is not None and finding.form.architecture == architecture, finding.problem


def test_what_no_reader_computes_alike_is_refused() -> None:
    finding = find_form(decoder(hidden_act="relu").to("meta"))
    assert finding.form is None
    assert re.search(
        "models of type llama are not written as GGUF: .* otherwise as .*, by .* deviation", finding.problem
    )
    assert "use target: transformers" in finding.problem


def test_a_norm_tells_what_it_adds() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * (1 + self.weight)

    assert _probe_offset(Centred()) == 1.0
    assert _probe_offset(nn.RMSNorm(8)) == _probe_offset(nn.LayerNorm(8)) == 0.0
    assert mask_numbers("model.layers.12.norm") == "model.layers.*.norm"


def test_rows_are_put_beside_those_that_they_turn_with() -> None:
    assert pair_rows(2, 4, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert pair_rows(1, 6, 4).tolist() == [0, 2, 1, 3, 4, 5]
    assert np.array_equal(np.sort(pair_rows(3, 8, 4)), np.arange(24))


def test_own_names_are_tried_first() -> None:
    assert order_architectures("qwen3_moe", "Qwen3MoeForCausalLM")[0] == ["qwen3moe"]
    assert order_architectures("gemma3_text", "Gemma3ForCausalLM")[0] == ["gemma3"]
    own, others = order_architectures("nobody", "Nobody")
    assert not own and set(others) == set(gguf.MODEL_ARCH_NAMES.values())


def test_no_architecture_is_named_in_the_code() -> None:
    files = [file for file in Path(ROOT, "compress/export").glob("gguf*.py") if file.stem != "gguf_tokenizer"]
    quoted = {word for file in files for word in re.findall(r'"([^"\n]+)"', file.read_text(encoding="utf-8"))}
    assert not quoted & set(gguf.MODEL_ARCH_NAMES.values())
