"""The output folder: one writer, one rename, nothing of anyone else's touched."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any

import pytest

from compress import output
from compress.errors import OutputError, PlaceError
from compress.journal import Journal
from compress.output import explained, publish, reserved
from runtime.bundle import Artifact, Judgement, Manifest, write_bundle


def fill(folder: Path, text: str) -> None:
    """A small bundle."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/model.onnx").write_text(text)
    artifact = Artifact("candidate", "model/model.onnx", "onnxruntime-cpu", "int8", (), (), len(text))
    write_bundle(
        folder,
        Manifest(
            name="b",
            task="generic",
            target="onnxruntime-cpu",
            preprocess={"kind": "tensor"},
            artifacts=(artifact,),
            evaluation=None,
            judgement=Judgement(),
            created_by="a test",
        ),
    )


def fill_and_fail(folder: Path) -> None:
    fill(folder, "two")
    raise ZeroDivisionError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_bundle_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "new/deep/b"
    with reserved(out) as staging:
        fill(staging, "one")
        assert not out.exists() and names(out.parent) == [".b.lock", ".b.partial"]
        publish(staging, out)
    assert names(out.parent) == ["b"] and (out / "model/model.onnx").read_text() == "one"


def test_a_bundle_replaces_a_bundle(tmp_path: Path) -> None:
    out = tmp_path / "b"
    fill(out, "one")
    with reserved(out) as staging:
        fill(staging, "two")
        assert (out / "model/model.onnx").read_text() == "one"
        publish(staging, out)
    assert names(tmp_path) == ["b"] and (out / "model/model.onnx").read_text() == "two"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "b"
    out.mkdir()
    with reserved(out) as staging:
        fill(staging, "one")
        publish(staging, out)
    assert names(tmp_path) == ["b"] and (out / "manifest.json").is_file()


def test_a_failing_run_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "b"
    fill(out, "one")
    with pytest.raises(ZeroDivisionError), reserved(out) as staging:
        fill_and_fail(staging)
    assert names(tmp_path) == ["b"] and (out / "model/model.onnx").read_text() == "one"


@pytest.mark.parametrize("out_is_there", [True, False])
def test_what_a_killed_run_left_is_put_right(tmp_path: Path, out_is_there: bool) -> None:
    """The bundle that was moved aside comes back, unless the new one had arrived."""
    out = tmp_path / "b"
    fill(tmp_path / ".b.previous", "previous")
    (tmp_path / ".b.partial").mkdir()
    (tmp_path / ".b.partial/half").write_text("x")
    (tmp_path / ".b.lock").touch()
    if out_is_there:
        fill(out, "new")
    with reserved(out) as staging:
        assert names(tmp_path) == [".b.lock", ".b.partial", "b"] and not names(staging)
    assert (out / "model/model.onnx").read_text() == ("new" if out_is_there else "previous")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "b"
    with reserved(out) as staging:
        (staging / "file").write_text("x")
        for _ in range(2):
            with pytest.raises(PlaceError, match="another run is writing it"), reserved(out):
                pass
        assert (staging / "file").exists(), "the refused run touched nothing"
        with reserved(tmp_path / "c"):
            pass
    with reserved(out):
        pass
    assert PlaceError.exit_code == 2 and OutputError.exit_code == 1


def test_a_lock_file_that_its_holder_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking a file that has no name any more would let a third run in."""
    calls: list[int] = []

    def flock(handle: int, how: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / ".b.lock").unlink()
        fcntl_flock(handle, how)

    fcntl_flock = fcntl.flock
    monkeypatch.setattr(output.fcntl, "flock", flock)
    with reserved(tmp_path / "b"):
        assert len(calls) == 2 and (tmp_path / ".b.lock").exists()
        with pytest.raises(PlaceError), reserved(tmp_path / "b"):
            pass


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSPC,
            "/x: cannot be written: the disk is full; finished steps are kept, free some space and run again",
        ),
        (errno.EACCES, "/x: cannot be written: Permission denied"),
    ],
)
def test_what_the_file_system_says(number: int, said: str) -> None:
    import os

    with pytest.raises(OutputError) as caught, explained(Path("/out")):
        raise OSError(number, os.strerror(number), "/x")
    assert caught.value.problems == (said,)
    with pytest.raises(OutputError, match=r"^/out: cannot be written: odd$"), explained(Path("/out")):
        raise OSError("odd")


def test_the_log_tells_how_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "deep/run.log", quiet=True)
    with journal.step("counting"):
        pass
    with pytest.raises(OutputError), journal.failures():
        raise OutputError("no room")
    lines = journal.file.read_text().splitlines()
    assert lines[0].endswith("s  counting: 0.0 s") and lines[1].endswith("s  failed: OutputError: no room")
    with pytest.raises(KeyboardInterrupt), journal.failures():
        raise KeyboardInterrupt
    assert journal.file.read_text().endswith("failed: KeyboardInterrupt: \n")

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ZeroDivisionError), journal.failures():
        raise ZeroDivisionError
