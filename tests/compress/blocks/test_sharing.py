"""Two processes share the calibration data and reach what one reaches."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from child_processes import SEARCH_PATH

from compress.blocks.sharing import (
    Share,
    from_main,
    gather_from_processes,
    main_process,
    share,
    sum_over_processes,
    wait,
)

SCRIPT = textwrap.dedent("""
    import sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from streaming import W4, context, llama, nearest, streamed, texts
    from compress.blocks import activations
    from compress.blocks.sharing import gather_from_processes, share, sum_over_processes
    from compress.blocks.stream import Stream
    activations.ROWS = 24
    out = Path(sys.argv[1])
    work = out / "work" if share().rank == 0 else None
    stream = Stream(streamed(llama()), context(texts(7), work), float_too=True)
    calls, traces = [], []
    for block in stream:
        grams = {}
        calls.append(len(block.calls))

        def visit(reading, x):
            grams[reading] = grams.get(reading, 0) + (x.double().T @ x.double())

        def act(reading):
            width = block.layers[reading.layers[0]].in_features
            gram = sum_over_processes(grams.get(reading, torch.zeros(width, width, dtype=torch.float64)))
            traces.append(float(gram.trace()))
            for layer in reading.layers:
                block.put(layer, nearest(block.matrix(layer)), W4, float(gram.diagonal().mean()))

        if block.index % 2:
            block.collect(visit)
            for reading in block.readings:
                act(reading)
        else:
            block.lockstep(visit, act)
    model = stream.result().model
    assert len(model.quantized_layers()) == 22
    assert len(set(map(str, gather_from_processes(traces)))) == 1
    torch.save({"calls": gather_from_processes(calls), "traces": traces, "scales": dict(model.activation_scales),
                "weights": {name: model.store.read(name) for name in model.store.names()}}, out / f"{share().rank}.pt")
""")


def launch(out: Path, *launcher: str) -> None:
    out.mkdir()
    script = out / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCH_PATH}
    command = [sys.executable, *launcher, str(script), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_processes_reach_what_one_reaches(tmp_path: Path) -> None:
    """The weights bit for bit, sums of statistics to float64's rounding."""
    launch(tmp_path / "one")
    launch(tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    one, two, other = (torch.load(tmp_path / name) for name in ("one/0.pt", "two/0.pt", "two/1.pt"))
    assert one["calls"] == [[4] * 4] and two["calls"] == [[2] * 4, [2] * 4]
    assert np.allclose(one["traces"], two["traces"], rtol=1e-9)
    assert two["scales"] == other["scales"]
    for name, weight in one["weights"].items():
        assert torch.equal(weight, two["weights"][name]) and torch.equal(weight, other["weights"][name])


def test_one_process_is_alone() -> None:
    assert share() == Share(0, 1) and main_process()
    tensor = torch.ones(2)
    assert sum_over_processes(tensor) is tensor and gather_from_processes("a") == ["a"] and from_main(3) == 3
    wait()
    assert [i for i in range(5) if Share(1, 2).mine(i)] == [1, 3]
