"""The result cache: what stands under a key is whole, whatever happened while it was made."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.errors import PlaceError
from compress.store import cache as cache_module
from compress.store.cache import NEW_SECONDS, ResultCache, cache_key, code_version, default_root
from compress.store.durable import MARK


def writing(text: str, record: dict[str, Any] | None = None) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "inner").mkdir()
        (folder / "inner/file").write_text(text)
        return record or {"said": text}

    return write


def test_what_was_put_is_got(tmp_path: Path) -> None:
    store = ResultCache(tmp_path / "cache")
    assert store.get("k") is None and not store.has("k")
    put = store.put("k", writing("a"))
    got = store.get("k")
    assert got == put and got is not None and store.has("k")
    assert got.record == {"said": "a"} and (got.folder / "inner/file").read_text() == "a"
    assert [path.name for path in store.root.iterdir()] == ["k"]


def test_a_step_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    store = ResultCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.put("k", fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "record", [None, "", "[]", '"x"', "{}", '{"files": [], "record": {}}', '{"files": {"gone": "0"}, "record": {}}']
)
def test_a_damaged_record_is_no_step(tmp_path: Path, record: str | None) -> None:
    said: list[str] = []
    store = ResultCache(tmp_path, said.append)
    store.put("k", writing("a"))
    if record is None:
        (tmp_path / "k/record.json").unlink()
    else:
        (tmp_path / "k/record.json").write_text(record)
    assert store.get("k") is None and not list(tmp_path.iterdir())
    assert said == ["cache: result k is damaged; it is discarded and done again"]


def edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


EDITS = {
    "a file": lambda folder: edit(folder / "inner/file", "abc", "abd"),
    "a number in the record": lambda folder: edit(folder / "record.json", "46.8", "99.9"),
    "a blank in the record": lambda folder: edit(folder / "record.json", ": 46.8", ":  46.8"),
    "a digest in the record": lambda folder: edit(folder / "record.json", '"digest": "', '"digest": "0'),
    "another file": lambda folder: (folder / "inner/more").touch(),
    "a link": lambda folder: (folder / "more").symlink_to("inner/file"),
    "a file by another name": lambda folder: (folder / "inner/file").rename(folder / "inner/other"),
}


@pytest.mark.parametrize("what", EDITS)
def test_every_byte_and_every_name_counts(tmp_path: Path, what: str) -> None:
    store = ResultCache(tmp_path, lambda text: None)
    store.put("k", writing("abc", {"sqnr_db": 46.8}))
    EDITS[what](tmp_path / "k")
    assert store.get("k") is None


def test_a_step_is_not_believed_under_another_key(tmp_path: Path) -> None:
    store = ResultCache(tmp_path, lambda text: None)
    store.put("k", writing("abc"))
    (tmp_path / "k").rename(tmp_path / "l")
    assert store.get("l") is None


def test_a_cache_is_its_users_alone_and_drafts_without_our_mark_are_not_swept(tmp_path: Path) -> None:
    store = ResultCache(tmp_path / "deep/cache")
    store.check_place()
    assert store.root.stat().st_mode & 0o777 == 0o700
    mine = store.root / ".draft-letters"
    mine.mkdir()
    (mine / "letter.txt").write_text("mine")
    os.utime(mine, (0, 0))
    store.put("k", writing("abc"))
    assert (mine / "letter.txt").read_text() == "mine"


def test_a_cache_that_cannot_be_is_found_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlaceError, match="a file; the cache is a folder"):
        ResultCache(tmp_path / "file").check_place()
    with pytest.raises(PlaceError, match="cannot be read or written"):
        ResultCache(tmp_path / "file/cache").check_place()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PlaceError, match="the cache cannot be written; name another with --cache"):
        ResultCache(tmp_path).check_place()


def test_a_damaged_step_gives_way_to_a_new_one(tmp_path: Path) -> None:
    """Also when nobody asked for it first."""
    store = ResultCache(tmp_path, lambda text: None)
    store.put("k", writing("old"))
    (tmp_path / "k/inner/file").unlink()
    cached = store.put("k", writing("new"))
    assert (cached.folder / "inner/file").read_text() == "new" and store.get("k") == cached


def test_the_run_that_finishes_first_is_believed(tmp_path: Path) -> None:
    store = ResultCache(tmp_path)

    def slow(folder: Path) -> dict[str, Any]:
        ResultCache(tmp_path).put("k", writing("theirs"))
        return writing("ours")(folder)

    cached = store.put("k", slow)
    assert cached.record == {"said": "theirs"} and (cached.folder / "inner/file").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_a_run_that_comes_between_check_and_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rename, others = ResultCache(tmp_path), os.rename, iter(["theirs"])

    def late(source: Path, target: Path) -> None:
        for said in others:
            ResultCache(tmp_path).put("k", writing(said))
        rename(source, target)

    monkeypatch.setattr(cache_module.os, "rename", late)
    assert store.put("k", writing("ours")).record == {"said": "theirs"}


def test_drafts_of_killed_runs_are_swept_and_those_at_work_are_not(tmp_path: Path) -> None:
    store = ResultCache(tmp_path)
    for name in (".draft-killed", ".draft-new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARK).touch()
        (tmp_path / name / "graph.onnx").write_bytes(b"half")
    old = time.time() - 10 * NEW_SECONDS
    os.utime(tmp_path / ".draft-killed", (old, old))

    def slow(folder: Path) -> dict[str, Any]:
        (folder / "file").write_text("x")
        os.utime(folder.parent, (old, old))
        ResultCache(tmp_path).put("other", writing("b"))
        assert (folder / "file").exists()
        return {}

    store.put("k", slow)
    assert {path.name for path in tmp_path.iterdir()} == {".draft-new", "k", "other"}


def test_a_key_is_its_parts() -> None:
    assert cache_key("a", {"x": 1, "y": (2,)}) == cache_key("a", {"y": [2], "x": 1})
    assert (
        len({cache_key("a", 1), cache_key("a", "1"), cache_key("a", [1]), cache_key(["a", 1]), cache_key("b", 1)}) == 5
    )
    with pytest.raises(TypeError, match="Path has no place in a result's key"):
        cache_key(Path("x"))


def test_a_key_follows_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key("a")
    code_version.cache_clear()
    monkeypatch.setattr(cache_module, "library_versions", lambda: {"torch": "0.0"})
    assert cache_key("a") != before
    code_version.cache_clear()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_CACHE", "/a")
    assert default_root() == Path("/a")
    monkeypatch.delenv("COMPRESS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_root() == Path("/b/compress")


def test_the_record_is_json_that_people_can_read(tmp_path: Path) -> None:
    ResultCache(tmp_path).put("k", writing("a", {"x": 1}))
    stored = json.loads((tmp_path / "k/record.json").read_text())
    assert stored["record"] == {"x": 1} and list(stored["files"]) == ["inner/file"]


def test_a_step_that_was_just_done_is_as_it_will_be_read_back(tmp_path: Path) -> None:
    store = ResultCache(tmp_path)
    done = store.put("k", lambda folder: {"training loss": {"2": 1.0, "10": 0.5}, "held out": (1, 2)})
    kept = store.get("k")
    assert kept is not None
    assert json.dumps(done.record) == json.dumps(kept.record)  # order and all
