"""A deep model's first blocks tell of it what the whole does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from compress.blocks.experts import first_expert_only, unstack_experts
from compress.structure.alike import cut_chain
from compress.structure.dataflow import count_work, record
from compress.structure.find import structure_of

N = 12
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "Gemma2": (4, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "Mixtral": (2, {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}),
}
"""Family -> blocks that are run, and what differs from SIZES; blocks of Gemma 2 alternate."""


def build(family: str, n: int = N) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **KINDS[family][1]}, num_hidden_layers=n, vocab_size=64, use_cache=False
    )
    with torch.device("meta"):
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    unstack_experts(module)
    return module


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.wrapped = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.wrapped(input_ids=input_ids).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", KINDS)
def test_the_first_blocks_tell_what_the_whole_tells(family: str) -> None:
    module, feeds = Logits(build(family)), {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}
    with first_expert_only():
        whole = record(module, feeds)
        with cut_chain(module) as cut:
            assert cut is not None and cut.n_kept == KINDS[family][0]
            short = record(module, feeds)
        assert len(record(module, feeds).modules) == len(whole.modules), "the list is whole again"
    assert cut.extend(structure_of(short)) == structure_of(whole)
    assert cut.spread(count_work(short)) == count_work(whole)
    assert short.peak_bytes == whole.peak_bytes


def test_blocks_that_differ_are_all_run() -> None:
    shallow, odd, settings = Logits(build("Mixtral", 9)), Logits(build("Mixtral")), Logits(build("Mixtral"))
    odd.wrapped.model.layers[N - 1].self_attn.scaling = 9.0
    settings.wrapped.config.layer_types = ["full_attention"] * (N - 1) + ["chunked_attention"]
    for module in (shallow, odd, settings):
        with cut_chain(module) as cut:
            assert cut is None


@pytest.mark.parametrize(
    ("family", "n", "kept"), [("Gemma2", 14, [4, 5]), ("Gemma2", 13, [3, 4]), ("Mixtral", 11, [2])]
)
def test_a_rest_that_repeats_the_last_kept_blocks_in_order(family: str, n: int, kept: list[int]) -> None:
    with cut_chain(build(family, n), repeated=True) as cut:
        assert cut is not None and cut.n_kept == kept[-1] + 1
        assert list(cut.models.values()) == kept * ((n - cut.n_kept) // len(kept))
    with cut_chain(build(family, n - 1), repeated=True) as cut:
        assert (cut is None) == (n != 14)  # of fourteen one less still has eight to leave out
