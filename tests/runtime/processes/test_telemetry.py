"""Nothing is sent home, and no library keeps an identifier of the machine for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_processes import SEARCH_PATH

from runtime.processes.telemetry import NO_TELEMETRY

SESSION = """
import sys
import runtime
from runtime.backends import find_backend
from pathlib import Path
session = find_backend("onnxruntime-cpu").open(Path(sys.argv[1]), 1, {})
"""


def files_after(model: Path, folder: Path) -> list[str]:
    """Names of what opening a model leaves in the home and the temporary folder of a fresh process."""
    (folder / "home").mkdir(parents=True)
    (folder / "tmp").mkdir()
    kept = {name: value for name, value in os.environ.items() if name not in NO_TELEMETRY and name != "CI"}
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "home")}
    subprocess.run([sys.executable, "-c", SESSION, str(model)], check=True, env=kept | own)
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_onnxruntime_leaves_no_trace_of_telemetry(image_bundle: Path, tmp_path: Path) -> None:
    assert files_after(image_bundle / "model/model.onnx", tmp_path / "person") == []


def test_openvino_sends_nothing_and_leaves_no_trace(image_bundle: Path, tmp_path: Path) -> None:
    """It counts each import, in a process that it forks from a thread, and keeps a number for the person in ~/intel."""
    pytest.importorskip("openvino")
    code = """
import sys, threading
from pathlib import Path
from runtime.backends import BACKENDS
BACKENDS["openvino"].open(Path(sys.argv[1]), 1, {}).close()
sent = [name for name in sys.modules if name.startswith("openvino_telemetry") and sys.modules[name] is not None]
print(sent, threading.active_count())
"""
    home = tmp_path / "home"
    home.mkdir()
    call = [sys.executable, "-c", code, str(image_bundle / "model/model.onnx")]
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"HOME": str(home), "PYTHONPATH": SEARCH_PATH}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[] 1\n", done.stderr
    assert list(home.iterdir()) == []


def test_one_that_is_loaded_already_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    from runtime.processes.telemetry import turn_off_telemetry

    calls: list[None] = []
    monkeypatch.setattr(onnxruntime, "disable_telemetry_events", lambda: calls.append(None))
    turn_off_telemetry()
    assert calls == [None]
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")  # a user's own choice
    turn_off_telemetry()
    assert calls == [None]
