"""Passes on a pretended GPU: no operation mixes devices, nothing moves but where it must, results are the CPU's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distilling import SCHEDULE, conv_net, images, label_dataset, quiet, taught
from pretend_device import OnDevice, pretend_gpu
from streaming import context, gpt2, llama, streamed, texts
from tiny_lm import language_recipe
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from compress.blocks.device import choose_device, explain_no_device
from compress.blocks.streamed import StreamedModel
from compress.distill import train
from compress.errors import PassError, PlanError
from compress.execution.blocks import run_block_pass
from compress.execution.quality import score_streamed
from compress.passes import KINDS, Pass
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from compress.rounding.gram import Gram
from compress.store.cache import ResultCache
from compress.work import apply_pass

W4 = {"scheme": "W4A16", "group_size": 16}
FEW: dict[str, Any] = {"targets": ("re:.*[kv]_proj",)}
PASSES: dict[str, list[dict[str, Any]]] = {
    "gptq, tables too": [{"kind": "gptq", **W4, "embeddings": "W4", "lm_head": "W4"}],
    "gptq, in bfloat16": [{"kind": "gptq", **W4, **FEW, "compute": "bfloat16"}],
    "gptq of a sparse model": [
        {"kind": "sparsify", "sparsity": 0.5, **FEW},
        {"kind": "gptq", "scheme": "W4A16_ASYM", "group_size": 16, "actorder": False, **FEW},
    ],
    "awq": [{"kind": "awq", **W4, "steps": 4}],
    "awq to MXFP8": [{"kind": "awq", "scheme": "MXFP8", "steps": 2, "targets": ("re:.*[qkv]_proj",)}],
    "hqq": [{"kind": "hqq", **W4}],
    "rtn in 2 bits": [{"kind": "rtn", "bits": 2, "group_size": 16}],
    "rtn to FP8, and the cache": [{"kind": "rtn", "scheme": "FP8"}, {"kind": "kv_cache"}],
    "gptq to NVFP4": [{"kind": "gptq", "scheme": "NVFP4", **FEW}],
    "autoround to MXFP4": [{"kind": "autoround", "scheme": "MXFP4A16", "steps": 2, "targets": ("re:.*[qkv]_proj",)}],
    "gptq in bits under an average": [
        {"kind": "gptq", "bits": {"average": 3.5, "choices": (2, 4)}, "group_size": 16, **FEW}
    ],
    "rotate": [{"kind": "rotate"}],
    "smoothquant": [{"kind": "smoothquant"}, {"kind": "rtn", "scheme": "W8A8"}],
    "autoround of a sparse model": [
        {"kind": "sparsify", "method": "wanda", "pattern": "2:4", **FEW},
        {"kind": "autoround", **W4, "steps": 2, **FEW},
    ],
    "tune, all at once": [{"kind": "rtn", **W4}, {"kind": "tune", "steps": 2, "blockwise": False}],
    "tune, block by block": [
        {"kind": "rtn", "scheme": "W4A16_ASYM", "group_size": 16, **FEW},
        {"kind": "tune", "steps": 1, "block_steps": 2, "blockwise": True},
    ],
}
SLOW = {"tune, block by block", "gptq, tables too"}
TWO_BLOCKS = SLOW | {"rotate", "tune, all at once", "autoround to MXFP4", "smoothquant"}
"""Of these the second block reads what the device, or main memory, held of the first one's outputs."""
ROUGH = {"gptq, in bfloat16": 0.15}
"""Products in bfloat16 differ from a processor's by more than the rounding of sums."""
TO_DEVICE = {
    "blocks/activations.py": "samples, and activations that main memory held",
    "blocks/block.py": "values that a pass gave a block",
    "blocks/folding.py": "scales that were searched for in numpy",
    "blocks/work.py": "weights and buffers of a block, rows of tables, masks",
    "rounding/activations.py": "stored scales of inputs, keys and values",
    "rounding/fake.py": "integers that learning starts from",
    "rounding/hadamard.py": "the rotation",
    "rounding/learned_batches.py": "samples",
    "work/awq.py": "a sample of rows",
    "work/block_layers.py": "rows that were rounded, for their error",
    "work/mixed_bits.py": "what was drawn, and rows that were rounded",
    "work/rotate.py": "what is rotated",
    "work/tune.py": "the whole model",
}
TO_HOST = {
    "work/awq.py": "a sample of rows, for the other processes",
    "blocks/activations.py": "activations that main memory holds, or a hash of masks",
    "blocks/block.py": "new values, which go to a file",
    "blocks/work.py": "numbers of tokens, for tables that stay in their file",
    "execution/quality.py": "logits",
    "rounding/descent.py": "the pivots of columns",
    "rounding/fake.py": "integers that were learned",
    "rounding/fp8.py": "rounded values",
    "rounding/gptq.py": "the order of columns, and their pivots",
    "rounding/grid.py": "integers",
    "rounding/learn.py": "what a killed run goes on from",
    "work/block_layers.py": "inputs for a histogram",
    "work/smoothquant.py": "a sample of inputs and weights, for a search in numpy",
    "work/tune.py": "norms that were learned",
}


def make_pass(config: dict[str, Any]) -> Pass:
    return KINDS[config["kind"]](**config)


def run(passes: list[dict[str, Any]], net: nn.Module, device: str, n_texts: int = 4) -> StreamedModel:
    model = streamed(net)
    for config in passes:
        model = apply_pass(make_pass(config), model, context(texts(n_texts), device=device)).model
    return model


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("name", PASSES)
def test_a_pass_gives_it_on_a_real_gpu(name: str) -> None:
    """Of wider layers than on the pretended one, so that products are a GPU's own."""
    net = llama(layers=2, hidden_size=256, intermediate_size=512)
    found = run(PASSES[name], net, str(choose_device("cuda")))
    assert difference(run(PASSES[name], net, "cpu"), found) < 2 * ROUGH.get(name, 0.02)


def check_moves(moves: Mapping[tuple[str, str, str], int]) -> None:
    for source, _, where in moves:
        known = TO_DEVICE if source == "cpu" else TO_HOST
        assert where.partition(":")[0] in known, f"a tensor leaves the {source} in {where}"


def difference(one: StreamedModel, other: StreamedModel) -> float:
    """The largest relative distance between two values of one parameter."""
    pairs = [(one.store.read(name), other.store.read(name)) for name in one.store.names()]
    return max(float((a - b).norm() / a.norm().clamp_min(1e-30)) for a, b in pairs)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in PASSES]
)
def test_a_pass_gives_what_it_gives_on_the_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 2 if name in TWO_BLOCKS else 1
    want = run(PASSES[name], llama(layers=layers), "cpu")
    with pretend_gpu(monkeypatch, free_bytes=1 << 13) as gpu:  # some activations stay there, others do not
        found = run(PASSES[name], llama(layers=layers), "cuda:0")
    assert sum(gpu.operations.values()) > 100
    check_moves(gpu.moves)
    assert difference(want, found) < ROUGH.get(name, 0.02)


@pytest.mark.parametrize("make", [gpt2, lambda: llama(layers=2, tied=True)], ids=["positions and Conv1D", "tied head"])
def test_other_models_and_their_scores(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scored in torch: both models pass through block by block."""
    config = make_pass({"kind": "rtn", "scheme": "W8A8_STATIC", "ignore": ()})
    net = make()
    want = apply_pass(config, streamed(net), context(texts(4))).model
    with pretend_gpu(monkeypatch) as gpu:
        found = apply_pass(config, streamed(net), context(texts(4), device="cuda:0")).model
        scored = score_streamed(streamed(net), found, context(texts(4, padded=False), target="vllm", device="cuda:0"))
    check_moves(gpu.moves)
    assert difference(want, found) < 0.02
    reference = score_streamed(streamed(net), want, context(texts(4, padded=False), target="vllm"))
    for one, other in zip(scored, reference, strict=True):
        assert all(np.allclose(one[name], other[name], rtol=1e-3, atol=1e-4) for name in other)


class PlainAccelerator:
    """What accelerate does where there is one process, for a device that it would not find."""

    process_index, num_processes = 0, 1

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, parameters: list[nn.Parameter], limit: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, limit, foreach=False)


def test_training_runs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = replace(SCHEDULE, steps=4, freeze_batchnorm=True, ema_decay=0.5)
    net, log = taught(schedule)
    monkeypatch.setattr(train, "_make_accelerator", lambda device: PlainAccelerator())
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, as on a real GPU
    try:
        with pretend_gpu(monkeypatch) as gpu:
            there, found = taught(schedule, device="cuda:0")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert sum(gpu.operations.values()) > 100
    assert [loss for _, loss in found.curve] == pytest.approx([loss for _, loss in log.curve], rel=1e-4)
    torch.testing.assert_close(there.fc.weight, net.fc.weight, rtol=1e-4, atol=1e-5)


def full_beyond(limit: int, function: Any, count: Any) -> Any:
    """`function`, which a device has memory for where `count(*args)` is at most `limit`."""

    def limited(*args: Any, **kwargs: Any) -> Any:
        if count(*args) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return function(*args, **kwargs)

    return limited


def test_training_takes_fewer_samples_at_once_where_the_device_is_full() -> None:
    schedule, lines = replace(SCHEDULE, steps=3, freeze_batchnorm=True), list[str]()
    _, log = taught(schedule)
    net = conv_net().requires_grad_(True)
    dataset = label_dataset(net, images())
    dataset = replace(dataset, loss=full_beyond(3, dataset.loss, lambda batch: len(batch.rows)))
    found = train.train(net, dataset, schedule, quiet(log=lines.append))
    assert [line for line in lines if "full" in line] == [
        f"the device's memory is full; going on with {n} samples at once" for n in (4, 2)
    ]
    assert [loss for _, loss in found.curve] == pytest.approx([loss for _, loss in log.curve], rel=1e-4)


class SmallMLP(LlamaMLP):
    """One that a device has memory for where it sees `limit` tokens at most."""

    limit: int

    def forward(self, x: Tensor) -> Tensor:
        return full_beyond(self.limit, super().forward, lambda x: x[..., 0].numel())(x)


def with_small_memory(net: Any, limit: int) -> nn.Module:
    for layer in net.model.layers:
        layer.mlp.__class__, layer.mlp.limit = SmallMLP, limit
    return net


@pytest.mark.parametrize("blockwise", [None, False, True], ids=["gptq", "tune, all at once", "tune, block by block"])
def test_a_pass_takes_fewer_rows_where_the_device_is_full(blockwise: bool | None, tmp_path: Path) -> None:
    """It goes on after its finished blocks: what did not fit is the second block's, for more than 150 tokens."""
    gptq: dict[str, Any] = {"kind": "gptq", **W4, **FEW}
    tune: dict[str, Any] = {"kind": "tune", "steps": 1, "block_steps": 1, "blockwise": blockwise, "batch_size": 16}
    passes = [gptq] if blockwise is None else [{"kind": "rtn", **W4}, tune]
    net, lines = llama(layers=2), list[str]()
    want, model = run(passes, net, "cpu", n_texts=16), streamed(with_small_memory(net, 150))
    for number, config in enumerate(passes):
        about = context(texts(16), log=lines.append)
        pass_ = make_pass(config)
        model = run_block_pass(ResultCache(tmp_path), f"{number:064d}", "", pass_, model, about).model
    assert "the device's memory is full; going on with 128 tokens at once" in lines
    assert difference(want, model) < 0.02


def test_what_does_not_fit_at_all_is_said(tmp_path: Path) -> None:
    model = streamed(with_small_memory(llama(), 0), structure=streamed(llama()).structure)
    with pytest.raises(PassError, match="no memory for the work, not even with 128 tokens at once; use device: cpu"):
        run_block_pass(ResultCache(tmp_path), "0" * 64, "", make_pass({"kind": "gptq", **W4}), model, context(texts()))


def test_the_pretended_gpu_sees_what_a_real_one_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_gpu(monkeypatch) as gpu:
        x = torch.ones(4, 3, device=choose_device("auto"))
        assert isinstance(x, OnDevice) and x.device == torch.device("cuda", 0)
        with pytest.raises(RuntimeError, match="same device"):
            x @ torch.ones(3, 2)
        with pytest.raises(RuntimeError, match="same device"):
            Gram(3).add(x)  # it was made for rows of the processor
        with pytest.raises((RuntimeError, TypeError)):
            x.numpy()
        with pytest.raises(AssertionError, match="on"):
            x[torch.tensor([True, False, True, False])]
        assert (x * 2).sum().item() == 24 and not gpu.moves
        x.cpu()
        assert gpu.moves == {("cuda", "cpu", ""): 1}
        with pytest.raises(AssertionError, match="leaves the cuda in"):
            check_moves(gpu.moves)


@pytest.mark.parametrize(
    ("built_for", "said"),
    [
        (None, "was built without CUDA; install a build of torch for CUDA"),
        ("13.0", "was built for CUDA 13.0, but sees no GPU; see `nvidia-smi`"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_the_way_out(
    built_for: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pretend_gpu(monkeypatch, count=0):
        assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
        assert said in explain_no_device("cuda:1")


def test_of_several_gpus_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_gpu(monkeypatch, count=2):
        assert choose_device("auto") == torch.device("cuda", 0) and choose_device("cuda:1") == torch.device("cuda", 1)
        with pytest.raises(PassError, match=r"cuda:2 was asked for by 1 process.*torch sees 2 GPU"):
            choose_device("cuda:2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert choose_device("cuda") == torch.device("cuda", 1)
        assert "each of the 2 processes needs its own" in explain_no_device("cuda:0")


def test_the_plan_refuses_it(tmp_path: Path) -> None:
    given = language_recipe(tmp_path, [{"kind": "rtn"}], device="cuda:99")
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    with pytest.raises(PlanError, match="device: cuda:99 was asked for"):
        make_plan(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "cache", twins=False)
