"""GGUF files of whole models: what transformers reads from them is exactly what was stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import IDS, decoder, linears, scheme, streamed
from tiny_lm import write_tokenizer
from torch import nn

from compress.blocks.experts import unstack_experts
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.export.gguf import describe_gguf, make_byte_counter, write_gguf
from compress.export.gguf_blocks import as_stored, find_block_type
from compress.recipe.exports import GgufExport

gguf = pytest.importorskip("gguf")


def model_of(module: nn.Module, name: str, folder: Path, **more: Any) -> StreamedModel:
    write_tokenizer(folder)
    return streamed(module, dict.fromkeys(linears(module), scheme(name)), folder, folder=folder, **more)


def read(path: Path) -> nn.Module:
    found: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return found.eval()


def with_halves(model: StreamedModel) -> nn.Module:
    """The module with its integers, their scales in half floats."""
    module = model.materialise()
    for layer in model.quantized_layers():
        weight = model.store.quantized(layer)
        assert weight is not None
        kind, _ = find_block_type(model.schemes[layer], weight.values.shape[1])
        with torch.no_grad():
            module.get_parameter(f"{layer}.weight").copy_(torch.from_numpy(as_stored(weight, kind).dequantize()))
    return module


def logits(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("kind", "name"),
    [("Llama", "W4A16"), ("Llama", "W4A16_ASYM"), ("Llama", "W8A16"), ("Qwen2", "W4A16"), ("Phi3", "W4A16")],
)
def test_transformers_reads_what_was_stored(kind: str, name: str, tmp_path: Path) -> None:
    module = decoder(kind)
    model = model_of(module, name, tmp_path)
    path = tmp_path / "out/model.gguf"
    notes = write_gguf(path, model, GgufExport(dtype="float32"), "tiny")
    assert "each tensor as it was stored" in notes[0].text
    count = make_byte_counter(model, GgufExport(dtype="float32"), "tiny")
    assert count({}) == path.stat().st_size
    assert count({layer: scheme("W8A16") for layer in model.schemes}) >= path.stat().st_size
    wanted, found = logits(with_halves(model)), logits(read(path))
    assert torch.allclose(wanted, found, atol=1e-5)


def test_tables_in_few_bits_are_stored_as_layers_are(tmp_path: Path) -> None:
    module = decoder()
    write_tokenizer(tmp_path)
    tables = ["model.embed_tokens", "lm_head"]
    schemes = dict.fromkeys([*linears(module), *tables], scheme("W4A16"))
    model = streamed(module, schemes, tmp_path, folder=tmp_path)
    write_gguf(tmp_path / "out/model.gguf", model, GgufExport(), "tiny")
    assert torch.allclose(logits(with_halves(model)), logits(read(tmp_path / "out/model.gguf")), atol=1e-5)


def test_experts_of_a_layer_are_one_tensor(tmp_path: Path) -> None:
    more = {"moe_intermediate_size": 96, "norm_topk_prob": True, "head_dim": 16}
    module = decoder("Qwen3Moe", num_experts=4, num_experts_per_tok=2, **more)
    unstack_experts(module)
    write_tokenizer(tmp_path)
    schemes = dict.fromkeys(linears(module, ("lm_head", "gate.")), scheme("W4A16"))
    one = "model.layers.0.mlp.experts.1.up_proj"
    assert one in schemes
    write_gguf(tmp_path / "a.gguf", streamed(module, schemes, tmp_path, folder=tmp_path), GgufExport(), "tiny")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    stack = tensors["blk.0.ffn_up_exps.weight"]
    assert list(stack.shape) == [64, 96, 4] and stack.tensor_type.name == "Q4_0"
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"
    mixed = streamed(module, schemes | {one: scheme("W8A16")}, tmp_path, folder=tmp_path)
    with pytest.raises(
        ExportError, match=r"experts\.1\.up_proj: a GGUF file stacks a layer's experts, and others are Q4_0"
    ):
        write_gguf(tmp_path / "b.gguf", mixed, GgufExport(), "tiny")


def test_norms_of_gemma_hold_what_is_computed_with(tmp_path: Path) -> None:
    module = decoder("Gemma2", head_dim=256)
    path = tmp_path / "model.gguf"
    write_gguf(path, model_of(module, "W4A16", tmp_path), GgufExport(), "tiny")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    norm = module.get_parameter("model.layers.0.input_layernorm.weight").detach().numpy()
    assert np.array_equal(tensors["blk.0.attn_norm.weight"].data, norm + 1)
    assert tensors["token_embd.weight"].tensor_type.name == "F16" and "output.weight" not in tensors


def test_a_model_without_a_place_is_refused(tmp_path: Path) -> None:
    module = transformers.OPTForCausalLM(transformers.OPTConfig(hidden_size=48, num_hidden_layers=1, vocab_size=64))
    write_tokenizer(tmp_path)
    found = describe_gguf(module, {}, GgufExport(), tmp_path, {}, {})
    assert "models of type opt are not written as GGUF: model.decoder.embed_tokens.weight has no" in found.problems[0]
    model = model_of(decoder("Qwen3", head_dim=16, attention_bias=True), "W4A16", tmp_path)
    with pytest.raises(ExportError, match="models of type qwen3 are not written as GGUF"):
        write_gguf(tmp_path / "model.gguf", model, GgufExport(), "tiny")


def test_a_group_that_fills_no_block_is_named(tmp_path: Path) -> None:
    model = model_of(decoder(), "W4A16", tmp_path)
    small = replace(model, schemes=dict.fromkeys(model.schemes, scheme("W4A16", 16)))
    with pytest.raises(ExportError, match=r"q_proj: GGUF stores groups of 32, and 16 inputs share a scale"):
        write_gguf(tmp_path / "model.gguf", small, GgufExport(), "tiny")
