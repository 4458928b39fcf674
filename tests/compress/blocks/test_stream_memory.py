"""The memory of a stream, told from shapes, against what a process of its own takes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from child_processes import SEARCH_PATH
from streaming import gpt2, llama, streamed

from compress.blocks.stream_memory import FIXED_BYTES, StreamUse, stream_memory
from compress.blocks.streamed import StreamedModel

MIB = 2**20
SCRIPT = textwrap.dedent("""
    import gc
    import sys
    from pathlib import Path
    import numpy as np
    import torch
    from streaming import context, llama, streamed
    from compress.blocks import heap
    from compress.blocks.stream import Stream
    from compress.blocks.stream_memory import StreamUse, stream_memory

    def status(key):
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

    width, n, t = 512, 32, 256
    big = dict(hidden_size=width, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=8)
    net = llama(layers=2, **big)
    model = streamed(net, Path(sys.argv[1]))
    del net
    ids = np.random.default_rng(0).integers(0, 64, (n, t))
    batches = [{"input_ids": row[None], "attention_mask": np.ones((1, t), np.int64)} for row in ids]
    torch.ones(256, 256) @ torch.ones(256, 256)
    heap.return_large()
    gc.collect()
    heap.return_all()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    for block in Stream(model, context(batches)):
        block.lockstep(lambda reading, x: None, lambda reading: None)
    shapes = {name: model.store.shape(name) for name in model.store.names()}
    use = StreamUse(rounded=())
    print(stream_memory(model.structure, shapes, n * t, width, use), status("VmHWM") - before)
""")


def told(model: StreamedModel, n_rows: int = 20_000, **use: object) -> int:
    shapes = {name: model.store.shape(name) for name in model.store.names()}
    return stream_memory(model.structure, shapes, n_rows, 32, StreamUse(**use))  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone tells a peak that can start anew")
@pytest.mark.slow
def test_told_and_taken(tmp_path: Path) -> None:
    """A width of 512, 32 texts of 256 tokens: about 170 MiB."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": SEARCH_PATH}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected, taken = map(int, done.stdout.split())
    assert expected == pytest.approx(taken, rel=0.15), f"{expected / MIB:.0f} MiB told, {taken / MIB:.0f} taken"


def test_what_it_depends_on() -> None:
    shallow, deep = streamed(llama(layers=2)), streamed(llama(layers=6))
    assert told(shallow) == told(deep)  # flat in depth
    assert told(shallow, lockstep=False) < told(shallow) < told(shallow, float_too=True)
    assert told(shallow, 40_000) > told(shallow) > FIXED_BYTES
    assert told(shallow, 10) > told(shallow, 10, rounded=())
    assert told(shallow, compute="bfloat16") < told(shallow)
    assert told(streamed(gpt2())) > FIXED_BYTES  # weights [in, out]


def test_without_data_a_block_alone() -> None:
    model = streamed(llama())
    block = sum(model.store.read(name).numel() for name in model.store.names() if name.startswith("model.layers.0."))
    assert told(model, 0, rounded=(), lockstep=False) == FIXED_BYTES + 5 * block
