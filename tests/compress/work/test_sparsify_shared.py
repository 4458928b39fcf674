"""Two processes that share the calibration data make the same model sparse."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from child_processes import SEARCH_PATH
from streaming import llama, streamed
from test_sparsify_pass import on_images, run

from compress.blocks import activations

SHARED = textwrap.dedent("""
    import sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    import test_sparsify_pass as own
    from compress.blocks.sharing import share, wait
    own.activations.ROWS = 24
    for name, result in (("llama", own.run(own.streamed(own.llama()))), ("conv", own.on_images())):
        store = result.model.store
        torch.save({one: store.read(one) for one in store.names()}, f"{sys.argv[1]}/{name}-{share().rank}.pt")
    wait()  # the files are the first process's, and go with it
""")


@pytest.mark.slow
def test_two_processes_reach_what_one_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the same bytes; those of one process to what rounding of sums does to ten steps of refitting."""
    monkeypatch.setattr(activations, "ROWS", 24)
    (tmp_path / "script.py").write_text(SHARED)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, str(tmp_path / "script.py"), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCH_PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, alone in (("llama", run(streamed(llama()))), ("conv", on_images())):
        one, other = (torch.load(tmp_path / f"{name}-{rank}.pt") for rank in (0, 1))
        for key, found in one.items():
            assert torch.equal(found, other[key])
            torch.testing.assert_close(found, alone.model.store.read(key), rtol=0, atol=2e-3)
