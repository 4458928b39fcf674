"""A file system that fails: the n-th call on files under given folders raises an error, once or from then on.

Only what goes through Python is seen: `open` and what it gives, and the functions of `os`. What libraries read and
write by themselves (safetensors, ONNX Runtime) is not.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

READ, WRITE, MAKE, CHANGE = "read", "write", "make", "change"
"""What a call does: reads, gives bytes to the disk, makes a name, removes or renames one."""
ERRORS: dict[int, tuple[str, ...]] = {
    errno.EIO: (READ, WRITE, MAKE, CHANGE),
    errno.ENOSPC: (WRITE, MAKE),
    errno.EROFS: (MAKE, CHANGE),
    errno.EACCES: (READ, MAKE, CHANGE),
}
"""Error -> the calls that give it."""
WITH_PATH = {
    "mkdir": MAKE,
    "link": MAKE,
    "symlink": MAKE,
    "unlink": CHANGE,
    "remove": CHANGE,
    "rmdir": CHANGE,
    "rename": CHANGE,
    "replace": CHANGE,
    "listdir": READ,
    "scandir": READ,
}
WITH_HANDLE = {"read": READ, "write": WRITE, "pwrite": WRITE, "fsync": WRITE, "sendfile": WRITE, "ftruncate": WRITE}
MAKING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Call:
    """One call. `names_file`: its error would tell the file."""

    name: str
    kind: str
    path: str
    names_file: bool

    def may_give(self, number: int) -> bool:
        """True for an error that a file system can give for it."""
        return self.kind in ERRORS[number] and (self.names_file or number in (errno.EIO, errno.ENOSPC))


@dataclass
class Faults:
    """Counts the calls under `roots`, each a disk. That of number `at` fails with `number`; None: the first that can.

    With `lasting` those after it fail, too, that are on the same disk and can give that error.
    """

    roots: tuple[Path, ...]
    at: int | None = -1
    number: int = errno.EIO
    lasting: bool = False
    calls: list[Call] = field(default_factory=list)
    broken: Path | None = None

    def note(self, name: str, kind: str, path: str, names_file: bool) -> None:
        """Count a call; OSError if it is to fail."""
        disk = next((root for root in self.roots if path == str(root) or path.startswith(f"{root}/")), None)
        if disk is None:
            return
        call = Call(name, kind, path, names_file)
        may_fail = call.may_give(self.number)
        now = may_fail and self.broken is None if self.at is None else len(self.calls) == self.at
        again = self.lasting and disk == self.broken and may_fail
        self.broken = disk if now else self.broken
        self.calls.append(call)
        if now or again:
            raise OSError(self.number, os.strerror(self.number), *([path] if names_file else []))


class _Raw(io.FileIO):
    """A file whose reads and writes are counted."""

    def __init__(self, faults: Faults, path: str, *args: Any) -> None:
        self._faults, self._path = faults, path
        super().__init__(*args)

    def readinto(self, buffer: Any) -> int:
        self._faults.note("read", READ, self._path, False)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._faults.note("read", READ, self._path, False)
        return super().readall()

    def read(self, size: int | None = -1) -> bytes:
        self._faults.note("read", READ, self._path, False)
        return super().read(-1 if size is None else size)

    def write(self, data: Any) -> int:
        self._faults.note("write", WRITE, self._path, False)
        return super().write(data)


@contextmanager
def failing(faults: Faults) -> Iterator[Faults]:
    """Let calls on files go through `faults` while the context is open."""
    with pytest.MonkeyPatch.context() as patch:
        opened = _open(faults, builtins.open)
        calls = [(builtins, "open", opened), (io, "open", opened), (os, "open", _os_open(faults, os.open))]
        calls += [(os, name, _with_path(faults, name, kind, getattr(os, name))) for name, kind in WITH_PATH.items()]
        calls += [(os, name, _with_handle(faults, name, kind, getattr(os, name))) for name, kind in WITH_HANDLE.items()]
        for place, name, call in calls:
            patch.setattr(place, name, call)
        yield faults


def _path_of(file: Any, folder: int | None = None) -> str:
    """The absolute path of a path, a handle, or a name in an open folder."""
    if isinstance(file, int):
        return os.readlink(f"/proc/self/fd/{file}")
    name = os.fsdecode(file)
    return os.path.abspath(name if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name))


def _with_path(faults: Faults, name: str, kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any = ".", *args: Any, **more: Any) -> Any:
        folder = more.get("dir_fd", more.get("src_dir_fd"))
        faults.note(name, kind, _path_of(path, folder), not isinstance(path, int))
        return plain(path, *args, **more)

    return call


def _with_handle(faults: Faults, name: str, kind: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(handle: int, *args: Any, **more: Any) -> Any:
        faults.note(name, kind, _path_of(handle), False)
        return plain(handle, *args, **more)

    return call


def _os_open(faults: Faults, plain: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, *args: Any, **more: Any) -> int:
        faults.note("open", MAKE if flags & MAKING else READ, _path_of(path, more.get("dir_fd")), True)
        return plain(path, flags, *args, **more)

    return call


def _open(faults: Faults, plain: Callable[..., Any]) -> Callable[..., Any]:
    """`open` as the standard library's own `_pyio.open` puts it together, over a file that is counted."""

    def call(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = _path_of(file)
        if not any(path.startswith(f"{root}/") for root in faults.roots):
            return plain(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int):
            faults.note("open", READ if mode.strip("bt") == "r" else MAKE, path, True)
        raw = _Raw(faults, path, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        kinds: tuple[Any, ...] = (io.BufferedRandom, io.BufferedReader, io.BufferedWriter)
        buffer = kinds[0 if "+" in mode else 1 if "r" in mode else 2](raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding or "utf-8", errors, newline)

    return call
