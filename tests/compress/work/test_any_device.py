"""Passes on a pretended GPU: no operation mixes devices, nothing moves but where it must, results are the processor's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from compress.blocks.streamed import StreamedModel
from compress.passes import KINDS
from compress.work import apply_pass
from tests.helpers.pretend_device import pretend_gpu
from tests.helpers.streaming import context, llama, streamed, texts

W4 = {"scheme": "W4A16", "group_size": 16}
PASSES: dict[str, list[dict[str, Any]]] = {
    "gptq": [{"kind": "gptq", **W4}],
    "gptq, in bfloat16, not sequential": [{"kind": "gptq", **W4, "compute": "bfloat16", "sequential": False}],
    "gptq of a sparse model": [
        {"kind": "sparsify", "sparsity": 0.5},
        {"kind": "gptq", "scheme": "W4A16_ASYM", "group_size": 16, "actorder": False},
    ],
    "awq": [{"kind": "awq", **W4, "steps": 4}],
    "hqq": [{"kind": "hqq", **W4}],
    "rtn in 2 bits": [{"kind": "rtn", "bits": 2, "group_size": 16}],
    "rtn to FP8, and the cache": [{"kind": "rtn", "scheme": "FP8"}, {"kind": "kv_cache"}],
    "rotate": [{"kind": "rotate"}],
    "smoothquant": [{"kind": "smoothquant"}, {"kind": "rtn", "scheme": "W8A8"}],
    "autoround of a sparse model": [
        {"kind": "sparsify", "method": "wanda", "pattern": "2:4"},
        {"kind": "autoround", **W4, "steps": 3},
    ],
    "tune, all at once": [{"kind": "rtn", **W4}, {"kind": "tune", "steps": 3, "blockwise": False}],
    "tune, block by block": [
        {"kind": "rtn", "scheme": "W4A16_ASYM", "group_size": 16},
        {"kind": "tune", "steps": 2, "block_steps": 2, "blockwise": True},
    ],
}
ROUGH = {"gptq, in bfloat16, not sequential": 0.15}
"""Products in bfloat16 differ from a processor's by more than the rounding of sums."""
TO_DEVICE = {
    "blocks/activations.py": "samples, and activations that main memory held",
    "blocks/block.py": "values that a pass gave a block",
    "blocks/folding.py": "scales that were searched for in numpy",
    "blocks/work.py": "weights and buffers of a block, rows of tables, masks",
    "quantize/activations.py": "stored scales of inputs, keys and values",
    "quantize/fake.py": "integers that learning starts from",
    "quantize/hadamard.py": "the rotation",
    "quantize/lessons.py": "samples",
    "work/rotate.py": "what is rotated",
    "work/tune.py": "the whole model",
}
TO_HOST = {
    "blocks/activations.py": "activations that main memory holds, or a hash of masks",
    "blocks/block.py": "new values, which go to a file",
    "blocks/work.py": "numbers of tokens, for tables that stay in their file",
    "execution/quality.py": "logits",
    "quantize/descent.py": "the pivots of columns",
    "quantize/fake.py": "integers that were learned",
    "quantize/fp8.py": "rounded values",
    "quantize/gptq.py": "the order of columns, and their pivots",
    "quantize/grid.py": "integers",
    "quantize/learn.py": "what a killed run goes on from",
    "work/block_layers.py": "inputs for a histogram",
    "work/smoothquant.py": "a sample of inputs and weights, for a search in numpy",
    "work/tune.py": "norms that were learned",
}


def run(passes: list[dict[str, Any]], net: nn.Module, device: str, **more: Any) -> StreamedModel:
    model = streamed(net)
    for config in passes:
        model = apply_pass(KINDS[config["kind"]](**config), model, context(texts(16), device=device, **more)).model
    return model


def check_moves(moves: Mapping[tuple[str, str, str], int]) -> None:
    for source, _, where in moves:
        known = TO_DEVICE if source == "cpu" else TO_HOST
        assert where.partition(":")[0] in known, f"a tensor leaves the {source} in {where}"


def difference(one: StreamedModel, other: StreamedModel) -> float:
    """The largest relative distance between two values of one parameter."""
    pairs = [(one.store.read(name), other.store.read(name)) for name in one.store.names()]
    return max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_gives_what_it_gives_on_the_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run(PASSES[name], llama(layers=2), "cpu")
    with pretend_gpu(monkeypatch, free_bytes=1 << 14) as gpu:  # some activations stay there, others do not
        found = run(PASSES[name], llama(layers=2), "cuda:0")
    assert sum(gpu.operations.values()) > 100
    check_moves(gpu.moves)
    assert difference(want, found) < ROUGH.get(name, 0.02)
