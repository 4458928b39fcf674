"""The scales of a KV cache: what a cache holds in a forward pass, which a reference reads from transformers' own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import streaming
import torch
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from compress.context import PassResult
from compress.errors import PassError
from compress.facts import ModelFacts, Structure
from compress.formats.targets import TARGETS
from compress.passes.kv_cache import KvCache, attentions
from compress.rounding.state import LARGEST_FLOAT8
from compress.work import apply_pass


def qwen3() -> nn.Module:
    """Its keys are normed after their projection."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, vocab_size=streaming.VOCABULARY)).eval()


def eager() -> nn.Module:
    return streaming.llama(attn_implementation="eager")


def applied(net: nn.Module, **config: Any) -> PassResult:
    surroundings = replace(streaming.context(streaming.texts(padded=False)), target=TARGETS["vllm"])
    return apply_pass(KvCache(**config), streaming.streamed(net), surroundings)


@pytest.mark.parametrize("make", [streaming.llama, qwen3, eager, streaming.gpt2])
def test_scales_are_those_of_what_a_cache_holds(make: Any) -> None:
    net = make()
    cache = DynamicCache()
    with torch.no_grad():
        net(**streaming.together(streaming.texts(padded=False)), past_key_values=cache, use_cache=True)
    result = applied(make())
    assert result.model.kv_cache == "fp8"
    assert len(result.model.kv_scales) == len(cache.layers)
    for scales, layer in zip(result.model.kv_scales.values(), cache.layers, strict=True):
        expected = [float(layer.keys.abs().max()) / LARGEST_FLOAT8, float(layer.values.abs().max()) / LARGEST_FLOAT8]
        assert scales == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("make", [streaming.llama, eager, qwen3])
def test_padding_counts_in_no_scale(make: Any) -> None:
    padded = streaming.texts(3)
    for batch in padded:
        batch["input_ids"][batch["attention_mask"] == 0] = 63
    alone = [{k: v[:, batch["attention_mask"][0] == 1] for k, v in batch.items()} for batch in padded]

    def scales(batches: Any) -> list[tuple[float, float]]:
        net = make()
        with torch.no_grad():
            net.get_input_embeddings().weight[63, 0] = 1e3  # more in this channel than any token has
            for name, weight in net.named_parameters():
                if name.endswith(("k_proj.weight", "v_proj.weight")):
                    weight[:, 0] *= 30
        target = replace(streaming.context(batches), target=TARGETS["vllm"])
        return list(apply_pass(KvCache(), streaming.streamed(net), target).model.kv_scales.values())

    for found, wanted in zip(scales(padded), scales(alone), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_int8_has_127_levels() -> None:
    eighth, other = (applied(streaming.llama(), scheme=name).model.kv_scales for name in ("int8", "fp8"))
    for name, (keys, values) in eighth.items():
        assert (keys * 127, values * 127) == pytest.approx([scale * LARGEST_FLOAT8 for scale in other[name]])


def test_attentions_are_named_by_the_module_that_holds_the_values() -> None:
    structure = streaming.streamed(streaming.llama(layers=2)).structure
    assert list(attentions(structure.input_groups)) == [f"model.layers.{k}.self_attn" for k in range(2)]


def test_a_model_without_attention_and_a_target_without_kernels_are_refused() -> None:
    facts = ModelFacts("torch", "Tiny", "text-generation", (), (), (), structure=Structure(()))
    problems = KvCache(scheme="int8").check(facts, TARGETS["vllm"]).problems
    assert problems == (
        "kv_cache: target vllm has no int8 KV cache; use scheme: fp8",
        "kv_cache: no attention was found in the model: there are no keys and values to store",
    )
    assert KvCache(scheme="int8").explain_refusal(TARGETS["vllm"]) == problems[0]


def test_attention_that_cannot_be_watched_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.blocks.engine_arithmetic._PRODUCTS", ())
    with pytest.raises(PassError, match=r"kv_cache: model\.layers\.0\.self_attn: no keys and values were seen"):
        applied(eager())


def test_values_that_are_nothing_or_nowhere_finite_have_no_scale() -> None:
    for value, problem in ((0.0, "no keys and values other than zero"), (3e38, "NaN or Inf among its keys")):
        net: Any = streaming.llama(layers=1)
        net.model.layers[0].self_attn.v_proj.weight.data.fill_(value)
        with pytest.raises(PassError, match=rf"kv_cache: model\.layers\.0\.self_attn: {problem}"):
            applied(net)
