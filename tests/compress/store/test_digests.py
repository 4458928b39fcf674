"""Digests of files that are read once: remembered while the file is as it was, and read again where it is not."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from compress.store.digests import FOLDER, FileDigests, identify_file


def test_a_file_is_read_once(tmp_path: Path, read_files: list[Path]) -> None:
    (file := tmp_path / "a").write_bytes(b"one")
    digests = FileDigests(tmp_path / "cache")
    assert digests.find(file) is None and identify_file(file).startswith("unread ")
    assert digests.read(file) == hashlib.sha256(b"one").hexdigest() == digests.read(file) == digests.find(file)
    digests.read_all([file, file])
    assert read_files == [file]


def test_what_changes_a_file_drops_its_digest(tmp_path: Path, read_files: list[Path]) -> None:
    (file := tmp_path / "a").write_bytes(b"one")
    digests, times = FileDigests(tmp_path / "cache"), os.stat(file)
    digests.read(file)
    file.write_bytes(b"two")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # as long, and as old as a program can make it
    assert digests.find(file) is None
    assert digests.read(file) == hashlib.sha256(b"two").hexdigest()
    shutil.copy2(file, tmp_path / "b")
    os.replace(tmp_path / "b", file)  # another inode
    assert digests.find(file) is None and digests.read(file) == hashlib.sha256(b"two").hexdigest()
    assert len(read_files) == 3


def test_a_copy_has_the_same_digest_and_other_marks(tmp_path: Path) -> None:
    (file := tmp_path / "a").write_bytes(b"one")
    copy = Path(shutil.copy2(file, tmp_path / "b"))
    (link := tmp_path / "c").symlink_to(file)
    digests = FileDigests(tmp_path / "cache")
    assert digests.read(file) == digests.read(copy) and digests.find(link) == digests.find(file)
    assert identify_file(file) != identify_file(copy)


def test_verifying_reads_what_is_remembered(tmp_path: Path, read_files: list[Path]) -> None:
    (file := tmp_path / "a").write_bytes(b"one")
    digests = FileDigests(tmp_path / "cache")
    digests.read(file)
    digests.read_all([file], verify=True)
    assert read_files == [file, file]
    record = next((tmp_path / "cache" / FOLDER).iterdir())
    record.write_bytes(record.read_bytes().replace(b"sha256", b"sha257"))  # damaged: as if nothing were remembered
    assert digests.find(file) is None
