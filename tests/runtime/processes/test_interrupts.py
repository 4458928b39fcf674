"""Ctrl-C and SIGTERM: none is lost in a finalizer, and no temporary folder and no child is left."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.processes.endings import end_command
from runtime.processes.interrupts import MARK, PREFIX, Terminated, delay_interrupts, end_orderly, sweep

ENDS = {signal.SIGINT: (KeyboardInterrupt, 130), signal.SIGTERM: (Terminated, 143)}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Finalized:
    """An object that is signalled while it goes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)
        sum(range(10))  # the handler runs here


@contextmanager
def loop_for(seconds: float) -> Iterator[None]:
    yield
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.005)


@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize("seconds", [0, 5])
def test_an_interrupt_in_a_finalizer_is_not_lost(number: signal.Signals, seconds: float) -> None:
    start = time.monotonic()
    with pytest.raises(ENDS[number][0]), end_orderly(), loop_for(seconds):
        Finalized(number)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_ends_a_command_with_its_exit_code(number: signal.Signals, place: Path) -> None:
    def run() -> int:
        with tempfile.TemporaryDirectory():
            Path(tempfile.mkdtemp(), "left").touch()
            assert len(list(place.iterdir())) == 1
            signal.raise_signal(number)
            raise AssertionError("it goes on")

    before = signal.getsignal(number), os.environ.get("TMPDIR"), tempfile.tempdir
    assert end_command(run, as_json=False) == ENDS[number][1]
    assert list(place.iterdir()) == []
    assert (signal.getsignal(number), os.environ.get("TMPDIR"), tempfile.tempdir) == before


def test_what_is_cleaned_up_is_cleaned_up_whole() -> None:
    done = []

    def run() -> int:
        with delay_interrupts():
            signal.raise_signal(signal.SIGTERM)
            done.append("cleaned")
        done.append("went on")
        return 0

    assert end_command(run, as_json=False) == 143
    assert done == ["cleaned"]


def test_only_folders_of_killed_runs_are_swept(place: Path) -> None:
    dead, alive, foreign, young, target = (place / f"{PREFIX}{name}" for name in ("dead", "alive", "mine", "new", "to"))
    for folder in (dead, alive, foreign, young):
        folder.mkdir()
    for folder in (dead, alive):
        (folder / MARK).touch()
    (foreign / "notes.txt").touch()
    (dead / "a").mkdir()
    target.symlink_to(foreign)
    handle = os.open(alive, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    sweep(place)
    os.close(handle)
    assert sorted(place.iterdir()) == sorted([alive, foreign, target])
    assert (foreign / "notes.txt").is_file()


def test_the_next_run_sweeps_what_a_kill_left(place: Path) -> None:
    lines = (
        "import os, signal",
        "from runtime.processes.interrupts import end_orderly",
        "with end_orderly(): os.kill(os.getpid(), signal.SIGKILL)",
    )
    code = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(place)}, check=False)
    assert done.returncode == -signal.SIGKILL and len(list(place.iterdir())) == 1
    with end_orderly():
        pass
    assert list(place.iterdir()) == []


def test_a_place_without_room_for_a_folder_stops_no_command(place: Path) -> None:
    place.rmdir()
    assert end_command(lambda: 0, as_json=False) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_child_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    child = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(f'{{os.getpid()}}.'); time.sleep(60)"
    code = f"from runtime.processes.isolated import start_python\nstart_python({child!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_until(lambda: file.is_file() and file.read_text().endswith("."))
        parent.kill()
    state = Path(f"/proc/{file.read_text()[:-1]}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z")


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.01)
