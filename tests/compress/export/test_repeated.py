"""A deep decoder's graph out of its first blocks is that of the model, with each block's own weights and cache."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from torch import nn

from compress.export import decoder
from compress.export.decoder import export_decoder
from compress.export.onnx import float_graph
from compress.graph.layers import find_layers
from compress.graph.run import open_session
from compress.graph.stored import StoredTensor, holds_stored

VOCABULARY = 40
N_LAYERS, N_EXPORTED = 13, 5
"""Blocks, of two kinds in turn, and those of them that are exported (`test_alike.py` has which repeat which)."""


def make(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=N_LAYERS,
        layer_types=["full_attention", *["sliding_attention", "full_attention"] * (N_LAYERS // 2)],
        use_sliding_window=True,
        sliding_window=16,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )
    net: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in net.requires_grad_(False).parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def export(net: nn.Module) -> ir.Model:
    """The graph with its matrices left in files, which are the module here."""
    tensors = dict(net.named_parameters())
    weights = {
        name: (tuple(tensor.shape), lambda name: tensors[name].numpy())
        for name, tensor in tensors.items()
        if tensor.ndim > 1
    }
    return export_decoder(net, weights=weights)


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True], ids=["in files", "held"])
def test_it_computes_what_the_model_does(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    net, exported = make(tied=held), list[int]()
    program = decoder.export_program

    def counted(*args: Any, **fields: Any) -> ir.Model:
        exported.append(len(fields["kwargs"]["past"]) // 2)
        return program(*args, **fields)

    monkeypatch.setattr(decoder, "export_program", counted)
    monkeypatch.setattr(decoder, "HELD", 100)
    graph = export_decoder(net) if held else export(net)
    assert exported == [N_EXPORTED]
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    assert sorted(layer.name for layer in find_layers(graph) if layer.op != "Gather") == sorted(linear)
    ids = np.arange(3, 12)[None]
    with torch.no_grad():
        want = net(input_ids=torch.from_numpy(ids), use_cache=True)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    past = [value.name for value in graph.graph.inputs if value.name not in feeds]
    assert len(past) == len(set(past)) == 2 * N_LAYERS
    head_size = want.past_key_values.layers[0].keys.shape[-1]
    feeds |= {str(name): np.zeros((1, 2, 0, head_size), np.float32) for name in past}
    session = open_session(graph)
    got = dict(zip([out.name for out in session.get_outputs()], session.run(None, feeds), strict=True))
    np.testing.assert_allclose(got["logits"], want.logits.numpy(), rtol=1e-4, atol=1e-4)
    for number, layer in enumerate(want.past_key_values.layers):
        np.testing.assert_allclose(got[f"present.{number}.key"], layer.keys[:, :, -9:].numpy(), rtol=1e-4, atol=1e-4)
    matrices = [value.const_value for value in graph.graph.initializers.values()]
    if held:
        assert not holds_stored(graph)
        written = [value.const_value for value in float_graph(graph).graph.initializers.values()]
        assert sum(VOCABULARY in tensor.shape.numpy() for tensor in written if tensor is not None) == 1, "one table"
        return
    origins = {tensor.origin[0] for tensor in matrices if isinstance(tensor, StoredTensor) and tensor.origin}
    assert len({re.sub(r"\D", "", name) for name in origins if "q_proj" in name}) == N_LAYERS
