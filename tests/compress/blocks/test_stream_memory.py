"""The memory of a stream, told from shapes, against what a process of its own takes."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from child_processes import run_in_process
from streaming import context, gpt2, llama, streamed

from compress.blocks import heap
from compress.blocks.stream import Stream
from compress.blocks.stream_memory import FIXED_BYTES, StreamUse, stream_memory
from compress.blocks.streamed import StreamedModel

MIB = 2**20


def read_status(key: str) -> int:
    """Return a number of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def tell_and_take(folder: Path) -> tuple[int, int]:
    """Return the bytes that a stream of a width of 512 is told to take, and by how many this process's peak rises."""
    torch.set_num_threads(2)
    width, n, t = 512, 32, 256
    big = {"hidden_size": width, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 8}
    net = llama(layers=2, **big)
    model = streamed(net, folder)
    del net
    ids = np.random.default_rng(0).integers(0, 64, (n, t))
    batches = [{"input_ids": row[None], "attention_mask": np.ones((1, t), np.int64)} for row in ids]
    torch.ones(256, 256) @ torch.ones(256, 256)
    heap.return_large()
    gc.collect()
    heap.return_all()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = read_status("VmRSS")
    for block in Stream(model, context(batches)):
        block.lockstep(lambda input_group, x: None, lambda input_group: None)
    shapes = {name: model.store.shape(name) for name in model.store.names()}
    use = StreamUse(rounded=())
    return stream_memory(model.structure, shapes, n * t, width, use), read_status("VmHWM") - before


def told(model: StreamedModel, n_rows: int = 20_000, **use: object) -> int:
    shapes = {name: model.store.shape(name) for name in model.store.names()}
    return stream_memory(model.structure, shapes, n_rows, 32, StreamUse(**use))  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone tells a peak that can start anew")
@pytest.mark.slow
def test_told_and_taken(tmp_path: Path) -> None:
    """A width of 512, 32 texts of 256 tokens: about 170 MiB."""
    expected, taken = run_in_process(tell_and_take, tmp_path)
    assert expected == pytest.approx(taken, rel=0.15), f"{expected / MIB:.0f} MiB told, {taken / MIB:.0f} taken"


def test_what_it_depends_on() -> None:
    shallow, deep = streamed(llama(layers=2)), streamed(llama(layers=6))
    assert told(shallow) == told(deep)  # flat in depth
    assert told(shallow) < told(shallow, float_too=True)
    assert told(shallow, 40_000) > told(shallow) > FIXED_BYTES
    assert told(shallow, 10) > told(shallow, 10, rounded=())
    assert told(streamed(gpt2())) > FIXED_BYTES  # weights [in, out]


def test_without_data_a_block_alone() -> None:
    model = streamed(llama())
    block = sum(model.store.read(name).numel() for name in model.store.names() if name.startswith("model.layers.0."))
    assert told(model, 0, rounded=()) == FIXED_BYTES + 5 * block
