"""Unfinished work: what a run had done when it ended is there for the next one, and for nobody else."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from faults import Faults, failing

from compress.store.cache import ResultCache, hand_over

LABEL = "tiny: pass 1, gptq"


def leave(store: ResultCache, key: str, label: str = LABEL) -> None:
    """A run that fails when it has finished one block."""

    def work() -> None:
        with store.partial(key, label) as folder:
            (folder / "block-0").write_text(key)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()


def test_what_a_failed_run_left_is_found_again_and_gone_after_success(tmp_path: Path) -> None:
    said: list[str] = []
    store = ResultCache(tmp_path / "cache", said.append)
    leave(store, "k")
    with store.partial("k", LABEL) as folder:
        assert folder == tmp_path / "cache/partial-k" and (folder / "block-0").read_text() == "k"
    assert not list(store.root.iterdir()) and not said


def test_another_key_of_the_same_label_starts_afresh_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    store = ResultCache(tmp_path, said.append)
    leave(store, "old")
    leave(store, "foreign", "another recipe")
    with store.partial("new", LABEL) as folder:
        assert not (folder / "block-0").exists()
        assert {path.name for path in tmp_path.iterdir()} == {"partial-new", "partial-foreign"}
    assert said == [
        f"{LABEL}: the recipe, its model, its data or the code has changed since a run that did not finish, "
        "so this pass starts afresh"
    ]


def test_a_folder_that_another_run_works_in_is_left_alone(tmp_path: Path) -> None:
    said: list[str] = []
    store = ResultCache(tmp_path, said.append)
    with store.partial("k", LABEL) as theirs:
        (theirs / "block-0").write_text("x")
        with store.partial("k", LABEL) as ours:
            assert ours != theirs and not list(ours.iterdir())
        with store.partial("other", LABEL):
            assert (theirs / "block-0").exists()
    assert said == ["cache: another run is at work on result k; this one does not wait for it"]
    assert not list(tmp_path.iterdir())


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from compress.store.cache import ResultCache\n"
        "with ResultCache(Path(sys.argv[1])).partial('k', 'label') as folder:\n"
        "    (folder / 'block-0').write_text('theirs'); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    with ResultCache(tmp_path).partial("k", "label") as folder:
        assert (folder / "block-0").read_text() == "theirs"


def test_finished_blocks_become_part_of_the_step(tmp_path: Path) -> None:
    """And are still there if the run ends before the result is published."""
    store = ResultCache(tmp_path)
    leave(store, "k")

    def write(draft: Path) -> dict[str, int]:
        hand_over(tmp_path / "partial-k", draft)
        return {"n": len(list(draft.iterdir()))}

    with store.partial("k", LABEL) as folder:
        cached = store.put("k", write)
        assert (folder / "block-0").exists()
    assert cached.record == {"n": 1} and (cached.folder / "block-0").read_text() == "k"
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_without_hard_links_files_are_copied(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/block-0").write_text("x")
    (tmp_path / "b").mkdir()
    with failing(Faults((tmp_path / "a",), at=1, number=errno.EACCES)) as faults:
        hand_over(tmp_path / "a", tmp_path / "b")
    assert faults.calls[1].name == "link" and (tmp_path / "b/block-0").read_text() == "x"
