"""The sha256 of large files, read once and remembered, so that a plan of any size reads none of them.

**What a weight file is known by.** A result's key holds the sha256 of each weight file: two files that differ never
share one, and a copy elsewhere finds the same results. That takes reading the file whole, so it is done once, by the
first run that does work on it (`apply`, before its first pass, whose own reading then finds the bytes in memory), and
is remembered in the cache by path, size, times of last change, inode and device. A plan writes nothing, and reads no
weights beyond READ_AT_ONCE_BYTES: where nothing is remembered of those, it makes its keys from the same marks of the
file (`identify_file`). Such keys name no result, ever: work is stored and looked up only under keys that `apply` has
settled. What changes a file, changes its marks; who forges them all, or has a file system that keeps none, asks for
`--verify`, which reads again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from compress.store.durable import blame, seal, unseal
from runtime.bundle.files import sha256_of, write_whole

FOLDER = ".digests"
READ_AT_ONCE_BYTES = 256 * 2**20
"""Of files that are not remembered: a plan reads so few nevertheless, in a third of a second."""
TICK_NS = 20_000_000
"""Two changes of a file within so many nanoseconds may bear the same time: what the kernel's clock counts."""
DigestOf = Callable[[Path], str]
"""What stands for a file's content in a digest over several."""


@dataclass(frozen=True)
class FileDigests:
    """The digests that are remembered in the folder of results `root`."""

    root: Path

    def find(self, path: Path) -> str | None:
        """Return the sha256 (hex) that is remembered of the file as it is now; None where it was not read, or changed.

        Raises OSError where there is no such file.
        """
        record = self._read_record(path)
        return str(record["sha256"]) if record is not None and record["marks"] == _read_marks(path) else None

    def find_unread(self, paths: Sequence[Path]) -> tuple[Path, ...]:
        """Return the files of which nothing is remembered, where they are too large to be read for a plan."""
        unknown = tuple(path for path in paths if self.find(path) is None)
        return unknown if sum(path.stat().st_size for path in unknown) > READ_AT_ONCE_BYTES else ()

    def look(self, path: Path) -> str:
        """Return the sha256, remembered or read by this process; nothing is written. Raises OSError."""
        return self.find(path) or _hash(path, json.dumps(_read_marks(path)))

    def read(self, path: Path, anew: bool = False) -> str:
        """Return the sha256, remembered or read and remembered; `anew`: read in any case. Raises OSError."""
        if not anew and (found := self.find(path)):
            return found
        marks = _read_marks(path)
        digest = (_hash.__wrapped__ if anew else _hash)(path, json.dumps(marks))
        if marks == _read_marks(path):  # nobody wrote to it meanwhile
            with blame(self.root):
                record = self._name_record(path)
                for folder in (self.root, record.parent):  # `parents` would leave the first one open to all
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_whole(record, seal({"marks": marks, "sha256": digest}))
        return digest

    def read_all(self, paths: Sequence[Path], verify: bool = False) -> None:
        """Read the files of which nothing is remembered, several at once; `verify`: all of them. Raises OSError."""
        wanted = [path for path in dict.fromkeys(paths) if verify or self.find(path) is None]
        with ThreadPoolExecutor(max(min(len(wanted), os.cpu_count() or 1), 1)) as threads:
            list(threads.map(partial(self.read, anew=verify), wanted))

    def _read_record(self, path: Path) -> dict[str, Any] | None:
        """Return what is remembered of a file, as it was then; None: nothing, or it is damaged."""
        with blame(self.root), suppress(FileNotFoundError):
            return unseal(self._name_record(path).read_bytes())
        return None

    def _name_record(self, path: Path) -> Path:
        return self.root / FOLDER / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"


@lru_cache(maxsize=256)
def _hash(path: Path, marks: str) -> str:
    """Read a file whole for its sha256: once in a process, where it makes a plan and works on it. Raises OSError."""
    found = json.loads(marks)
    newest = max(found["mtime_ns"], found["ctime_ns"])
    time.sleep(min(max(newest + TICK_NS - time.time_ns(), 0), TICK_NS) / 1e9)  # a later change has a later time
    return sha256_of(path)


def identify_file(path: Path) -> str:
    """Return what stands for a file that was not read: its place and marks, in a form that no sha256 has."""
    return "unread " + json.dumps(_read_marks(path), sort_keys=True)


def _read_marks(path: Path) -> dict[str, int | str]:
    """Return what a file is told by without reading it. `ctime_ns` changes, too, where a program sets `mtime_ns` back.

    The path is where links lead.
    """
    found = path.stat()
    return {
        "path": os.fsencode(path.resolve()).hex(),
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
        "device": found.st_dev,
    }
