"""Passes on a pretended GPU: no operation mixes devices, nothing is moved but where it must be, results are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compress.blocks.streamed import StreamedModel
from compress.passes import KINDS
from compress.work import apply_pass
from tests.helpers.pretend_device import pretend_gpu
from tests.helpers.streaming import bert, context, gpt2, llama, streamed, texts

W4 = {"scheme": "W4A16", "group_size": 16}
PASSES: dict[str, list[dict[str, Any]]] = {
    "gptq": [{"kind": "gptq", **W4}],
    "gptq, in bfloat16, not sequential": [{"kind": "gptq", **W4, "compute": "bfloat16", "sequential": False}],
    "gptq, asymmetric, of a sparse model": [
        {"kind": "sparsify", "sparsity": 0.5},
        {"kind": "gptq", "scheme": "W4A16_ASYM", "group_size": 16, "actorder": False},
    ],
    "awq": [{"kind": "awq", **W4, "steps": 4}],
    "hqq": [{"kind": "hqq", **W4}],
    "rtn": [{"kind": "rtn", "bits": 2, "group_size": 16}],
    "rtn to FP8, cache too": [{"kind": "rtn", "scheme": "FP8"}, {"kind": "kv_cache"}],
    "rotate, then rtn": [{"kind": "rotate"}, {"kind": "rtn", **W4}],
    "smoothquant, then W8A8": [{"kind": "smoothquant"}, {"kind": "gptq", "scheme": "W8A8"}],
    "wanda, then autoround": [
        {"kind": "sparsify", "method": "wanda", "pattern": "2:4"},
        {"kind": "autoround", **W4, "steps": 3},
    ],
    "tune, all at once": [{"kind": "rtn", **W4}, {"kind": "tune", "steps": 3, "blockwise": False}],
    "tune, block by block": [
        {"kind": "rtn", "scheme": "W4A16_ASYM", "group_size": 16},
        {"kind": "tune", "steps": 2, "block_steps": 2, "blockwise": True},
    ],
}


def run(passes: list[dict[str, Any]], net: nn.Module, device: str) -> StreamedModel:
    model = streamed(net)
    for config in passes:
        model = apply_pass(KINDS[config["kind"]](**config), model, context(texts(), device=device)).model
    return model


@pytest.mark.parametrize("name", PASSES)
def test_it_gives_what_the_processor_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(PASSES[name], llama(layers=2), "cpu")
    with pretend_gpu(monkeypatch) as gpu:
        found = run(PASSES[name], llama(layers=2), "cuda:0")
    for m, n in sorted(gpu.moves.items()): print("MOVE", n, m)
    for layer in want.store.names():
        a, b = want.store.read(layer), found.store.read(layer)
        if not torch.equal(a,b): print("DIFF", layer, float((a - b).abs().max()/a.abs().max()), float((a!=b).float().mean()))
    assert 0
