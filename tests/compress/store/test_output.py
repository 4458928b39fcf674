"""The output folder: one writer, one rename, nothing of anyone else's touched."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import Faults, failing
from rich.console import Console

from compress.errors import OutputError, PlaceError
from compress.store import durable, output
from compress.store.durable import MARK, blame
from compress.store.output import keep_log, publish, reserve_output
from compress.store.run_log import RunLog, RunPosition
from runtime.bundle.format import Artifact, Judgement, Manifest
from runtime.processes.endings import end_command
from runtime.tasks.manifest import write_bundle


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


def test_an_interrupt_waits_until_the_place_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def interrupted(*args: Any, **more: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        remove(*args, **more)

    def run() -> int:
        with reserve_output(tmp_path / "b") as staging:
            fill(staging, "one")
            monkeypatch.setattr(output.shutil, "rmtree", interrupted)
        raise AssertionError("it goes on")

    assert end_command(run, as_json=False) == 143
    assert names(tmp_path) == []


def test_a_bundle_appears_whole(tmp_path: Path) -> None:
    out = tmp_path / "new/deep/b"
    with reserve_output(out) as staging:
        fill(staging, "one")
        assert not out.exists() and names(out.parent) == [".b.partial"]
        publish(staging, out)
    assert names(out.parent) == ["b"] and (out / "model/model.onnx").read_text() == "one"


def test_a_bundle_replaces_a_bundle(tmp_path: Path) -> None:
    out = tmp_path / "b"
    fill(out, "one")
    with reserve_output(out) as staging:
        fill(staging, "two")
        assert (out / "model/model.onnx").read_text() == "one"
        publish(staging, out)
    assert names(tmp_path) == ["b"] and (out / "model/model.onnx").read_text() == "two"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    out = tmp_path / "b"
    out.mkdir()
    with reserve_output(out) as staging:
        fill(staging, "one")
        publish(staging, out)
    assert names(tmp_path) == ["b"] and (out / "manifest.json").is_file()


def test_a_failing_run_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "b"
    fill(out, "one")
    with pytest.raises(ZeroDivisionError), reserve_output(out) as staging:
        fill_and_fail(staging)
    assert names(tmp_path) == ["b"] and (out / "model/model.onnx").read_text() == "one"


@pytest.mark.parametrize("out_is_there", [True, False])
def test_what_a_killed_run_left_is_put_right(tmp_path: Path, out_is_there: bool) -> None:
    """The bundle that was moved aside comes back, unless the new one had arrived."""
    out = tmp_path / "b"
    work = tmp_path / ".b.partial"
    fill(work / "old", "previous")
    (work / MARK).touch()
    if out_is_there:
        fill(out, "new")
    else:
        (work / "new/half").mkdir(parents=True)
    with reserve_output(out) as staging:
        assert names(tmp_path) == [".b.partial", "b"] and not names(staging)
    assert (out / "model/model.onnx").read_text() == ("new" if out_is_there else "previous")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "b"
    with reserve_output(out) as staging:
        (staging / "file").write_text("x")
        for _ in range(2):
            with pytest.raises(PlaceError, match="another run is writing it"), reserve_output(out):
                pass
        assert (staging / "file").exists(), "the refused run touched nothing"
        with reserve_output(tmp_path / "c"):
            pass
    with reserve_output(out):
        pass
    assert PlaceError.exit_code == 2 and OutputError.exit_code == 1


def test_a_lock_file_that_its_holder_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking a file that has no name any more would let a third run in."""
    calls: list[int] = []

    def flock(handle: int, how: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            (tmp_path / ".b.partial" / MARK).unlink()
        fcntl_flock(handle, how)

    fcntl_flock = fcntl.flock
    monkeypatch.setattr(durable.fcntl, "flock", flock)
    with reserve_output(tmp_path / "b"):
        assert len(calls) == 2 and (tmp_path / ".b.partial" / MARK).exists()
        with pytest.raises(PlaceError), reserve_output(tmp_path / "b"):
            pass


FOREIGN = {
    "a file": lambda out: (out / "notes.txt").write_text("mine"),
    "a file that is called like a report": lambda out: (out / "report.my-notes.txt").write_text("mine"),
    "an empty folder": lambda out: (out / "model/mine").mkdir(),
    "an edited README": lambda out: (out / "README.md").write_text("mine"),
    "a link": lambda out: (out / "report.json").symlink_to("/etc/hostname"),
}


@dataclass
class Renames:
    """What happens before a rename, which may raise."""

    before: Callable[[Path, Path], object] = lambda source, target: None


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch) -> Renames:
    renames, rename = Renames(), os.rename

    def call(source: Path, target: Path) -> None:
        renames.before(Path(source), Path(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", call)
    return renames


def replace_bundle(out: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    with reserve_output(out) as staging:
        fill(staging, "two")
        meanwhile()
        publish(staging, out)


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("when", ["before", "while the run works", "between the check and the rename"])
def test_what_is_not_a_bundles_own_stays(tmp_path: Path, what: str, when: str, renames: Renames) -> None:
    """Refused, at the last instant too: what was there is there, and the old bundle beside it."""
    out = tmp_path / "b"
    seen: list[list[tuple[str, bytes]]] = []
    out.mkdir()
    (out / "README.md").write_text("a card")
    fill(out, "one")

    def contents() -> list[tuple[str, bytes]]:
        return sorted((str(path), path.read_bytes() if path.is_file() else b"") for path in out.rglob("*"))

    def add() -> None:
        FOREIGN[what](out)
        seen.append(contents())

    def add_at_the_rename(source: Path, target: Path) -> None:
        if source == out and not seen:
            add()

    def meanwhile() -> None:
        if when == "while the run works":
            add()
        elif when == "between the check and the rename":
            renames.before = add_at_the_rename

    if when == "before":
        add()
    error = PlaceError if when == "before" else OutputError
    with pytest.raises(error, match=f"^{out}: .*choose another --out"):
        replace_bundle(out, meanwhile)
    assert names(tmp_path) == ["b"] and seen == [contents()]


def test_a_log_or_a_report_that_was_written_again_is_the_bundles_own(tmp_path: Path) -> None:
    out = tmp_path / "b"
    fill(out, "one")
    for name in ("compress.log", "report.json", "report.md", "report.xml", "report.steps.json", "report.md.17.tmp"):
        (out / name).write_text("x")
    with reserve_output(out) as staging:
        fill(staging, "two")
        publish(staging, out)
    assert names(out) == ["manifest.json", "model"]


@pytest.mark.parametrize("name", [".b.partial", ".b.previous", ".b.lock", "b.compress.log"])
def test_what_a_user_calls_like_our_own_is_left_alone(tmp_path: Path, name: str) -> None:
    """A folder without our mark is refused where we would work, anything else is passed by."""
    out = tmp_path / "b"
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("mine")
    if name == ".b.partial":
        with pytest.raises(PlaceError, match="was not made by compress; move it away"), reserve_output(out):
            pass
    else:
        with reserve_output(out) as staging:
            fill(staging, "one")
            (staging / "compress.log").write_text("ours")
            assert keep_log(staging / "compress.log", out).read_text() == "ours"
            publish(staging, out)
    assert (tmp_path / name / "mine").read_text() == "mine"


def test_a_work_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".b.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlaceError, match="was not made by compress"), reserve_output(tmp_path / "b"):
        pass
    assert not names(tmp_path / "elsewhere")


def test_logs_of_failed_runs_overwrite_nothing(tmp_path: Path) -> None:
    (tmp_path / "compress.log").write_text("failed")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "b.compress.log").symlink_to(tmp_path / "victim")
    kept = [keep_log(tmp_path / "compress.log", tmp_path / "b").name for _ in range(2)]
    assert kept == ["b.2.compress.log", "b.3.compress.log"]
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / kept[1]).read_text() == "failed"


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EXDEV, errno.EPERM])
def test_a_folder_that_cannot_be_renamed_is_found_before_any_work(
    tmp_path: Path, renames: Renames, number: int
) -> None:
    out = tmp_path / "b"
    fill(out, "one")

    def refuse(source: Path, target: Path) -> None:
        if source == out:
            raise OSError(number, os.strerror(number), str(source), None, str(target))

    renames.before = refuse
    with pytest.raises(PlaceError, match=f"{out}: cannot be replaced.*name a folder inside it") as caught:
        replace_bundle(out, lambda: pytest.fail("work began"))
    assert ("a mount point" in str(caught.value)) == (number != errno.EPERM)
    assert names(tmp_path) == ["b"] and (out / "model/model.onnx").read_text() == "one"


def test_a_mount_point_is_found_before_any_work(tmp_path: Path) -> None:
    """A real one, in a process that may mount."""
    (tmp_path / "b").mkdir()
    code = (
        "import sys; from pathlib import Path; from compress.errors import PlaceError\n"
        "from compress.store.output import reserve_output\n"
        "try:\n    with reserve_output(Path(sys.argv[1])): print('work')\n"
        "except PlaceError as error: print(error)\n"
    )
    inside = f'mount -t tmpfs none {tmp_path}/b && exec {sys.executable} -c "$0" {tmp_path}/b'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", inside, code], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.stdout.startswith(f"{tmp_path}/b: cannot be replaced") and "it is a mount point" in done.stdout


@pytest.mark.parametrize(("out", "said"), [("b" * 250, "more than 246 bytes"), ("/".join(["b" * 200] * 20), "bytes,")])
def test_names_that_are_too_long_are_found_before_any_work(tmp_path: Path, out: str, said: str) -> None:
    with pytest.raises(PlaceError, match=f"{said}.*choose a shorter --out"), reserve_output(tmp_path / out):
        pytest.fail("work began")
    assert not names(tmp_path)


def test_an_old_bundle_that_could_not_be_put_back_waits_for_the_next_run(tmp_path: Path, renames: Renames) -> None:
    out, usual = tmp_path / "b", renames.before
    fill(out, "one")

    def refuse(source: Path, target: Path) -> None:
        if target == out:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))

    def meanwhile() -> None:
        renames.before = refuse

    with pytest.raises(OutputError, match=r"cannot be put back.*lies whole in .*\.b\.partial/old"):
        replace_bundle(out, meanwhile)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(PlaceError, match=r"stands where the bundle in .* stood"), reserve_output(out):
        pass
    out.rmdir()
    renames.before = usual
    with reserve_output(out):
        assert (out / "model/model.onnx").read_text() == "one"


def test_one_failure_to_put_the_old_bundle_back_is_tried_again(tmp_path: Path, renames: Renames) -> None:
    out, failed = tmp_path / "b", []
    fill(out, "one")

    def fail_once(source: Path, target: Path) -> None:
        if target == out and not failed:
            failed.append(target)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))

    renames.before = fail_once
    with reserve_output(out):
        assert failed and (out / "model/model.onnx").read_text() == "one"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.ENOSPC,
            "/x: cannot be written: the disk is full; finished work is kept, free some space and run again",
        ),
        (errno.EACCES, "/x: cannot be read or written: Permission denied"),
    ],
)
def test_what_the_file_system_says(number: int, said: str) -> None:
    with pytest.raises(OutputError) as caught, blame(Path("/out")):
        raise OSError(number, os.strerror(number), "/x")
    assert caught.value.problems == (said,)
    with pytest.raises(OutputError, match=r"^/out: cannot be read or written: odd$"), blame(Path("/out")):
        raise OSError("odd")


def test_the_log_tells_how_a_run_ended(tmp_path: Path) -> None:
    run_log = RunLog(tmp_path / "deep/run.log", quiet=True)
    with run_log.time_stage("counting"):
        pass
    with pytest.raises(OutputError), run_log.failures():
        raise OutputError("no room")
    lines = run_log.file.read_text().splitlines()
    assert lines[0].endswith("s  counting: 0.0 s") and lines[1].endswith("s  failed: OutputError: no room")
    with pytest.raises(KeyboardInterrupt), run_log.failures():
        raise KeyboardInterrupt
    assert run_log.file.read_text().endswith("failed: KeyboardInterrupt: \n")

    full = Faults((tmp_path,), at=0, number=errno.ENOSPC)
    with pytest.raises(ZeroDivisionError), failing(full), run_log.failures():
        raise ZeroDivisionError
    assert [call.name for call in full.calls] == ["write"]


def test_a_name_that_is_no_text_is_found_before_any_work(tmp_path: Path) -> None:
    place = reserve_output(tmp_path / "o\udcff")
    with pytest.raises(PlaceError, match="a name that is not UTF-8; choose another --out") as caught, place:
        pass
    assert str(caught.value).isprintable()


def test_a_long_step_says_where_it_is(tmp_path: Path) -> None:
    shown = io.StringIO()
    run_log = RunLog(tmp_path / "run.log", console=Console(file=shown, width=200), beat_s=0.01)

    def wait_for(text: str) -> None:
        for _ in range(500):
            if text in shown.getvalue():
                return
            time.sleep(0.01)
        raise AssertionError(shown.getvalue())

    with run_log.time_stage("prune_layers"):
        for item in run_log.progress("abc", "blocks chosen"):
            if item == "b":
                wait_for("prune_layers, blocks chosen 1 of 3: 0 s so far")
        wait_for("prune_layers: 0 s so far")
    assert "prune_layers, blocks chosen 1 of 3" in (tmp_path / "run.log").read_text()
    assert "s  prune_layers: 0." in (tmp_path / "run.log").read_text().splitlines()[-1]


def test_a_terminal_has_one_live_line_that_counts_down(tmp_path: Path) -> None:
    shown = io.StringIO()
    run_log = RunLog(tmp_path / "run.log", console=Console(file=shown, width=79, force_terminal=True))
    run_log.expected_s = {"judging": 25.0}
    with run_log.time_stage("judging", "797 samples"):
        for _ in run_log.progress("abc", "timing"):
            pass
        run_log.log("a line above it")
    assert "judging: 797 samples, about 25 s left" in shown.getvalue()
    assert "\nabout" not in shown.getvalue() and "a line above it" in shown.getvalue()
    assert "samples" not in (tmp_path / "run.log").read_text(), "what was live is gone"


def test_a_notebook_has_a_bar_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    class Place:
        def update(self, html: Any) -> None:
            drawn.append(html.data)

    def display(html: Any, display_id: bool) -> Place:
        drawn.append(html.data)
        return Place()

    monkeypatch.setattr("IPython.display.display", display)
    for ci in ("", "true"):
        monkeypatch.setenv("CI", ci)
        shown = io.StringIO()
        run_log = RunLog(tmp_path / f"run{ci}.log", console=Console(file=shown, force_jupyter=True))
        run_log.expected_s = {"judging": 25.0}
        for stage in ("exporting", "judging"):
            with run_log.time_stage(stage, "797 <samples>"):
                run_log.log("a line")
        assert shown.getvalue() == "" and "a line" in run_log.file.read_text()
    assert drawn[0] == "<progress ></progress> exporting: 797 &lt;samples&gt;, 0 s so far"
    assert drawn[-2] == "<progress value=0.000></progress> judging: 797 &lt;samples&gt;, about 25 s left"
    assert drawn[-1] == "" and drawn.count("") == 2, "nothing at all in CI"


def test_what_is_left_is_told_by_the_plan_and_by_the_pace() -> None:
    begun = time.monotonic() - 10
    assert RunPosition("judging", expected_s=25.0, since=begun).estimate_left_s() == pytest.approx(15, abs=1)
    late = RunPosition("timing", total=9, done=3, expected_s=5.0, since=begun)
    late.marks = [(1, begun + 1), (2, begun + 4), (3, begun + 6)]
    assert late.estimate_left_s() == pytest.approx(12 - 4, abs=1), "counts down while the fourth is under way"
    late.most_s = 15.0
    assert late.estimate_left_s() == pytest.approx(15 - 10, abs=1), "a loop that a clock ends lasts no longer"


def test_of_many_items_the_later_half_tells_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("compress.store.run_log.time.monotonic", lambda: now)
    place = RunPosition("steps", total=4000, since=0.0)
    for step in range(1000):
        now += 5.0 if step < 400 else 2.0
        place.count()
    assert place.estimate_left_s() == pytest.approx(6000, rel=0.01) and len(place.marks) <= 128
    place = RunPosition("blocks", total=3, since=now)
    now += 34
    place.count()
    assert place.estimate_left_s() < 0, "the first item alone tells nothing"
