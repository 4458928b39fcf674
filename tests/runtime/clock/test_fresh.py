"""Fresh processes: what they are given arrives, what they find comes back, and their errors are errors here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runtime.clock.compare import compare_files
from runtime.clock.fresh import read_batches, run_fresh, write_batches
from runtime.errors import RuntimeFailure, UsageError


def test_batches_are_read_as_they_were_written(tmp_path: Path) -> None:
    parts = {
        "single 0": [{"x": np.zeros((1, 2), np.float32), "a/b:0": np.array([[1]])}, {"x": np.ones((1, 3))}],
        "large 0": [{"x": np.arange(6).reshape(3, 2)}],
    }
    write_batches(tmp_path / "feeds.npz", parts)
    found = read_batches(tmp_path / "feeds.npz")
    assert found.keys() == parts.keys()
    for name, batches in parts.items():
        assert [list(batch) for batch in found[name]] == [list(batch) for batch in batches]
        for ours, theirs in zip(found[name], batches, strict=True):
            assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_a_file_that_no_backend_opens_fails_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(RuntimeFailure, match=r"model\.onnx"):
        compare_files("onnxruntime-cpu", 1, [tmp_path / "model.onnx"], [{"x": np.zeros(1)}], 1, 0.1, 0)


@pytest.mark.slow
def test_an_error_keeps_its_kind_and_a_crash_is_named(tmp_path: Path) -> None:
    write_batches(tmp_path / "feeds.npz", {"": [{"x": np.zeros(1)}]})
    task = {"backend": "nothing", "feeds": str(tmp_path / "feeds.npz"), "files": [], "first": 0}
    with pytest.raises(UsageError, match="unknown backend 'nothing'"):
        run_fresh("runtime.clock.compare:time_files", task, "timing")
    with pytest.raises(RuntimeFailure, match=r"timing failed in a process of its own: .*no_such"):
        run_fresh("runtime.clock.compare:no_such", {}, "timing")
