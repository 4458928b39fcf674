"""What engines round while they run, by what transformers computes of the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import streaming
import torch
from checkpoints import IDS, decoder, linears, scheme, streamed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress.blocks.engine_arithmetic import compute_as_engine, rounding_notes
from compress.blocks.experts import unstack_experts
from compress.blocks.streamed import StreamedModel
from compress.export.checkpoint import write_checkpoint
from compress.export.checkpoint_rules import scoring_gaps
from compress.facts import BlockFacts, InputGroup, Structure
from compress.formats.schemes import ActivationScheme
from compress.recipe.exports import CheckpointExport
from compress.rounding.activations import round_cached, round_inputs

SCALES = (0.0078125, 0.015625)


def by_transformers(model: StreamedModel, folder: Path, attention: str = "eager") -> Tensor:
    """The logits of the model's checkpoint."""
    write_checkpoint(folder, model, CheckpointExport(), "name: x\n")
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    return logits(loaded.eval())


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def as_engine(model: StreamedModel, engine: str = "transformers") -> Tensor:
    return logits(compute_as_engine(model, engine).materialise())


def cached(module: nn.Module, kind: str) -> dict[str, Any]:
    """What a kv_cache pass would leave."""
    attentions = [name for name, _ in module.named_modules() if name.endswith((".self_attn", ".attn"))]
    return {"kv_cache": kind, "kv_scales": dict.fromkeys(attentions, SCALES)}


@pytest.mark.parametrize("name", ["W8A8", "W8A8_STATIC", "W4A8", "FP8", "FP8_DYNAMIC"])
def test_inputs_are_rounded_as_transformers_rounds_them(name: str, tmp_path: Path) -> None:
    module = decoder()
    model = streamed(module, dict.fromkeys(linears(module), scheme(name)), tmp_path)
    theirs = by_transformers(model, tmp_path / "out")
    assert torch.equal(as_engine(model), theirs)
    assert not torch.allclose(logits(model.materialise()), theirs, atol=1e-4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_keys_and_values_are_rounded_as_transformers_rounds_them(kind: str, attention: str, tmp_path: Path) -> None:
    module: Any = decoder("Qwen3")
    module.set_attn_implementation(attention)
    model = streamed(module, {}, tmp_path, **cached(module, kind))
    theirs = by_transformers(model, tmp_path / "out", attention)
    assert torch.equal(as_engine(model), theirs)
    assert not torch.allclose(logits(model.materialise()), theirs, atol=1e-4)


def test_what_transformers_leaves_in_float_is_scored_so_and_named(tmp_path: Path) -> None:
    """Experts, which it stacks, and the cache of attention that the library does not know."""
    mixture = decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    unstack_experts(mixture)
    experts = streamed(mixture, dict.fromkeys(linears(mixture), scheme("FP8_DYNAMIC")), tmp_path / "a")
    gpt2 = decoder("GPT2", n_embd=64, n_layer=2, n_head=4)
    cache = streamed(gpt2, {}, tmp_path / "b", **cached(gpt2, "fp8"))
    for model, left in (
        (experts, "reads inputs of model.layers.0."),
        (cache, "keeps keys and values of transformer.h.0.attn"),
    ):
        theirs = by_transformers(model, tmp_path / left / "out")
        torch.testing.assert_close(as_engine(model), theirs, rtol=0, atol=1e-6)
        assert not torch.allclose(as_engine(model, "vllm"), theirs, atol=1e-4)
        assert f"transformers {left}" in rounding_notes(model, "transformers")[-1].text
        assert [note.level for note in rounding_notes(model, "vllm")] == ["info"]


def test_each_token_has_its_own_scale_however_tokens_are_laid_out() -> None:
    """Experts read [tokens, in], of which the library would take one scale for all."""
    x = torch.randn(2, 3, 8) * torch.tensor([1.0, 100.0, 0.01])[:, None]
    rounded = round_inputs(x, ActivationScheme())
    assert torch.equal(round_inputs(x.reshape(6, 8), ActivationScheme()), rounded.reshape(6, 8))
    peak = x.abs().amax(-1, keepdim=True)
    assert ((rounded - x).abs() <= peak / 127.5).all() and not torch.equal(rounded, x)
    assert torch.equal(round_inputs(torch.zeros(1, 4), ActivationScheme()), torch.zeros(1, 4))


def test_vllm_gives_inputs_of_4_bit_weights_a_zero_point(tmp_path: Path) -> None:
    x = torch.tensor([[0.0, 255.0, 10.4], [-51.0, 0.0, -10.05]])
    expected = torch.tensor([[0.0, 255.0, 10.0], [-51.0, 0.0, -10.0]])
    torch.testing.assert_close(round_inputs(x, ActivationScheme(), symmetric=False), expected, rtol=0, atol=1e-5)
    module = decoder()
    for name, same in (("W4A8", False), ("W8A8", True)):
        model = streamed(module, dict.fromkeys(linears(module), scheme(name)), tmp_path / name)
        assert torch.equal(as_engine(model, "vllm"), as_engine(model)) == same


def test_stored_scales_clamp_what_they_were_not_made_for() -> None:
    x = torch.tensor([[1000.0, -1000.0, 0.26]])
    assert round_inputs(x, ActivationScheme(dynamic=False), 0.5).tolist() == [[63.5, -64.0, 0.5]]
    assert round_inputs(x, ActivationScheme("float", dynamic=False), 0.5).tolist() == [[224.0, -224.0, 0.25]]
    assert round_cached(x, "fp8", 0.5).tolist() == [[224.0, -224.0, 0.25]]
    with pytest.raises(ValueError, match="stored scale were given none"):
        round_inputs(x, ActivationScheme(dynamic=False))


def test_a_model_whose_weights_alone_are_rounded_is_left_as_it_is() -> None:
    model = streaming.streamed(streaming.llama(layers=1))
    assert compute_as_engine(model, "vllm") is model and rounding_notes(model, "vllm") == []


def test_what_cannot_be_scored_is_named() -> None:
    """A cache of latents in vLLM, and attention that is the block itself."""
    latent = InputGroup(("l.attn.kv_b",), "l.attn.kv_norm", "norm")
    value = InputGroup(("l.attn.o",), "l.attn.kv_b", "value")
    mla = Structure((BlockFacts("l", (latent, value)),))
    assert scoring_gaps(mla, "fp8", "transformers") == [] == scoring_gaps(mla, None, "vllm")
    assert scoring_gaps(mla, "fp8", "vllm") == [
        "l.attn: vllm keeps the latent in fp8 of which keys and values are projected"
    ]
    flat = Structure((BlockFacts("l", (InputGroup(("l.o",), "l.v", "value"),)),))
    assert scoring_gaps(flat, "int8", "transformers") == [
        "l: attention has no module of its own, in which its int8 cache could be scored"
    ]
